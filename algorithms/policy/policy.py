"""The policy of an algorithm: which codec encodes a bucket in a step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

from bagua_kernels.comm import Communicator

Outcome = Literal["", "running", "compressed", "plain"]


class Policy:
    """Chooses the codec of the buckets of a kind in a step; this base chooses none.

    It is asked on communication threads, where ranks take buckets in different orders. So it decides only when a step ends, and
    all ranks alike. Policies around others have them in `inner`.
    """

    def __init__(self, inner: Policy | None = None) -> None:
        """Begins with no decision.

        Args:
            inner: what is asked first.
        """
        self.inner = inner

    def chain(self) -> list[Policy]:
        """Returns this policy and those inside of it, from the outside in."""
        return [self] if self.inner is None else [self, *self.inner.chain()]

    def codec(self, kind: Hashable, step: int) -> Any:
        """Returns the codec of buckets of a kind in a step; None for no compression."""
        return None if self.inner is None else self.inner.codec(kind, step)

    def is_lasting(self, step: int) -> bool:
        """Returns True if buckets are encoded from a step on as in all later ones, so that its time is theirs."""
        return True if self.inner is None else self.inner.is_lasting(step)

    def end_step(self, step: int, communicator: Communicator) -> None:
        """Decides what follows from a step; collective, when no exchange is under way.

        Args:
            step: its number.
            communicator: of all ranks.
        """
        if self.inner is not None:
            self.inner.end_step(step, communicator)

    @property
    def outcome(self) -> Outcome:
        """What was found to be faster, see `Stats.trial`."""
        return "" if self.inner is None else self.inner.outcome

    def errors(self) -> dict[str, float]:
        """What `Stats.errors` holds."""
        return {} if self.inner is None else self.inner.errors()

    def guards(self) -> dict[str, int]:
        """What `Stats.guards` holds."""
        return {} if self.inner is None else self.inner.guards()

    def state(self) -> list[Any]:
        """What was decided: pairs of a name and a plain value, equal on all ranks."""
        return [] if self.inner is None else self.inner.state()

    def load(self, decisions: list[Any]) -> None:
        """Takes what `state` gave."""
        if self.inner is not None:
            self.inner.load(decisions)
