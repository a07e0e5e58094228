"""The memory of a simulated GPU: which streams use a tensor, and whether its allocator may reuse the memory too early.

CUDA's allocator has one pool per stream. A freed block returns to the pool of the stream that made it, which may write to
the block at once. Another stream that still reads the block then reads garbage. Two things prevent that: `record_stream`
of the reading stream, or an event after the read that the owning stream waited for before the free.

A real pool shows a fault only if the block is reused in time, and only if the other stream is late. `Memory` needs no luck. It
counts the work of each stream, and follows events: a vector clock per stream. So it judges what the GPU is allowed to do, in
whatever order the CPU did it. The same clocks show two streams that use the same bytes without an order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

# A clock holds, for each stream's handle, the number of its operations that have ended.
Clock = dict[int, int]


class Timeline:
    """What is known to have ended before the next operation of one stream.

    Attributes:
        handle: number of the stream.
        name: of the stream, for errors.
        clock: by stream; its own entry counts its own operations.
    """

    def __init__(self, handle: int, name: str) -> None:
        self.handle, self.name = handle, name
        self.clock: Clock = {handle: 0}

    def wait_for(self, clock: Clock) -> None:
        for handle, count in clock.items():
            self.clock[handle] = max(self.clock.get(handle, 0), count)


@dataclass(frozen=True)
class Access:
    """A stream's use of some bytes."""

    stream: Timeline
    begin: int
    end: int
    writes: bool


@dataclass
class Block:
    """The memory of one storage.

    Attributes:
        what: dtype and shape of its first tensor.
        owner: the stream that made it; None if it was not made on the simulated GPU.
        recorded: the streams of `record_stream`.
        accesses: the last operation of each kind, with its number on its stream and its name.
    """

    what: str
    owner: Timeline | None
    recorded: set[Timeline] = field(default_factory=set)
    accesses: dict[Access, tuple[int, str]] = field(default_factory=dict)


class Memory:
    """Follows the tensors of one simulated GPU.

    Args:
        lock: a lock that a thread may take again.
        fail: called with a text for each error.

    Attributes:
        strict: True if a free is an error while another stream uses the block. False if the error is the next allocation of the
            owner: a stream that waits before it allocates is right, but a test sees only the order that happened.
    """

    def __init__(self, lock: AbstractContextManager[Any], fail: Callable[[str], None]) -> None:
        self.strict = False
        self._lock, self._fail = lock, fail
        self._pools: dict[Timeline, list[Block]] = {}
        self._blocks: dict[int, Block] = {}
        self._ended: Clock = {}
        self._threads = threading.local()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Follows no tensors on this thread within the block."""
        before, self._threads.hidden = self.is_hidden, True
        try:
            yield
        finally:
            self._threads.hidden = before

    @property
    def is_hidden(self) -> bool:
        return getattr(self._threads, "hidden", False)

    def end(self, *streams: Timeline) -> None:
        """Notes that the host has waited for streams."""
        if not self.is_hidden:
            with self._lock:
                for stream in streams:
                    for handle, count in stream.clock.items():
                        self._ended[handle] = max(self._ended.get(handle, 0), count)

    def record(self, tensor: torch.Tensor, stream: Timeline) -> None:
        """Notes `tensor.record_stream(stream)`."""
        with self._lock:
            self._block(tensor, None).recorded.add(stream)

    def operate(
        self,
        stream: Timeline,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        """Notes one operation of a stream, with the tensors that it reads, writes and allocates."""
        if self.is_hidden:
            return
        with self._lock:
            stream.clock[stream.handle] += 1
            if made:
                for block in self._pools.pop(stream, []):
                    self._check_free(block, [stream])
            for tensor in made:
                self._block(tensor, stream)
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if tensor.numel():
                        self._use(tensor, stream, name, is_write)

    def _use(self, tensor: torch.Tensor, stream: Timeline, name: str, writes: bool) -> None:
        block = self._block(tensor, None)
        begin = tensor.storage_offset()
        end = begin + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        access = Access(stream, begin * tensor.element_size(), end * tensor.element_size(), writes)
        for other, (count, earlier) in list(block.accesses.items()):
            overlap = other.begin < access.end and access.begin < other.end
            if overlap and (writes or other.writes) and not self._is_over(other, count, [stream]):
                self._fail(
                    f"{earlier} on {other.stream.name} and {name} on {stream.name} use the memory of {block.what} without "
                    "an order, and one of them writes: let the second stream wait for an event of the first"
                )
            if writes and access.begin <= other.begin and other.end <= access.end:
                # A stream that waits for this write has waited for the earlier operation, too.
                del block.accesses[other]
        block.accesses[access] = stream.clock[stream.handle], name

    def _is_over(self, access: Access, count: int, streams: list[Timeline]) -> bool:
        """Returns whether one of some streams does nothing more before an operation has ended."""
        handle = access.stream.handle
        known = max(stream.clock.get(handle, 0) for stream in streams)
        return count <= max(known, self._ended.get(handle, 0))

    def _block(self, tensor: torch.Tensor, owner: Timeline | None) -> Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            what = f"a tensor of shape {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
            block = self._blocks[key] = Block(what, owner)
            weakref.finalize(storage, self._free, key).atexit = False
        return block

    def _free(self, key: int) -> None:
        with self._lock:
            block = self._blocks.pop(key)
            if block.owner is None:
                return
            known = [block.owner, *block.recorded]
            block.accesses = {
                each: last for each, last in block.accesses.items() if not self._is_over(each, last[0], known)
            }
            if self.strict:
                self._check_free(block, known)
            elif block.accesses:
                self._pools.setdefault(block.owner, []).append(block)

    def _check_free(self, block: Block, known: list[Timeline]) -> None:
        assert block.owner is not None
        for access, (count, name) in block.accesses.items():
            if not self._is_over(access, count, known):
                self._fail(
                    f"{block.what} was made on {block.owner.name} and freed while {access.stream.name} may still be at "
                    f"{name}, so that its memory may be reused too early: call record_stream of the latter stream"
                )


def operands(function: Any, args: Any, kwargs: Any, results: Any) -> tuple[list[torch.Tensor], ...]:
    """Returns the tensors that an operation of ATen reads, writes and makes, by its schema."""
    schema, reads, writes = function._schema, [], []
    name = schema.name.rpartition("::")[2]
    shapes_only = name.startswith(("empty", "new_")) or name.endswith("_like")
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
        elif argument.alias_info is None and not shapes_only:
            reads += tensors
    views = any(result.alias_info is not None for result in schema.returns)
    given = {each.untyped_storage()._cdata for each in reads}
    found = [] if views else [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
    made = [each for each in found if each.untyped_storage()._cdata not in given]
    if not name.startswith(("empty", "new_empty")):
        writes = writes + made
    return reads, writes, made
