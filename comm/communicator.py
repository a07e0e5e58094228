"""The protocol that every backend offers: a group of ranks and the operations among them."""

from __future__ import annotations

import abc
import contextlib
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from bagua_kernels import knobs
from bagua_kernels.comm.collectives import Collectives
from bagua_kernels.comm.joining.seal import HEADER, Seal, Sealing, pack, room
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.work import CLOSED
from bagua_kernels.errors import CommunicationError


def checked_timeout(seconds: float) -> float:
    """Returns a timeout that every backend can keep.

    Raises:
        ValueError: if it is outside of the range of `BAGUA_KERNELS_TIMEOUT`.
    """
    if not knobs.LEAST_TIMEOUT <= seconds <= knobs.LONGEST_TIMEOUT:
        raise ValueError(
            f"expected a timeout from {knobs.LEAST_TIMEOUT:g} to {knobs.LONGEST_TIMEOUT:.7g} s, got {seconds!r}: pass a limit "
            "that an operation can reach"
        )
    return float(seconds)


class Communicator(Collectives):
    """A group of ranks that exchange tensors.

    Every operation on tensors starts at once and returns a `Work`, whose `wait` finishes it. Ranks in arguments are
    ranks of this communicator. Tensors are dense, contiguous and on `device`; they are taken as flat, whatever their
    shape. All ranks start the same operations with the same sizes in the same order. Two threads that start operations at
    the same time need a communicator each (`duplicate`). Any thread may wait for an operation that another one started. An
    operation on no elements communicates nothing. With one rank every operation is the identity. Reductions take
    float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 and bool; operations that only move data
    take every dtype.

    A backend implements `abort`, `close`, `_split` and what `Collectives` asks for. It sets `_seal`, made of a secret that
    only its ranks share.

    Attributes:
        rank: this process's number, from 0.
        size: the number of ranks.
        device: where the tensors must be.
        timeout: seconds after which an operation of which nothing moves raises an error.
        call: the method of its user from which operations start, such as "synchronize()"; errors of all ranks name it.
        blocks: True if `Work.wait` blocks the caller until an operation has ended. False if a stream of a GPU waits instead, so
            that the caller learns of an error later.
        members: the `Membership` of all living ranks, of which it is the communicator; None if the job is not elastic.
        bytes_sent: payload bytes that this rank has put on the wire by the algorithms that the backend uses; protocol
            headers are not counted.
    """

    timeout: float
    bytes_sent: int
    call = ""
    blocks = True
    members: Any = None
    _seal: Seal | None = None
    _offspring: weakref.WeakSet[Communicator] | None = None

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src` (pickled) on every rank; blocks."""
        self._check_rank("src", src)
        mine = self.rank == src
        data = pack(obj) if mine else room(0)
        sealing = self._sealing("broadcast_object")
        # waits: objects are sent at start and for checkpoints.
        header = (sealing.header(data, src) if mine else room(HEADER)).to(self.device)
        self.broadcast(header, src).wait()
        # waits: objects are sent at start and for checkpoints.
        data = data.to(self.device) if mine else room(sealing.length(header, src), self.device)
        self.broadcast(data, src).wait()
        return sealing.read(data, header, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks (pickled), in rank order; blocks."""
        data = pack(obj)
        sealing = self._sealing("all_gather_object")
        padded, headers, lengths = self._gather_headers(sealing, data)
        everything = padded.new_empty(self.size, padded.numel())
        self.all_gather(everything, padded).wait()
        return _read(sealing, everything, headers, lengths)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Returns the objects of all ranks (pickled) on rank `dst` and None elsewhere; blocks."""
        self._check_rank("dst", dst)
        data = pack(obj)
        sealing = self._sealing("gather_object")
        padded, headers, lengths = self._gather_headers(sealing, data)
        if self.rank != dst:
            self.gather(padded, dst=dst).wait()
            return None
        everything = padded.new_empty(self.size, padded.numel())
        self.gather(padded, everything, dst).wait()
        return _read(sealing, everything, headers, lengths)

    def scatter_object(self, objs: Sequence[Any] | None, src: int = 0) -> Any:
        """Returns object number `rank` of the list that rank `src` passes (pickled); blocks."""
        self._check_rank("src", src)
        packed: list[torch.Tensor] = []
        if self.rank == src:
            if objs is None or len(objs) != self.size:
                got = "None" if objs is None else f"{len(objs)} objects"
                raise ValueError(
                    f"scatter_object on the source rank {src} expects {self.size} objects, one per rank, got {got}"
                )
            packed = [pack(obj) for obj in objs]
        sealing = self._sealing("scatter_object")
        headers = room(self.size * HEADER, self.device).view(self.size, HEADER)
        if packed:
            headers.copy_(torch.stack([sealing.header(data, src, dst) for dst, data in enumerate(packed)]))
        self.broadcast(headers, src).wait()
        lengths = [sealing.length(header, src, dst) for dst, header in enumerate(headers)]
        width = max(lengths)
        mine, table = room(width, self.device), None
        if packed:
            table = torch.zeros(self.size, width, dtype=torch.uint8, device=self.device)
            for row, data in zip(table, packed, strict=True):
                row[: data.numel()] = data
        self.scatter(mine, table, src).wait()
        return sealing.read(mine[: lengths[self.rank]], headers[self.rank], src)

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Makes a communicator of some of the ranks, which keep their order; every rank calls it.

        Ranks may pass different lists at once (a row each of a grid), as long as all members of a list pass that list.
        A rank that is in no list passes any, or an empty one.

        Returns:
            The new communicator, whose rank i is the i-th lowest of `ranks`, or None on a rank that is not in it.
        """
        self._check_usable()
        for rank in ranks:
            self._check_rank("ranks", rank)
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"split expects every rank once, got ranks={list(ranks)}")
        return self._made(self._split(tuple(sorted(ranks)))) if self.rank in ranks else None

    def duplicate(self) -> Communicator:
        """Makes a communicator of the same ranks whose operations do not mix with this one's; every rank calls it."""
        self._check_usable()
        return self._made(self._split(tuple(range(self.size))))

    def barrier_on_host(self) -> None:
        """Blocks the caller until all ranks have called it, also on a GPU, after what each of them has started before.

        Where it raises on a rank, that rank's earlier operations may have failed. Where it returns on any rank, those of all
        ranks have succeeded.

        Raises:
            CommunicationError: or one of its kinds, as of `Work.wait`; also if an earlier operation was given up.
        """
        self.drain()
        self.barrier().wait()
        self.drain()

    def drain(self) -> None:
        """Blocks the caller until all operations that were waited for have ended; where `Work.wait` blocks they have.

        Raises:
            CommunicationError: one of them has failed or was given up.
        """

    @contextlib.contextmanager
    def within(self, call: str) -> Iterator[None]:
        """Lets errors name, for operations that start in the block, the method that starts them."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    @property
    def flat(self) -> Communicator:
        """Itself, or the communicator in one tier that it is made of."""
        return self

    @abc.abstractmethod
    def abort(self, reason: str = "it was aborted") -> None:
        """Gives up: pending work and every later call raise `CommunicationError` here, and the other ranks see it left.

        Any thread may call it.

        Args:
            reason: text of the errors, here and on the other ranks.
        """

    def abort_family(self, reason: str) -> None:
        """Aborts this communicator, all that `split` and `duplicate` have made of it here, and all that were made of those.

        Any thread may call it.

        Args:
            reason: as of `abort`.
        """
        # First itself, so that nothing is made of it any more.
        self.abort(reason)
        with _making:
            offspring = list(self._offspring or ())
        for each in offspring:
            each.abort_family(reason)

    @abc.abstractmethod
    def close(self, limit: float | None = None) -> None:
        """Waits for the other ranks to close too, and frees the connections; later calls raise `CommunicationError`.

        Calling it again does nothing.

        Args:
            limit: seconds to wait for them, if less than the timeout.
        """

    def set_timeout(self, seconds: float) -> None:
        """Changes the timeout of operations that start from now on; every rank calls it.

        Raises:
            ValueError: if it is outside of the range of `BAGUA_KERNELS_TIMEOUT`: from a millisecond to a million seconds.
        """
        self.timeout = checked_timeout(seconds)

    def close_relatives(self) -> None:
        """Frees the connections of every open communicator split from this one or from which it was split.

        For the end of a job, when all ranks are known to have finished; a backend whose connections need no care does
        nothing.
        """

    def is_ended(self) -> bool:
        """Returns True if it was closed or aborted, or has failed."""
        return bool(self._unusable())

    def is_closed(self) -> bool:
        """Returns True if `close` has ended it."""
        return self._unusable() == CLOSED

    def __enter__(self) -> Communicator:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, or aborts if the block raised."""
        if error is None:
            self.close()
        else:
            self.abort()

    def _assign(self, rank: int, size: int, device: torch.device, timeout: float, secret: Secret) -> None:
        """Sets the attributes of the class; `secret` is known to these ranks only."""
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self.bytes_sent = 0
        self._seal = Seal(secret)
        self._splits: dict[tuple[int, ...], int] = {}

    def _made(self, child: Communicator) -> Communicator:
        """Returns a communicator that was made of this one, for `abort_family`."""
        with _making:
            if self._offspring is None:
                self._offspring = weakref.WeakSet()
            self._offspring.add(child)
        if reason := self._unusable():
            # Aborted by another thread meanwhile.
            child.abort_family(reason)
        return child

    def _next_split(self, ranks: tuple[int, ...]) -> str:
        """Returns a name for a communicator of some of the ranks, the same on all of these; such as "0-2.1" or "all.3"."""
        count = self._splits[ranks] = self._splits.get(ranks, 0) + 1
        return f"{'-'.join(map(str, ranks)) if len(ranks) < self.size else 'all'}.{count}"

    def _sealing(self, operation: str) -> Sealing:
        """Returns what signs the objects of the next operation."""
        self._check_usable()
        return self._sealed().open(operation, self.abort)

    def _sealed(self) -> Seal:
        if self._seal is None:
            raise CommunicationError(
                f"{type(self).__name__} has no secret, without which nothing is read from the network: set its "
                "_seal = Seal(secret)"
            )
        return self._seal

    def _gather_headers(self, sealing: Sealing, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Returns this rank's data, as long as the longest, and the headers and lengths of all ranks."""
        # waits: objects are sent at start and for checkpoints.
        header = sealing.header(data, self.rank).to(self.device)
        headers = header.new_empty(self.size, HEADER)
        self.all_gather(headers, header).wait()
        lengths = [sealing.length(row, src) for src, row in enumerate(headers)]
        padded = header.new_zeros(max(lengths))
        padded[: data.numel()] = data
        return padded, headers, lengths

    @abc.abstractmethod
    def _split(self, ranks: tuple[int, ...]) -> Communicator: ...


# Of `_offspring`, which a thread may read while another one splits the same communicator.
_making = threading.Lock()


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Returns the values of all ranks, as JSON makes them, in rank order; collective.

    Unlike pickled objects, a text from another process runs nothing when it is read.
    """
    # waits: at start.
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(communicator.device)
    length = torch.full((1,), data.numel(), dtype=torch.int64, device=communicator.device)
    lengths = length.new_empty(communicator.size)
    communicator.all_gather(lengths, length).wait()
    # waits: at start.
    sizes = [int(size) for size in lengths.tolist()]
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data
    everything = data.new_empty(communicator.size, padded.numel())
    communicator.all_gather(everything, padded).wait()
    # waits: at start.
    rows = everything.cpu().numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _read(sealing: Sealing, everything: torch.Tensor, headers: torch.Tensor, lengths: list[int]) -> list[Any]:
    return [
        sealing.read(row[:length], header, src)
        for src, (row, header, length) in enumerate(zip(everything, headers, lengths, strict=True))
    ]
