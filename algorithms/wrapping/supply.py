"""Gives a new member exactly what the others have, a piece at a time, while it takes part in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from bagua_kernels.algorithms.wrapping.equal import digest_of, digests
from bagua_kernels.algorithms.wrapping.replicas import bytes_of
from bagua_kernels.comm import Communicator

_PIECE, _CHECK, _GROUPS, _END = range(4)  # kinds of boundaries
_LEAST, _MOST = 8 << 10, 64 << 20  # bytes of a piece
_SECONDS, _SHARE = 0.04, 0.08  # that a piece may take, and the share of the time since the last one, whichever is more
_COMPARED = 8 << 20  # bytes of which a boundary computes digests

Groups = Sequence[Sequence[torch.Tensor]]
Place = tuple[int, int]  # a group, and an element of its first tensor
Range = tuple[torch.Tensor, int, int]  # a tensor, the first of some bytes of it, and their number


class Supply:
    """Gives members that are behind what another one has of tensors that all steps change alike.

    Steps on all ranks have the same means. So an element that was given between two steps stays the same, with its momentum. For
    that the optimizer has to treat each element by itself.

    1. After each pass the giving member sends a piece, which takes a small share of the time.
    2. When all has been sent, digests are compared, a few after each pass. What differs is sent once more, a parameter at once
       with all that the optimizer keeps for it.
    3. If digests still differ then, the optimizer mixes parameters. Everything is sent between two passes, and others wait.

    Attributes:
        is_giving: True at the member that gives.
        is_done: True once all have the same.
    """

    def __init__(self, among: Communicator, source: int, groups: Callable[[], Groups], first: int) -> None:
        """Begins with the first piece.

        Args:
            among: of the giving member, and those that are behind.
            source: the rank of the giving one.
            groups: returns the tensors of each parameter as they are, in one order on all ranks.
            first: a number of passes. The first boundary is after the one that follows.
        """
        self.among, self.is_giving, self.is_done = among, among.rank == source, False
        self._source, self._groups, self._first, self._device = source, groups, first, among.device
        self._others = [rank for rank in range(among.size) if rank != source]
        self._place: Place = 0, 0  # of the next piece
        self._length = _LEAST
        self._to_check: list[int] | None = None
        self._to_give: list[int] = []
        self._given: set[int] = set()
        self._awaits = False  # True if the others will answer
        self._checked: list[int] = []  # groups of which they will answer which ones differ
        self._sizes: list[int] = []  # bytes of all tensors
        self._last = time.monotonic()

    @torch.no_grad()
    def advance(self, passes: int) -> None:
        """Gives or takes what follows, between two passes; collective.

        Args:
            passes: that have ended.

        Raises:
            CommunicationError: one of the others is lost.
            RuntimeError: at a member that is behind, its optimizer keeps something else.
        """
        if passes <= self._first or self.is_done:
            return
        groups = self._groups()
        kind = self._give(groups) if self.is_giving else self._take(groups)
        if kind == _END:
            self.is_done = True
            self.among.close()

    def _give(self, groups: Groups) -> int:
        """Sends what follows; returns its kind."""
        now = time.monotonic()
        allowed, self._last = max(_SECONDS, _SHARE * (now - self._last)), now
        self._hear(allowed)
        sizes = [each.nbytes for group in groups for each in group]
        if sizes != self._sizes:
            # The optimizer has made states, of which some lie before the next piece.
            self._sizes, self._place, self._to_check, self._to_give = sizes, (0, 0), None, []
        if self._place[0] < len(groups):
            ranges, after = _ranges(groups, self._place, self._length)
            self._send([_PIECE, *self._place, self._length], [_bytes_in(ranges)])
            self._place = after
            return _PIECE
        if self._to_check is None:
            self._to_check = list(range(len(groups)))
        if self._to_give:
            again = any(index in self._given for index in self._to_give)
            chosen = list(range(len(groups))) if again else _some(groups, self._to_give, self._length)
            self._to_give = [] if again else [index for index in self._to_give if index not in chosen]
            self._to_check = [] if again else [*self._to_check, *chosen]
            self._given.update(chosen)
            self._send([_GROUPS, len(chosen), 0, 0], [self._numbers(chosen), _bytes_of(groups, chosen)])
            return _GROUPS
        if self._to_check:
            chosen = _some(groups, self._to_check, _COMPARED)
            self._to_check = [index for index in self._to_check if index not in chosen]
            self._checked = chosen
            self._send([_CHECK, len(chosen), 0, 0], [self._numbers(chosen), self._digests(groups, chosen)])
            return _CHECK
        self._send([_END, 0, 0, 0], [])
        return _END

    def _hear(self, allowed: float) -> None:
        """Takes what the others have answered since the last boundary.

        Args:
            allowed: seconds that the last piece may have taken.
        """
        seconds = 0.0
        for rank in self._others if self._awaits else []:
            took = torch.empty(1, dtype=torch.float64, device=self._device)
            differs = torch.empty(len(self._checked), dtype=torch.uint8, device=self._device)
            self.among.recv(took, rank).wait()
            self.among.recv(differs, rank).wait()
            # waits: between two passes, while a new member is behind.
            seconds = max(seconds, *took.tolist())
            # waits: likewise.
            for index, wrong in zip(self._checked, differs.tolist(), strict=True):
                if wrong and index not in self._to_give:
                    self._to_give.append(index)
        self._checked = []
        if seconds > allowed:
            self._length = max(self._length // 2, _LEAST)
        elif self._awaits and 2 * seconds < allowed:
            self._length = min(2 * self._length, _MOST)

    def _send(self, header: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        first = self._numbers([sum(self._sizes), *header])
        for work in [self.among.send(each, rank) for each in [first, *parts] for rank in self._others]:
            work.wait()
        self._awaits = True

    def _take(self, groups: Groups) -> int:
        """Takes what follows, and answers how long that took; returns its kind."""
        header = self._received(self._numbers(range(5)))
        began = time.monotonic()
        # waits: between two passes, while this member is behind.
        total, kind, first, second, nbytes = header.tolist()
        own = sum(each.nbytes for group in groups for each in group)
        if own != total:
            raise RuntimeError(
                f"the member that gives has {total} bytes of parameters and the optimizer's states, and this new one {own}: make "
                "the same optimizer, and freeze the same parameters"
            )
        if kind == _END:
            return _END
        differs = torch.empty(0, dtype=torch.uint8, device=self._device)
        if kind == _PIECE:
            places, _ = _ranges(groups, (first, second), nbytes)
        else:
            # waits: likewise.
            chosen = self._received(self._numbers(range(first))).tolist()
            places = [(tensor, 0, tensor.nbytes) for index in chosen for tensor in groups[index]]
        if kind == _CHECK:
            found = self._digests(groups, chosen)
            differs = (self._received(torch.empty_like(found)) != found).any(1).to(torch.uint8)
        else:
            lengths = [length for *_, length in places]
            data = self._received(torch.empty(sum(lengths), dtype=torch.uint8, device=self._device))
            for (tensor, place, _), part in zip(places, data.split(lengths), strict=True):
                _write(tensor, place, part)
        # waits: likewise.
        took = torch.tensor([time.monotonic() - began], dtype=torch.float64, device=self._device)
        for work in [self.among.send(each, self._source) for each in (took, differs)]:
            work.wait()
        return int(kind)

    def _received(self, room: torch.Tensor) -> torch.Tensor:
        self.among.recv(room, self._source).wait()
        return room

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        # waits: between two passes, while a new member is behind.
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._device)

    def _digests(self, groups: Groups, chosen: Sequence[int]) -> torch.Tensor:
        """Returns 128 bits for each group."""
        found = [digests(groups[index], self._device) for index in chosen]
        # waits: between two passes, while a new member is behind.
        return torch.cat([digest_of(each.cpu().numpy().tobytes(), self._device) for each in found])


def _ranges(groups: Groups, place: Place, nbytes: int) -> tuple[list[Range], Place]:
    """Returns what a piece is made of: for some elements of a parameter all that belongs to them, and so on.

    An element that came without its momentum would move away from that of the others.

    Args:
        groups: each a parameter, and what is kept for it. What has another number of elements comes with the first of these.
        place: a group, and an element in it, from which on.
        nbytes: about.

    Returns:
        The tensors, each with the first of its bytes and their number; and the place of the next piece.
    """
    found, (index, element) = list[Range](), place
    while index < len(groups) and nbytes > 0:
        length = groups[index][0].numel()
        alike = [each for each in groups[index] if each.numel() == length]
        if element == 0:
            found += [(each, 0, each.nbytes) for each in groups[index] if each.numel() != length]
        sizes = [each.element_size() for each in alike]
        count = min(length - element, max(1, nbytes // sum(sizes)))
        found += [(each, element * size, count * size) for each, size in zip(alike, sizes, strict=True)]
        nbytes, element = nbytes - count * sum(sizes), element + count
        if element >= length:
            index, element = index + 1, 0
    return found, (index, element)


def _bytes_in(ranges: Sequence[Range]) -> torch.Tensor:
    return torch.cat([bytes_of(each)[begin : begin + length] for each, begin, length in ranges])


def _bytes_of(groups: Groups, chosen: Sequence[int]) -> torch.Tensor:
    return torch.cat([bytes_of(each) for index in chosen for each in groups[index]])


def _some(groups: Groups, candidates: Sequence[int], nbytes: int) -> list[int]:
    """Returns the first candidates that have about so many bytes, one at least."""
    found, size = list[int](), 0
    for index in candidates:
        if found and size >= nbytes:
            break
        found.append(index)
        size += sum(each.nbytes for each in groups[index])
    return found


def _write(tensor: torch.Tensor, place: int, data: torch.Tensor) -> None:
    """Puts bytes into a tensor, from one place in it on."""
    flat = bytes_of(tensor)
    flat[place : place + len(data)].copy_(data)
    if not tensor.is_contiguous():
        # What `bytes_of` returned is a copy then.
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
