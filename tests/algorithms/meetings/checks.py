"""What must be true of a training, by what is known of its algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bagua_kernels.comm import run_ranks
from tests import limits
from tests.algorithms.meetings.rows import ROWS
from tests.algorithms.meetings.simulation import simulate
from tests.algorithms.meetings.trainings import Outcome, Training, train, values, written

# Between sums in other orders, and between float32 and float64.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
# What a codec loses of the differences to parameters that were loaded, in a few rounds, and in one.
LOST, LOST_AT_ONCE = 2e-5, 1 / 128


def differences(training: Training, patience: float | None = None) -> list[str]:
    """Runs a training, and what it is compared with; returns what is wrong."""
    timeout = limits.seconds(20) if patience is None else patience
    found = run_ranks(training.ranks, train, training, timeout=timeout)
    plain = training.without_neutral()
    compares = plain != training and repeats(training)
    return compared(training, found, run_ranks(training.ranks, train, plain, timeout=timeout) if compares else None)


def compared(training: Training, found: Sequence[Outcome], others: Sequence[Outcome] | None) -> list[str]:
    """Returns what is wrong with the outcomes of all ranks.

    Args:
        training: that was run.
        found: its outcomes.
        others: those of the training in which nothing happens that should change nothing, if that is another one.
    """
    problems = [f"rank {rank}: {text}" for rank, each in enumerate(found) for text in each.problems]
    problems += of_ranks(training, found)
    if all(row.rule for row in training.rows) and is_exact(training):
        problems += from_simulation(training, found)
    if others is not None and repeats(training):
        problems += from_plain(found, others)
    return problems


def is_exact(training: Training) -> bool:
    """True if the simulation knows all that happens."""
    rules = {row.rule for row in training.rows}
    if training.dtype != torch.float64 and any(
        row.family == "mean" and row.name not in ("allreduce", "auto") for row in training.rows
    ):
        # What travels uncompressed in float64.
        return False
    if training.nodes and rules & {"dcd", "choco"}:
        return False  # ranks of a node take their mean before they encode
    # Muon rounds to bfloat16 on its way. What is projected may count as written, or as part of a step.
    return training.optimizer != "muon" and not (training.clamp and rules & {"outer", "slow", "d2", "dcd", "choco"})


def repeats(training: Training) -> bool:
    """True if the same training has the same bits again."""
    return all(row.family != "courier" for row in training.rows)


def of_ranks(training: Training, found: Sequence[Outcome]) -> Iterator[str]:
    """What must be true of the ranks of one run."""
    last = training.rows[-1]
    for number in range(training.nets):
        means = [each.mean[number] for each in found]
        if not all(bool(mean.isfinite().all()) for mean in means):
            yield f"network {number} ends with infinities or NaN"
            continue
        if not all(torch.equal(means[0], mean) for mean in means):
            worst = max(float((means[0] - mean).abs().max()) for mean in means)
            yield f"ranks end with parameters of network {number} that differ by {worst:.2e}"
        loads = [event for event in training.events if event.kind == "load"]
        if training.still and not training.has_switch:
            origin = values(written(training, number)) if loads else found[0].seen[number][0]
            error = max(float((each.last[number] - origin).abs().max()) for each in found)
            exact = last.family in ("mean", "lossy") or last.dtype == torch.float64
            # What a round has lost comes with the next one.
            at_end = any(event.step == max(training.batches) - 1 for event in loads)
            if not error <= (1e-12 if exact else LOST_AT_ONCE if at_end else LOST):
                yield f"network {number} has moved by {error:.2e} from {'what was loaded' if loads else 'the start'}"
        if is_conserved(training):
            expected = torch.stack([each.moved[number] for each in found]).mean(0)
            error = float((means[0].double() - expected).abs().max())
            if not error <= TOLERANCE[training.dtype]:
                yield f"the mean of network {number} is off by {error:.2e} from that of the ranks' steps"


def is_conserved(training: Training) -> bool:
    plain = training.optimizer == "sgd" and not training.has_switch
    clamps = training.clamp and training.kind.rule not in ("dpsgd", "push")
    return plain and training.kind.conserves and not clamps


def from_simulation(training: Training, found: Sequence[Outcome]) -> Iterator[str]:
    """How a run differs from the simulation."""
    tolerance = TOLERANCE[training.dtype]
    for number in range(training.nets):
        expected = simulate(training, number)
        for rank, outcome in enumerate(found):
            error, step = first_off(outcome.seen[number], expected.seen[rank], tolerance)
            if error:
                yield f"rank {rank}, network {number}: {error} when step {step} begins"
                break
        else:
            # With join() all ranks go on from what the last one has.
            error = distance(found[0].mean[number], expected.mean)
            if not error <= tolerance:
                yield f"network {number} is off by {error:.2e} at the end"


def first_off(seen: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> tuple[str, int]:
    if len(seen) != len(expected):
        return f"{len(seen)} steps, not {len(expected)},", min(len(seen), len(expected))
    for step, (a, b) in enumerate(zip(seen, expected, strict=True)):
        error = distance(a, b)
        if not error <= tolerance:
            return f"off by {error:.2e}", step
    return "", 0


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).abs().max())


def from_plain(found: Sequence[Outcome], plain: Sequence[Outcome]) -> Iterator[str]:
    """How a run differs from the one in which nothing happened that should change nothing."""
    for rank, (a, b) in enumerate(zip(found, plain, strict=True)):
        if a.steps != b.steps:
            yield "rank as without the events"
        for number in range(len(a.last)):
            for step, (mine, other) in enumerate(zip(a.seen[number], b.seen[number], strict=True)):
                if not torch.equal(mine, other):
                    yield (
                        f"rank {rank}, network {number}: other bits than without the events when step {step} begins, "
                        f"off by {distance(mine, other):.2e}"
                    )
                    return
            if not torch.equal(a.mean[number], b.mean[number]):
                yield f"rank {rank}, network {number}: other bits than without the events at the end"
                return


def registered_rows() -> dict[str, list[str]]:
    """The rows of each algorithm."""
    found: dict[str, list[str]] = {}
    for name, row in ROWS.items():
        found.setdefault(row.name, []).append(name)
    return found
