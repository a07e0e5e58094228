"""Since when nothing has moved of what a rank waits for; its timeout counts from there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# Operations that an awaited rank may begin elsewhere while its bytes there still put the end off. A wait goes on
# during a few long exchanges of other groups. A rank that trains with others, and never comes here, begins more of them.
ELSEWHERE = 64
_AT_ONCE = 1.0  # seconds


@dataclass(frozen=True)
class Stir:
    """What a rank reports of its transfers.

    Attributes:
        moved: bytes, and where it is in the operations of the wait; any change is progress.
        elsewhere: operations that it has begun apart from those of the wait.
        at: when `moved` last changed; None if only two reports in sequence can show that.
    """

    moved: object
    elsewhere: int
    at: float | None = None


class _Awaited:
    def __init__(self, stir: Stir) -> None:
        self.first = self.last = stir
        self.at = float("-inf")


class Stillness:
    """When something last moved of what is waited for.

    Bytes of the operation itself always count. So do those of the ranks that are waited for, and of the ranks that these wait
    for. Once such a rank has begun more than `ELSEWHERE` operations apart from it, none of its bytes have counted.

    Args:
        started: when the wait began.

    Attributes:
        started: as given.
    """

    def __init__(self, started: float) -> None:
        self.started = self._at = started
        self._own = 0
        self._awaited: dict[Hashable, _Awaited] = {}

    def own(self, moved: int, now: float) -> None:
        """Takes how many bytes of the operation have moved here so far."""
        if moved != self._own:
            # What moves at once proves nothing later on: ranks whose operation hangs then give up at the same time.
            at_once = self._own == 0 and now - self.started < _AT_ONCE
            self._own, self._at = moved, self.started if at_once else now
            # The operation is alive: from here on anew.
            for each in self._awaited.values():
                each.first = each.last

    def other(self, source: Hashable, stir: Stir, now: float) -> None:
        """Takes the report of a source, such as a rank; the first one without a time is only stored."""
        awaited = self._awaited.setdefault(source, _Awaited(stir))
        if stir.at is not None:
            awaited.at = stir.at
        elif stir.moved != awaited.last.moved:
            awaited.at = now
        awaited.last = stir

    def since(self) -> float:
        """Returns when something last moved; when the wait began, if nothing has."""
        counted = [
            each.at for each in self._awaited.values() if each.last.elsewhere - each.first.elsewhere <= ELSEWHERE
        ]
        return max(self._at, *counted) if counted else self._at

    def told(self, now: float) -> str:
        """Returns how much of the operation has come or gone here, and how fast; empty if nothing has."""
        if not self._own:
            return ""
        seconds = self._at - self.started
        text = f"{amount(self._own)} of it came or went here"
        if seconds >= _AT_ONCE:
            text += f" in {seconds:.1f} s, at {8e-6 * self._own / seconds:.3g} Mbit/s"
        return f"{text}, then nothing for {now - self._at:.1f} s"


def amount(nbytes: float) -> str:
    """Returns a number of bytes in words."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"
