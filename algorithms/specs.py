"""`from_spec` for type checkers, which know the class that a name without options stands for."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch.optim import Optimizer

from bagua_kernels.algorithms.adam.onebit_adam import OneBitAdam
from bagua_kernels.algorithms.adam.qadam import QAdam
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.allreduce import GradientAllReduce
from bagua_kernels.algorithms.asynchronous.async_decentralized import AsyncDecentralized
from bagua_kernels.algorithms.asynchronous.async_model_average import AsyncModelAverage
from bagua_kernels.algorithms.asynchronous.wagma import Wagma
from bagua_kernels.algorithms.choosing.auto import AutoTune
from bagua_kernels.algorithms.compressed import CompressedAllReduce
from bagua_kernels.algorithms.gossip.choco import Choco
from bagua_kernels.algorithms.gossip.d2 import D2
from bagua_kernels.algorithms.gossip.decentralized import Decentralized
from bagua_kernels.algorithms.gossip.lowprec import LowPrecisionDecentralized
from bagua_kernels.algorithms.gossip.sgp import StochasticGradientPush
from bagua_kernels.algorithms.local_steps.diloco import DiLoCo
from bagua_kernels.algorithms.local_steps.local_sgd import LocalSGD
from bagua_kernels.algorithms.local_steps.mu_loco import MuLoCo
from bagua_kernels.algorithms.local_steps.post_local_sgd import PostLocalSGD
from bagua_kernels.algorithms.local_steps.slow_mo import SlowMo
from bagua_kernels.algorithms.local_steps.sparse_loco import SparseLoCo
from bagua_kernels.algorithms.powersgd import PowerSGD
from bagua_kernels.algorithms.quantized.bytegrad import ByteGrad
from bagua_kernels.algorithms.quantized.double_squeeze import DoubleSqueeze
from bagua_kernels.algorithms.quantized.fp8 import FP8AllReduce
from bagua_kernels.algorithms.quantized.natural import NaturalCompression
from bagua_kernels.algorithms.quantized.onebit import OneBitSGD
from bagua_kernels.algorithms.quantized.qsgd import QSGD
from bagua_kernels.algorithms.quantized.sign import SignSGD
from bagua_kernels.algorithms.quantized.terngrad import TernGrad
from bagua_kernels.algorithms.sparse.dgc import DGC
from bagua_kernels.algorithms.sparse.randomk import RandomK
from bagua_kernels.algorithms.sparse.topk import TopK


@overload
def from_spec(
    spec: Literal["allreduce"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> GradientAllReduce: ...
@overload
def from_spec(
    spec: Literal["async_decentralized"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> AsyncDecentralized: ...
@overload
def from_spec(
    spec: Literal["async_model_average"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> AsyncModelAverage: ...
@overload
def from_spec(
    spec: Literal["auto"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> AutoTune: ...
@overload
def from_spec(
    spec: Literal["bytegrad"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> ByteGrad: ...
@overload
def from_spec(
    spec: Literal["choco"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> Choco: ...
@overload
def from_spec(
    spec: Literal["compressed"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> CompressedAllReduce: ...
@overload
def from_spec(
    spec: Literal["d2"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> D2: ...
@overload
def from_spec(
    spec: Literal["decentralized"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> Decentralized: ...
@overload
def from_spec(
    spec: Literal["dgc"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> DGC: ...
@overload
def from_spec(
    spec: Literal["diloco"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> DiLoCo: ...
@overload
def from_spec(
    spec: Literal["double_squeeze"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> DoubleSqueeze: ...
@overload
def from_spec(
    spec: Literal["fp8"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> FP8AllReduce: ...
@overload
def from_spec(
    spec: Literal["local_sgd"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> LocalSGD: ...
@overload
def from_spec(
    spec: Literal["lowprec"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> LowPrecisionDecentralized: ...
@overload
def from_spec(
    spec: Literal["mu_loco"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> MuLoCo: ...
@overload
def from_spec(
    spec: Literal["natural"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> NaturalCompression: ...
@overload
def from_spec(
    spec: Literal["onebit"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> OneBitSGD: ...
@overload
def from_spec(
    spec: Literal["onebit_adam"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> OneBitAdam: ...
@overload
def from_spec(
    spec: Literal["post_local_sgd"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> PostLocalSGD: ...
@overload
def from_spec(
    spec: Literal["powersgd"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> PowerSGD: ...
@overload
def from_spec(
    spec: Literal["qadam"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> QAdam: ...
@overload
def from_spec(
    spec: Literal["qsgd"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> QSGD: ...
@overload
def from_spec(
    spec: Literal["randomk"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> RandomK: ...
@overload
def from_spec(
    spec: Literal["sgp"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> StochasticGradientPush: ...
@overload
def from_spec(
    spec: Literal["sign"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> SignSGD: ...
@overload
def from_spec(
    spec: Literal["slow_mo"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> SlowMo: ...
@overload
def from_spec(
    spec: Literal["sparse_loco"],
    module: torch.nn.Module,
    optimizer: Optimizer | None = None,
    **arguments: Any,
) -> SparseLoCo: ...
@overload
def from_spec(
    spec: Literal["terngrad"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> TernGrad: ...
@overload
def from_spec(
    spec: Literal["topk"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> TopK: ...
@overload
def from_spec(
    spec: Literal["wagma"], module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> Wagma: ...
@overload
def from_spec(
    spec: str, module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any
) -> Algorithm: ...
def from_spec(spec: str, module: torch.nn.Module, optimizer: Optimizer | None = None, **arguments: Any) -> Algorithm:
    """Wraps a module in the algorithm that a text names, such as "bytegrad" or "bytegrad:block=128".

    Args:
        spec: a name, then its options; or a codec for `CompressedAllReduce`, such as "absmax_int8:block=256".
        module: what to wrap.
        optimizer: as for the class.
        **arguments: further arguments of the class.

    Raises:
        TypeError: the spec is no text, or an argument is of another type.
        ValueError: the name or an option is unknown, or a value does not fit.
    """
    return Algorithm.from_spec(spec, module, optimizer, **arguments)
