"""What all algorithms share: a module used like `DistributedDataParallel`, and the registry that finds one by name."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.engine import Counters, Engine
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator
from bagua_kernels.compression.codec import parse_spec

BROADCAST_BYTES = 64 << 20
BUCKET_BYTES = 10 << 20


@dataclass(frozen=True)
class Stats:
    """What an algorithm has done since it was made, on this rank.

    Attributes:
        steps: backward passes whose gradients were exchanged.
        bytes_sent: bytes put on the wire for gradients and buffers.
        wait_seconds: time that training waited for communication at the end of backward passes.
        exchange_seconds: time that the communication thread was busy, most of it beside backward.
    """

    steps: int
    bytes_sent: int
    wait_seconds: float
    exchange_seconds: float


class Algorithm(torch.nn.Module):
    """Base of all gradient-averaging algorithms.

    At construction, rank 0's parameters (frozen ones too) and buffers are given to all ranks. On one rank everything is left
    to the module, bit for bit. A subclass says how a bucket is exchanged.

    Attributes:
        name: what `from_spec` knows the algorithm by.
        module: the wrapped module.
    """

    name: ClassVar[str]

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        communicator: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        broadcast_buffers: bool = True,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: on the communicator's device, with equal parameters' names, shapes and dtypes on all ranks.
            optimizer: if given, its state is set to rank 0's.
            communicator: the ranks that train together; those of `comm.init()` if None. The algorithm talks on a duplicate of
                its own, so its messages never meet the caller's.
            bucket_bytes: gradients are exchanged in buckets of about this size. Smaller ones start earlier and overlap
                better with backward; larger ones pay the network's latency less often.
            broadcast_buffers: whether each forward pass in training mode begins with rank 0's buffers on all ranks.

        Raises:
            TypeError: a trainable parameter is complex.
            ValueError: the modules differ between ranks, a parameter is on another device than the communicator, or
                `bucket_bytes` is below 1.
        """
        super().__init__()
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes=}")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._engine: Engine | None = None
        world = comm.world() if communicator is None else communicator
        self._communicator = world.duplicate()
        self._setup_bytes = 0
        if self._communicator.size == 1:
            return
        check_module(module, self._communicator)
        synchronize([*module.parameters(), *module.buffers()], self._communicator)
        if optimizer is not None:
            optimizer.load_state_dict(self._communicator.broadcast_object(optimizer.state_dict()))
        self._setup_bytes = self._communicator.bytes_sent
        trainable = [p for p in module.parameters() if p.requires_grad]
        if trainable:
            self._engine = Engine(trainable, self.exchange, align=self.alignment, bucket_bytes=bucket_bytes)

    @property
    def alignment(self) -> int:
        """Elements to whose multiples tensors are aligned in a bucket."""
        return 1

    def exchange(self, bucket: Bucket, step: int) -> None:
        """Replaces `bucket.flat` and `bucket.exact` by their means over all ranks; runs on the communication thread.

        Args:
            bucket: the gradients of one bucket.
            step: number of the backward pass, equal on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how a bucket is exchanged")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if self._engine is not None:
            self._engine.check_idle()
            if self.training and self.broadcast_buffers and self._engine.enabled:
                synchronize(list(self.module.buffers()), self._communicator)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, backward passes accumulate gradients locally; the next one outside exchanges the sum."""
        if self._engine is None:
            yield
            return
        before, self._engine.enabled = self._engine.enabled, False
        try:
            yield
        finally:
            self._engine.enabled = before

    def close(self) -> None:
        """Stops exchanging gradients and frees the connections; collective over all ranks."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._communicator.close()

    def stats(self) -> Stats:
        """What the algorithm has done so far on this rank."""
        counters = Counters() if self._engine is None else self._engine.counters
        sent = self._communicator.bytes_sent - self._setup_bytes
        return Stats(counters.steps, sent, counters.wait_seconds, counters.exchange_seconds)

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What, beside the module's and the optimizer's state, a resumed run needs to go on as if uninterrupted."""
        return {"steps": self.stats().steps}

    def load_algorithm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `algorithm_state_dict` gave.

        Raises:
            ValueError: the state has other keys.
        """
        if set(state) != {"steps"}:
            raise ValueError(f"expected the state of {type(self).__name__} with the key 'steps', got {sorted(state)}")
        if self._engine is not None:
            self._engine.counters.steps = int(state["steps"])

    @classmethod
    def from_spec(cls, spec: str, module: torch.nn.Module, **arguments: Any) -> Algorithm:
        """As the function `from_spec`, for this class only."""
        algorithm = from_spec(spec, module, **arguments)
        if not isinstance(algorithm, cls):
            raise ValueError(f"{spec!r} is a {type(algorithm).__name__}, expected a {cls.__name__}")
        return algorithm


_algorithms: dict[str, type[Algorithm]] = {}


def register(algorithm: type[Algorithm]) -> type[Algorithm]:
    """Makes an algorithm known to `from_spec` by its `name`; usable as a decorator.

    Raises:
        ValueError: the name is taken by another class.
    """
    if _algorithms.setdefault(algorithm.name, algorithm) is not algorithm:
        raise ValueError(f"the algorithm name {algorithm.name!r} is taken by {_algorithms[algorithm.name].__name__}")
    return algorithm


def names() -> list[str]:
    """The names that `from_spec` knows."""
    return sorted(_algorithms)


def from_spec(
    spec: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
) -> Algorithm:
    """Wraps a module in the algorithm that a text names, such as "bytegrad" or "bytegrad:block=128".

    Args:
        spec: a name, then its options.
        module: what to wrap.
        optimizer: as for the class.
        **arguments: further arguments of the class.

    Raises:
        ValueError: the name or an option is unknown, or a value does not fit.
    """
    name, parsed = parse_spec(spec)
    options: dict[str, Any] = {**parsed, **arguments}
    if name not in _algorithms:
        raise ValueError(f"there is no algorithm {name!r} in {spec!r}; known are {', '.join(names())}")
    try:
        return _algorithms[name](module, optimizer, **options)
    except TypeError as error:
        raise ValueError(f"the options of {spec!r} do not fit: {error}") from error


def check_module(module: torch.nn.Module, communicator: Communicator) -> None:
    """Raises unless a module has the same parameters and buffers on all ranks, on the communicator's device."""
    for name, parameter in module.named_parameters():
        if parameter.device != communicator.device:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, expected {communicator.device}: move the module there first"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; trainable parameters must be real floating point"
            )
    state = [*module.named_parameters(), *module.named_buffers()]
    own = [f"{name} {tuple(t.shape)} {t.dtype} trainable={t.requires_grad}" for name, t in state]
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    everyone: list[list[str]] = communicator.all_gather_object(own)
    for rank, theirs in enumerate(everyone):
        for here, there in zip(everyone[0], theirs, strict=False):
            if here != there:
                raise ValueError(f"modules differ between ranks: rank 0 has {here!r} where rank {rank} has {there!r}")
        if len(everyone[0]) != len(theirs):
            raise ValueError(
                f"modules differ between ranks: {len(everyone[0])} tensors on rank 0, {len(theirs)} on rank {rank}"
            )


def synchronize(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Overwrites tensors with rank 0's, bit for bit, many in one message.

    Bytes are sent, not numbers: that serves every dtype and keeps NaN payloads and signs of zeros.
    """
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        pending.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= BROADCAST_BYTES:
            _broadcast_together(pending, communicator)
            pending, size = [], 0
    if size:
        _broadcast_together(pending, communicator)


@torch.no_grad()
def _broadcast_together(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    parts = [_bytes(tensor) for tensor in tensors]
    together = torch.cat(parts)
    communicator.broadcast(together, src=0).wait()
    for tensor, part in zip(tensors, together.split([p.numel() for p in parts]), strict=True):
        # An odd number of bytes before it may leave the part unaligned for the tensor's dtype; a clone is aligned.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
