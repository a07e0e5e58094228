"""Finds out in training whether compression pays: steps with and without it take turns, and are timed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.policy.policy import Outcome, Policy
from bagua_kernels.comm import Communicator

logger = logging.getLogger(__name__)

BLOCK_STEPS = 4
BLOCKS = 9
# The first step of a block hands residuals over or makes buffers.
_COUNTED = BLOCK_STEPS - 1


class Trial:
    """Blocks of steps that are compressed and plain in turn, and what follows from the time that they take.

    The first block, which is compressed, is not counted: kernels are compiled in it, and buckets laid out anew. Nor is
    the first step of each other block. What is compressed follows from the number of the step, so that all ranks do
    the same, and the decision from all ranks' seconds.

    Attributes:
        outcome: "" before it begins; "running"; and then what goes on, "compressed" or "plain".
        seconds: of the counted steps so far, on this rank.
        medians: of compressed steps and of plain ones, once it is decided.
        clock: returns seconds since any fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.resume("")

    def resume(self, outcome: Outcome) -> None:
        """Goes on with what was decided before; what was not begins anew."""
        self.outcome: Outcome = "" if outcome == "running" else outcome
        self.seconds: list[float] = []
        self.medians: tuple[float, float] | None = None
        self._start = 0

    @property
    def decided(self) -> bool:
        """True if it has ended."""
        return self.outcome in ("compressed", "plain")

    @property
    def due(self) -> bool:
        """True if all is measured and `decide` is to come."""
        return not self.decided and len(self.seconds) == (BLOCKS - 1) * _COUNTED

    def compresses(self, step: int) -> bool:
        """Returns True if a step may be compressed."""
        if self.outcome == "running":
            return _is_compressed((step - self._start) // BLOCK_STEPS)
        return self.outcome != "plain"

    def begin(self, step: int) -> None:
        """Starts with a step, which was compressed."""
        self.outcome, self._start = "running", step

    def note(self, step: int, seconds: float) -> None:
        """Takes what a step took on this rank; steps follow one another."""
        block, place = divmod(step - self._start, BLOCK_STEPS)
        if self.outcome == "running" and block and place:
            self.seconds.append(seconds)

    def decide(self, gathered: Sequence[Sequence[float]]) -> None:
        """Ends the trial, in favour of compression if that is not slower.

        Args:
            gathered: `seconds` of each rank. A step is as slow as its slowest rank.
        """
        slowest = [max(ranks) for ranks in zip(*gathered, strict=True)]
        kinds = [_is_compressed(1 + i // _COUNTED) for i in range(len(slowest))]
        compressed, plain = (
            statistics.median(s for s, kind in zip(slowest, kinds, strict=True) if kind is which)
            for which in (True, False)
        )
        self.medians = compressed, plain
        self.outcome = "compressed" if compressed <= plain else "plain"

    def ended(
        self,
        communicator: Communicator,
        compressed: bool,
        step: int,
        seconds: float,
    ) -> None:
        """Takes what a step took, and begins and ends the trial when it is time; collective, while no exchange is under way.

        Args:
            communicator: of all ranks.
            compressed: True if anything was.
            step: which one it was.
            seconds: from its first gradient to the end of its last exchange.
        """
        if self.outcome == "" and compressed:
            self.begin(step)
        self.note(step, seconds)
        if self.due:
            self._decide_together(communicator)

    def _decide_together(self, communicator: Communicator) -> None:
        # waits: once, when the measurement ends.
        own = torch.tensor(self.seconds, dtype=torch.float64, device=communicator.device)
        everyone = own.new_empty(communicator.size * own.numel())
        communicator.all_gather(everyone, own).wait()
        # waits: once, when the measurement ends.
        self.decide(everyone.view(communicator.size, -1).tolist())
        if communicator.rank == 0:
            level, what = (
                (logging.WARNING, "is switched off") if self.outcome == "plain" else (logging.INFO, "stays on")
            )
            logger.log(level, "compression %s: a step takes %.3g s with, %.3g s without", what, *self.medians or ())

    def now(self, device: torch.device) -> float:
        """The time; while this runs, that at which the device has done what it was given."""
        if self.outcome == "running" and device.type == "cuda":
            # Without, the exchanges of a GPU would seem to take as long as their launches.
            torch.cuda.synchronize(device)
        return self.clock()


def _is_compressed(block: int) -> bool:
    return block % 2 == 0


class OnlyIfFaster(Policy):
    """Chooses as another policy does, unless a trial in training finds that steps without compression are faster.

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
        found = super().codec(kind, step) if self.trial.compresses(step) else None
        if found is not None and not self.trial.decided:
            self._compressed.add(step)
        return found

    def end_step(self, step: int, seconds: float, communicator: Communicator) -> None:
        """See `Policy.end_step`."""
        super().end_step(step, seconds, communicator)
        if not self.trial.decided:
            self.trial.ended(communicator, self.is_lasting(step) and step in self._compressed, step, seconds)
        self._compressed = {later for later in self._compressed if later > step}

    def now(self, device: torch.device) -> float:
        """See `Policy.now`."""
        return self.trial.now(device)

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
