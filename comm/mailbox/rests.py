"""When all ranks leave their models as they are, again and again, whatever the numbers of their steps."""

from __future__ import annotations

import struct

from bagua_kernels.comm.mailbox.courier import Courier

_KIND = 32  # of letters
_BODY = struct.Struct("<qq")


class Rests:
    """The numbers that ranks have sent in their rests, of which each has a number from 0.

    Attributes:
        number: of this rank's present or next rest.
        resting: True from `begin` to `resume`.
        held: True once nothing is done any more until `resume`; set on the courier's thread by what it works for.
    """

    def __init__(self, courier: Courier) -> None:
        """Takes letters of a courier that is not started yet."""
        self._courier, self._mailbox = courier, courier.mailbox
        self.number = 0
        self.resting = self.held = False
        # For each rest the ranks' numbers; some ranks may be in their next one already.
        self._told: dict[int, dict[int, int]] = {}
        courier.on(_KIND, self._hear)

    def begin(self) -> None:
        """Begins a rest of this rank."""
        self._courier.check()
        with self._courier.changed:
            self.resting = True

    def tell(self, last: int) -> None:
        """Sends all ranks a number, after all else that this rank sends before it resumes."""
        with self._courier.changed:
            self._told.setdefault(self.number, {})[self._mailbox.rank] = last
        for peer in range(self._mailbox.size):
            if peer != self._mailbox.rank:
                self._courier.post(peer, _KIND, _BODY.pack(self.number, last))

    def has_told(self) -> bool:
        """Returns True if this rank has sent its number in its present rest; the caller holds the courier's lock."""
        return self._mailbox.rank in self._told.get(self.number, {})

    def everyone(self) -> list[int] | None:
        """Returns the numbers of all ranks if all rest, else None; the caller holds the courier's lock."""
        told = self._told.get(self.number, {})
        return list(told.values()) if self.resting and len(told) == self._mailbox.size else None

    def wait(self) -> None:
        """Waits until this rank is held.

        Raises:
            RankLostError: a rank is lost that did not rest.
        """
        everyone = set(range(self._mailbox.size)) - {self._mailbox.rank}
        self._courier.wake()
        self._courier.wait_for(lambda: self.held, lambda: everyone - set(self._told.get(self.number, {})))

    def resume(self) -> None:
        """Ends a rest; the caller holds the courier's lock."""
        self._told.pop(self.number, None)
        self.number += 1
        self.resting = self.held = False

    def _hear(self, sender: int, body: bytes) -> None:
        number, last = _BODY.unpack(body)
        with self._courier.changed:
            self._told.setdefault(number, {})[sender] = last
