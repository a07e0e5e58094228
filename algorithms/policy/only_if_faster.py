"""Finds out in training whether compression pays: steps with and without it take turns, and are timed."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.choosing.turns import Turns
from bagua_kernels.algorithms.policy.policy import Outcome, Policy
from bagua_kernels.comm import Communicator

logger = logging.getLogger(__name__)

BLOCKS = 9


class Trial:
    """Turns of steps that are compressed and plain, and what follows from the time that they take.

    The first turn, which is compressed, is not counted: kernels are compiled in it, and buckets laid out again.

    Attributes:
        outcome: "" before it begins; "running"; and then what was found to be faster, "compressed" or "plain".
        turns: of this rank, and from the decision on of the slowest one.
    """

    def __init__(self) -> None:
        """Has not begun."""
        self.resume("")

    def resume(self, outcome: Outcome) -> None:
        """Restores a decision; a trial that was under way begins again."""
        self.outcome: Outcome = "" if outcome == "running" else outcome
        kinds = ("compressed", "plain")
        order = [kinds[block % 2] for block in range(BLOCKS)]
        self.turns = Turns(order, {kind: [] for kind in kinds}, uncounted=1)

    @property
    def decided(self) -> bool:
        """True if it has ended."""
        return self.outcome in ("compressed", "plain")

    @property
    def compresses(self) -> bool:
        """True if the step under way, or to come, may be compressed."""
        if self.outcome == "running":
            return self.turns.current == "compressed"
        return self.outcome != "plain"

    @property
    def medians(self) -> tuple[float, float] | None:
        """Seconds of compressed steps and of plain ones; None where it has not been decided here."""
        found = self.turns.medians
        return (found["compressed"], found["plain"]) if self.decided and found else None

    def note(self, seconds: float) -> None:
        """Takes what a step took on this rank; the first one was compressed."""
        self.outcome = "running"
        self.turns.took(seconds)

    def decide(self, gathered: Iterable[Sequence[float]]) -> None:
        """Ends the trial, in favour of compression if that is not slower.

        Args:
            gathered: `turns.seconds` of each rank. A step is as slow as its slowest rank.
        """
        self.turns.use_slowest(gathered)
        self.outcome = "compressed" if self.turns.fastest == "compressed" else "plain"

    def decide_together(self, communicator: Communicator) -> None:
        """Decides by all ranks' seconds; collective."""
        # waits: once, when the measurement ends.
        own = torch.tensor(self.turns.seconds, dtype=torch.float64, device=communicator.device)
        everyone = own.new_empty(communicator.size * own.numel())
        communicator.all_gather(everyone, own).wait()
        # waits: once, when the measurement ends.
        self.decide(everyone.view(communicator.size, -1).tolist())
        if communicator.rank == 0:
            level, what = (
                (logging.WARNING, "is switched off") if self.outcome == "plain" else (logging.INFO, "stays on")
            )
            logger.log(level, "compression %s: a step takes %.3g s with, %.3g s without", what, *self.medians or ())


class OnlyIfFaster(Policy):
    """Chooses as another policy does, unless a trial in training finds that steps without compression are faster.

    It is the engine's `Listener`, too, and so gets to know how long steps take.

    Attributes:
        trial: its state.
    """

    def __init__(self, inner: Policy) -> None:
        """Has not begun."""
        super().__init__(inner)
        self.trial = Trial()
        self._compressed: set[int] = set()  # steps in which anything was

    def codec(self, kind: Hashable, step: int) -> Any:
        """See `Policy.codec`."""
        found = super().codec(kind, step) if self.trial.compresses else None
        if found is not None and not self.trial.decided:
            self._compressed.add(step)
        return found

    @property
    def compares(self) -> bool:
        """See `Listener.compares`."""
        return self.trial.outcome == "running"

    def pass_ended(self, step: int, seconds: float, communicator: Communicator) -> None:
        """See `Listener.pass_ended`."""
        trial = self.trial
        begins = trial.outcome == "" and self.is_lasting(step) and step in self._compressed
        if begins or trial.outcome == "running":
            trial.note(seconds)
        if trial.turns.ended and not trial.decided:
            trial.decide_together(communicator)
        self._compressed = {later for later in self._compressed if later > step}

    @property
    def outcome(self) -> Outcome:
        """See `Policy.outcome`."""
        return self.trial.outcome

    def state(self) -> list[Any]:
        """See `Policy.state`."""
        return [*([("trial", self.trial.outcome)] if self.trial.decided else []), *super().state()]

    def load(self, decisions: list[Any]) -> None:
        """See `Policy.load`."""
        super().load(decisions)
        self.trial.resume(dict(decisions).get("trial", ""))
