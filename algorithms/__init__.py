"""Training algorithms: one class each, used like `DistributedDataParallel`."""

if __name__ != "bagua_kernels.algorithms":
    raise ImportError(f"import this package as bagua_kernels.algorithms, not as {__name__}")

from bagua_kernels.algorithms import ddp as ddp
from bagua_kernels.algorithms.adam.frozen_adam import FrozenAdam as FrozenAdam
from bagua_kernels.algorithms.adam.onebit_adam import OneBitAdam as OneBitAdam
from bagua_kernels.algorithms.adam.qadam import QAdam as QAdam
from bagua_kernels.algorithms.algorithm import Algorithm as Algorithm
from bagua_kernels.algorithms.allreduce import GradientAllReduce as GradientAllReduce
from bagua_kernels.algorithms.asynchronous import simulate as simulate
from bagua_kernels.algorithms.asynchronous.async_decentralized import AsyncDecentralized as AsyncDecentralized
from bagua_kernels.algorithms.asynchronous.async_model_average import AsyncModelAverage as AsyncModelAverage
from bagua_kernels.algorithms.asynchronous.wagma import Wagma as Wagma
from bagua_kernels.algorithms.choosing.auto import AutoTune as AutoTune
from bagua_kernels.algorithms.choosing.preset import Preset as Preset
from bagua_kernels.algorithms.choosing.preset import preset as preset
from bagua_kernels.algorithms.compressed import CompressedAllReduce as CompressedAllReduce
from bagua_kernels.algorithms.data.balanced_batches import (
    LoadBalancingDistributedBatchSampler as LoadBalancingDistributedBatchSampler,
)
from bagua_kernels.algorithms.data.balanced_sampler import (
    LoadBalancingDistributedSampler as LoadBalancingDistributedSampler,
)
from bagua_kernels.algorithms.data.costs import LengthCost as LengthCost
from bagua_kernels.algorithms.data.round_sampler import RoundSampler as RoundSampler
from bagua_kernels.algorithms.exchanges.exchange import Exchange as Exchange
from bagua_kernels.algorithms.gossip.choco import Choco as Choco
from bagua_kernels.algorithms.gossip.d2 import D2 as D2
from bagua_kernels.algorithms.gossip.decentralized import Decentralized as Decentralized
from bagua_kernels.algorithms.gossip.lowprec import (
    LowPrecisionDecentralized as LowPrecisionDecentralized,
)
from bagua_kernels.algorithms.gossip.sgp import StochasticGradientPush as StochasticGradientPush
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm as GradientAlgorithm
from bagua_kernels.algorithms.local_steps.diloco import DiLoCo as DiLoCo
from bagua_kernels.algorithms.local_steps.local_sgd import LocalSGD as LocalSGD
from bagua_kernels.algorithms.local_steps.mu_loco import MuLoCo as MuLoCo
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop as OuterLoop
from bagua_kernels.algorithms.local_steps.outer_nesterov import OuterNesterov as OuterNesterov
from bagua_kernels.algorithms.local_steps.penalty import Penalty as Penalty
from bagua_kernels.algorithms.local_steps.post_local_sgd import PostLocalSGD as PostLocalSGD
from bagua_kernels.algorithms.local_steps.slow_mo import SlowMo as SlowMo
from bagua_kernels.algorithms.local_steps.sparse_loco import SparseLoCo as SparseLoCo
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm as ModelAlgorithm
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm as RoundAlgorithm
from bagua_kernels.algorithms.policy.guard import Guard as Guard
from bagua_kernels.algorithms.policy.optimizer_fit import OptimizerFitWarning as OptimizerFitWarning
from bagua_kernels.algorithms.powersgd import PowerSGD as PowerSGD
from bagua_kernels.algorithms.quantized.bytegrad import ByteGrad as ByteGrad
from bagua_kernels.algorithms.quantized.double_squeeze import DoubleSqueeze as DoubleSqueeze
from bagua_kernels.algorithms.quantized.fp8 import FP8AllReduce as FP8AllReduce
from bagua_kernels.algorithms.quantized.natural import NaturalCompression as NaturalCompression
from bagua_kernels.algorithms.quantized.onebit import OneBitSGD as OneBitSGD
from bagua_kernels.algorithms.quantized.qsgd import QSGD as QSGD
from bagua_kernels.algorithms.quantized.sign import SignSGD as SignSGD
from bagua_kernels.algorithms.quantized.terngrad import TernGrad as TernGrad
from bagua_kernels.algorithms.registry import names as names
from bagua_kernels.algorithms.registry import register as register
from bagua_kernels.algorithms.sparse.dgc import DGC as DGC
from bagua_kernels.algorithms.sparse.randomk import RandomK as RandomK
from bagua_kernels.algorithms.sparse.topk import TopK as TopK
from bagua_kernels.algorithms.specs import from_spec as from_spec
from bagua_kernels.algorithms.stats import Stats as Stats
from bagua_kernels.algorithms.wrapping.draft import Draft as Draft

__all__ = [
    "D2",
    "DGC",
    "QSGD",
    "Algorithm",
    "AsyncDecentralized",
    "AsyncModelAverage",
    "AutoTune",
    "ByteGrad",
    "Choco",
    "CompressedAllReduce",
    "Decentralized",
    "DiLoCo",
    "DoubleSqueeze",
    "Exchange",
    "FP8AllReduce",
    "FrozenAdam",
    "GradientAlgorithm",
    "GradientAllReduce",
    "Guard",
    "LengthCost",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "ModelAlgorithm",
    "MuLoCo",
    "NaturalCompression",
    "OneBitAdam",
    "OneBitSGD",
    "OptimizerFitWarning",
    "OuterLoop",
    "OuterNesterov",
    "Penalty",
    "PostLocalSGD",
    "PowerSGD",
    "Preset",
    "QAdam",
    "RandomK",
    "RoundAlgorithm",
    "RoundSampler",
    "SignSGD",
    "SlowMo",
    "SparseLoCo",
    "Stats",
    "StochasticGradientPush",
    "TernGrad",
    "TopK",
    "Wagma",
    "ddp",
    "from_spec",
    "names",
    "preset",
    "register",
    "simulate",
]
