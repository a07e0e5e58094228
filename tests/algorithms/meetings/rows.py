"""The algorithms whose features meet: what makes each, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, AutoTune
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.topology import GivenMatrix
from tests.oracles.gossip import column_stochastic

# What is known of an algorithm: "mean", it averages gradients exactly; "lossy", gradients have the same bits on all ranks;
# "gossip", one round for each step; "local", one round for some steps; "courier", rounds at any time.
Nodes = tuple[tuple[int, ...], ...]
Family = Literal["mean", "lossy", "gossip", "local", "courier"]


@dataclass(frozen=True)
class Row:
    """An algorithm with options.

    Attributes:
        name: of the class, for `Algorithm.registered`.
        family: what is known of it.
        rule: name of a rule of the simulation; empty if there is none.
        options: of the constructor.
        numbers: of the rule.
        peers: makes the mixing matrix of some ranks.
        dtype: of parameters.
        conserves: True if the mean of all ranks moves by nothing but the mean of their steps.
        remembers: True if it takes `scaler`, for what it keeps.
    """

    name: str
    family: Family
    rule: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    peers: Callable[[int], np.ndarray] | None = None
    dtype: torch.dtype = torch.float64
    conserves: bool = False
    remembers: bool = False

    @property
    def kind(self) -> type[Algorithm]:
        return Algorithm.registered[self.name]

    @property
    def own_optimizer(self) -> bool:
        return self.name in ("qadam", "onebit_adam")

    @property
    def joins(self) -> bool:
        """False if it refuses ranks with different numbers of batches."""
        return not (self.own_optimizer or self.options.get("majority_vote"))

    @property
    def delays(self) -> bool:
        return bool(self.options.get("delay"))

    def members(self, size: int, nodes: Nodes) -> int:
        """The members of the graph: nodes where these have equal numbers of ranks, else ranks."""
        return len(nodes) if len({len(node) for node in nodes}) == 1 else size

    def matrix(self, size: int, nodes: Nodes) -> np.ndarray | None:
        """The mixing matrix of all ranks; None without one. Ranks of a node take their mean before."""
        peers = self.peers or self.numbers.get("matrix")
        if peers is None:
            return None
        members = self.members(size, nodes)
        share = size // members
        found: np.ndarray = np.kron(peers(members), np.full((share, share), 1 / share))
        return found

    def arguments(self, size: int, nodes: Nodes = ()) -> dict[str, Any]:
        """What the constructor gets beside the module and the optimizer, on some ranks."""
        found = dict(self.options)
        if self.peers is not None:
            members = self.members(size, nodes)
            found["peers"] = GivenMatrix(members, self.peers(members).tolist())
        if nodes:
            found["nodes"] = nodes
        return found

    def make(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        communicator: Communicator,
        nodes: Nodes = (),
        **options: Any,
    ) -> Algorithm:
        arguments = {**self.arguments(communicator.size, nodes), **options}
        given = None if self.own_optimizer else optimizer
        found = self.kind(net, given, communicator=communicator, **arguments)
        if isinstance(found, AutoTune):
            found.search.exact_steps = 1 << 20
        return found


def chain(size: int) -> np.ndarray:
    """Unequal weights: each rank gives its neighbours in a chain 0.3. All eigenvalues are above -1/3."""
    w = np.eye(size)
    for rank in range(size - 1):
        w[rank, rank + 1] = w[rank + 1, rank] = 0.3
        w[rank, rank] -= 0.3
        w[rank + 1, rank + 1] -= 0.3
    return w


def unequal(size: int) -> np.ndarray:
    """A directed graph, in which rank 0 sends to all, and the others to the next one."""
    if size == 2:
        # Halves would make rows sum to 1, too, and then weights stay 1.
        return np.array([[0.75, 0.5], [0.25, 0.5]])
    return column_stochastic(size, [range(1, size), *([(rank + 1) % size] for rank in range(1, size))])


def everybody(size: int) -> np.ndarray:
    return np.full((size, size), 1 / size)


WHOLE: dict[str, Any] = {"exact": (), "min_numel": 0}  # of tiny parameters
F32 = torch.float32


def lossy(name: str, remembers: bool = False, **options: Any) -> Row:
    return Row(name, "lossy", options=options, dtype=F32, remembers=remembers)


ROWS: dict[str, Row] = {
    "allreduce": Row("allreduce", "mean", "mean"),
    "auto": Row("auto", "mean", "mean"),
    # Parameters of float64 travel uncompressed.
    **{
        f"{name}_64": Row(name, "mean", "mean")
        for name in ("compressed", "bytegrad", "fp8", "natural", "qsgd", "terngrad", "double_squeeze")
    },
    "compressed": lossy("compressed", codec="sign:block=64", remembers=True),
    "bytegrad": lossy("bytegrad", block=64),
    "fp8": lossy("fp8"),
    "natural": lossy("natural"),
    "qsgd": lossy("qsgd"),
    "terngrad": lossy("terngrad"),
    "double_squeeze": lossy("double_squeeze", remembers=True, **WHOLE),
    "onebit": lossy("onebit", remembers=True, warmup_steps=2, **WHOLE),
    "sign": lossy("sign", remembers=True, **WHOLE),
    "sign_vote": lossy("sign", majority_vote=True),
    "topk": lossy("topk", remembers=True, ratio=0.2, **WHOLE),
    "randomk": lossy("randomk", remembers=True, ratio=0.3, **WHOLE),
    "dgc": lossy("dgc", remembers=True, ratio=0.2, **WHOLE),
    "powersgd": lossy("powersgd", remembers=True, min_compression=0.5),
    "powersgd_in_turn": lossy("powersgd", remembers=True, min_compression=0.5, alternate=True),
    "qadam": lossy("qadam", remembers=True, freeze_step=2, eps=1e-3),
    "onebit_adam": lossy("onebit_adam", remembers=True, freeze_step=2, eps=1e-3, **WHOLE),
    "decentralized": Row("decentralized", "gossip", "dpsgd", peers=chain, conserves=True),
    "decentralized_all": Row(
        "decentralized",
        "gossip",
        "dpsgd",
        {"peers": "all", "bucket_bytes": 100},
        {"matrix": everybody},
        conserves=True,
    ),
    "decentralized_2": Row("decentralized", "gossip", "dpsgd", {"interval": 2}, peers=chain, conserves=True),
    "d2": Row("d2", "gossip", "d2", peers=chain, conserves=True),
    "sgp": Row("sgp", "gossip", "push", peers=chain, conserves=True),
    "sgp_unequal": Row("sgp", "gossip", "push", {"interval": 2, "bucket_bytes": 100}, peers=unequal, conserves=True),
    "lowprec": Row("lowprec", "gossip", dtype=F32, peers=chain),
    "lowprec_whole": Row("lowprec", "gossip", "dcd", {"codec": "identity"}, dtype=F32, peers=chain, conserves=True),
    "choco": Row("choco", "gossip", options={"codec": "sign", "eta": 0.3}, dtype=F32, peers=chain, conserves=True),
    "choco_whole": Row(
        "choco",
        "gossip",
        "choco",
        {"codec": "identity", "eta": 0.6},
        {"eta": 0.6},
        dtype=F32,
        peers=chain,
        conserves=True,
    ),
    "local_sgd": Row("local_sgd", "local", "outer", {"interval": 2}, {"interval": 2}),
    "local_sgd_delay": Row("local_sgd", "local", "outer", {"interval": 3, "delay": 1}, {"interval": 3, "delay": 1}),
    "local_sgd_sign": Row("local_sgd", "local", options={"interval": 2, "codec": "sign", **WHOLE}, dtype=F32),
    "post_local_sgd": Row(
        "post_local_sgd", "local", "outer", {"first_phase": 2, "interval": 3}, {"first": 2, "interval": 3}
    ),
    "slow_mo": Row("slow_mo", "local", "slow", {"interval": 2, "slow_momentum": 0.5}, {"interval": 2, "momentum": 0.5}),
    "diloco": Row(
        "diloco", "local", "outer", {"interval": 2, "outer_momentum": 0.9}, {"interval": 2, "lr": 0.7, "momentum": 0.9}
    ),
    "diloco_delay": Row(
        "diloco",
        "local",
        "outer",
        {"interval": 3, "delay": 2, "outer_lr": 0.5, "outer_momentum": 0.4},
        {"interval": 3, "delay": 2, "lr": 0.5, "momentum": 0.4},
    ),
    "diloco_blend": Row(
        "diloco",
        "local",
        "outer",
        {"interval": 2, "delay": 1, "blend": 0.5, "outer_momentum": 0.9},
        {"interval": 2, "delay": 1, "blend": 0.5, "lr": 0.7, "momentum": 0.9},
    ),
    "diloco_int8": Row("diloco", "local", options={"interval": 2, "codec": "absmax_int8", **WHOLE}, dtype=F32),
    # With Muon, whose first steps round to bfloat16.
    "mu_loco": Row("mu_loco", "local", options={"interval": 2, "min_numel": 0}, dtype=F32),
    # Tensors of so few elements are not compressed.
    "sparse_loco": Row("sparse_loco", "local", "outer", {"interval": 2}, {"interval": 2}, dtype=F32),
    "wagma": Row("wagma", "courier", options={"period": 3}, conserves=True),
    "async_model_average": Row("async_model_average", "courier", options={"interval": 1}, conserves=True),
    "async_model_average_ms": Row("async_model_average", "courier", options={"interval_ms": 1}, conserves=True),
    "async_model_average_int8": Row(
        "async_model_average", "courier", options={"interval_ms": 1, "codec": "minmax_uint8"}, dtype=F32
    ),
    "async_decentralized": Row("async_decentralized", "courier", conserves=True),
    "async_decentralized_int8": Row(
        "async_decentralized", "courier", options={"codec": "minmax_uint8"}, dtype=F32, conserves=True
    ),
}
