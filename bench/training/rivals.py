"""What is compared in a training benchmark: ways to train a copy of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import algorithms, comm, optim
from bagua_kernels.algorithms import Exchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Tuning
from bench.training.models import batch, model

HOOK = "hook "  # of DDP, with the spec of ours behind it
# Of one of ours, behind its name.
HEALS, VERIFIES = " healing", " verified"
_WARM = 3  # steps: DDP lays out buckets anew in the second, its PowerSGD begins with the third
OURS: dict[str, tuple[type[algorithms.Algorithm], dict[str, Any]]] = {
    "allreduce": (algorithms.GradientAllReduce, {}),
    "bytegrad": (algorithms.ByteGrad, {}),
    "int8": (algorithms.CompressedAllReduce, {"codec": "absmax_int8", "error_feedback": False}),
    "sign": (algorithms.SignSGD, {}),
    "topk": (algorithms.TopK, {"ratio": 0.01}),
    **{f"powersgd {rank}": (algorithms.PowerSGD, {"rank": rank}) for rank in (1, 2, 4)},
    **{f"powersgd {rank} in turn": (algorithms.PowerSGD, {"rank": rank, "alternate": True}) for rank in (2, 4)},
}
# Exchange parameters instead of gradients.
NEIGHBOURS: dict[str, tuple[type[algorithms.Algorithm], dict[str, Any]]] = {
    "decentralized": (algorithms.Decentralized, {"peers": "one_peer_exponential"}),
    "sgp": (algorithms.StochasticGradientPush, {"peers": "one_peer_exponential"}),
    "lowprec 8": (algorithms.LowPrecisionDecentralized, {"codec": "minmax_uint8"}),
    "lowprec 2": (algorithms.LowPrecisionDecentralized, {"codec": "minmax_uint2:stochastic=true"}),
    "choco": (algorithms.Choco, {"codec": "minmax_uint8"}),
    "d2": (algorithms.D2, {"peers": "lazy_ring"}),
    # Four ranks send 6 models per step, as in a ring all-reduce; around a ring it is 8.
    "d2 chain": (algorithms.D2, {"peers": "chain"}),
}
# Take many steps between exchanges, in which messages may be under way.
LOCAL: dict[str, tuple[type[algorithms.Algorithm], dict[str, Any]]] = {
    "sparse_loco": (algorithms.SparseLoCo, {"interval": 30}),
    "sparse_loco delayed": (algorithms.SparseLoCo, {"interval": 30, "delay": 29}),
    "diloco int4": (algorithms.DiLoCo, {"interval": 30, "codec": "absmax_int4", "delay": 10}),
    "local_sgd": (algorithms.LocalSGD, {"interval": 16}),
}
ASYNCHRONOUS: dict[str, tuple[type[algorithms.Algorithm], dict[str, Any]]] = {
    "async 8 bits": (algorithms.AsyncModelAverage, {"interval": 32, "codec": "minmax_uint8"}),
    "async float32": (algorithms.AsyncModelAverage, {"interval_ms": 0.0}),
    "wagma": (algorithms.Wagma, {}),
}
OURS |= {
    **{
        f"{name} if faster": (kind, {**own, "only_if_faster": True})
        for name, (kind, own) in OURS.items()
        if kind is not algorithms.GradientAllReduce and not own.get("alternate")
    },
    **{
        f"{name} in backward": (OURS[name][0], {**OURS[name][1], "apply_in_backward": True})
        for name in (
            "allreduce",
            "bytegrad",
            *(f"powersgd {rank}{sides}" for rank in (2, 4) for sides in ("", " in turn")),
        )
    },
    **NEIGHBOURS,
    **LOCAL,
    **ASYNCHRONOUS,
    "auto": (algorithms.AutoTune, {}),
    "int4": (algorithms.CompressedAllReduce, {"codec": "absmax_int4"}),
}


class Silent(algorithms.GradientAllReduce):
    """All the work of the engine, and no communication."""

    name = "silent"

    def exchange_for(self, bucket: Bucket, communicator: comm.Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return Nothing(bucket, communicator)


class Nothing(Exchange):
    """Leaves each rank its own gradients."""

    # As what it stands for: it does not care either where a bucket's memory is.
    one_collective = True
    takes_memory = True
    has_memory = False

    def run(self, step: int) -> Iterator[comm.Work]:
        """See `Exchange.run`."""
        yield from ()


def ddp(module: torch.nn.Module, hook: str) -> torch.nn.Module:
    """DDP as it is, or with a communication hook."""
    if hook.startswith("powersgd"):
        # With several buckets the hook's collectives meet those of other buckets on Gloo, and a rank aborts.
        wrapped = DistributedDataParallel(module, bucket_cap_mb=1000)
        rank = int(hook.split()[1])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(module, broadcast_buffers=hook != "silent")
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "silent":
        # Not a function with annotations: DDP compares them with classes, and here they are strings.
        wrapped.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
    return wrapped


def hooked(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, algorithms.ddp.Hook]:
    """DDP with one of our hooks, which the name has behind `HOOK`."""
    wrapped = DistributedDataParallel(module)
    hook = algorithms.ddp.hook(name.removeprefix(HOOK), wrapped)
    wrapped.register_comm_hook(None, hook)
    return wrapped, hook


def _done(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


class Rival:
    """A copy of a model with its optimizer, and a way to train it."""

    def __init__(
        self,
        name: str,
        of: str,
        keep: bool = False,
        wrapper: type[algorithms.Algorithm] | None = None,
        members: comm.Membership | None = None,
        **options: Any,
    ) -> None:
        """Builds it; collective.

        Args:
            name: "alone", "ddp", "ddp" and a hook of PyTorch's, `HOOK` and one of ours, or one of `OURS`. Behind that may be
                `HEALS`, or `VERIFIES`, which compares ranks in each step.
            of: the model's name.
            keep: True if gradients are zeroed instead of dropped before a step.
            wrapper: the algorithm, instead of the one of that name.
            members: among whom it heals, if it does.
            **options: more arguments of ours.
        """
        if name.endswith(HEALS):
            assert members is not None
            options |= {"communicator": members.communicator, "on_failure": "heal"}
        elif name.endswith(VERIFIES):
            options |= {"verify_every": 1}
        self.name, self.keep = name, keep
        module = model(of)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        self.algorithm: algorithms.Algorithm | None = None
        self.hook: algorithms.ddp.Hook | None = None
        self.module = module
        if wrapper is not None:
            self.module = self.algorithm = wrapper(module, broadcast_buffers=False)
        elif (plain := name.removesuffix(HEALS).removesuffix(VERIFIES)) in OURS:
            kind, arguments = OURS[plain]
            if arguments.get("apply_in_backward"):
                self.optimizer = optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
            self.module = self.algorithm = kind(module, self.optimizer, **arguments, **options)
        elif name.startswith(HOOK):
            self.module, self.hook = hooked(module, name)
        elif name.startswith("ddp"):
            self.module = ddp(module, name.removeprefix("ddp").strip())
        self.x, self.y = batch(of, comm.rank())

    def backward(self) -> None:
        self.loss().backward()

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=not self.keep)
        return torch.nn.functional.cross_entropy(self.module(self.x), self.y)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def conclude(self) -> None:
        """Waits for messages that a step has left under way."""
        if isinstance(self.algorithm, algorithms.ModelAlgorithm):
            self.algorithm.wait()

    def warm_up(self) -> None:
        for _ in range(_WARM):
            self.step()

    def try_out(self) -> str:
        """Takes the steps in which an algorithm measures whether compression pays; returns the result."""
        if self.algorithm is None or "if faster" not in self.name:
            return ""
        while self.algorithm.stats().trial not in ("compressed", "plain"):
            self.step()
        return self.algorithm.stats().trial

    def follow(self, tuning: Tuning | None) -> None:
        """Has the algorithm's own communicators, which were made before, follow a tuning."""
        found = [] if self.hook is None else self.hook.communicators
        if self.algorithm is not None:
            found = self.algorithm._communicators()
        for each in found:
            if isinstance(each, comm.StripedCommunicator):
                each.retune(tuning or Tuning())

    def close(self) -> None:
        if self.algorithm is not None:
            self.algorithm.close()
        if self.hook is not None:
            self.hook.close()
