"""Features that meet in one training, by pairs, for all algorithms: compared with plain PyTorch, or what else is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bagua_kernels.algorithms import names
from tests.algorithms.meetings.checks import differences, registered_rows
from tests.algorithms.meetings.rows import ROWS
from tests.algorithms.meetings.trainings import Event, Training
from tests.grids import grid, only

# A rank saves its own state.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:this state_dict")]

STEPS = 5
SCALERS = ("none", "overflow", "shared")
STYLES = ("plain", "no_sync", "accumulate", "clip", "frozen", "two")
EVENTS = ("load", "swap", "move", "resume", "join", "switch")


def target_of(row: str) -> str:
    """What a training goes on with after `switch_to`: the other kind."""
    kind = ROWS[row]
    if kind.family in ("mean", "lossy"):
        # The count of steps goes on: by it the rounds of "decentralized_2" fall on one step or the other.
        return "decentralized_2" if kind.dtype == torch.float64 else "choco_whole"
    return "allreduce"


def meeting(row: str, scaler: str, style: str, event: str) -> Training:
    """A training in which a scaler, a way to take steps, and an event meet."""
    kind = ROWS[row]
    training = Training(row, batches=(STEPS, STEPS), optimizer="muon" if row == "mu_loco" else "sgd")
    if scaler != "none":
        nets = 2 if scaler == "shared" else 1
        # Before anything else: those who count rounds by their own steps are apart afterwards.
        early = 0 if kind.family != "local" or event in ("join", "swap") else STEPS - 1
        training = replace(
            training, nets=nets, scaler="own" if nets == 1 else "shared", overflows=frozenset({(early, 1, 0)})
        )
    changes = {
        "plain": {},
        "no_sync": {"micro": 2, "no_sync": True},
        "accumulate": {"micro": 2},
        "clip": {"clips": True},
        "frozen": {"frozen": True},
        "two": {"nets": 2},
    }
    training = replace(training, **changes[style])  # type: ignore[arg-type]
    # In the middle of a round of two or three steps.
    happens = {
        # The first one before a round whose momentum the next rounds keep.
        "load": (Event(1, "load"), Event(3, "load")),
        "swap": (Event(1, "swap", rank=0), Event(2, "swap"), Event(3, "swap", waits=True)),
        "move": (Event(1, "apply"), Event(2, "data"), Event(3, "unflatten", rank=1), Event(3, "data", rank=0)),
        "resume": (Event(3, "resume"),),
        "join": (),
        # Before several steps, whose rounds show by which count they come.
        "switch": (Event(1, "switch", row=target_of(row)),),
    }
    training = replace(training, events=happens[event])
    if event == "join":
        training = replace(training, batches=(STEPS, STEPS - 2))
    return training


def can_meet(row: str, scaler: str, style: str, event: str) -> bool:
    kind, nets = ROWS[row], 2 if style == "two" or scaler == "shared" else 1
    if row == "mu_loco" and style == "frozen":
        # Without the frozen layer there is no matrix for Muon.
        return False
    if event == "join":
        # Of two networks, each within its own join(), ranks would wait for one in the end of the other.
        return kind.joins and nets == 1
    if event == "resume":
        return kind.family != "courier"
    if event == "switch":
        # Scalers of ranks that take their own steps differ by then.
        return not kind.own_optimizer and (scaler == "none" or kind.family in ("mean", "lossy", "local"))
    return True


# One of each class in the default tier, and where a class has several ways to meet, one of each of these.
SAMPLE = (
    *(rows[0] for rows in registered_rows().values()),
    "compressed",
    "sgp_unequal",
    "diloco_delay",
    "decentralized_2",
)


@grid(row=only(list(ROWS), *SAMPLE), scaler=SCALERS, style=STYLES, event=EVENTS, where=can_meet)
def test_meeting(row: str, scaler: str, style: str, event: str) -> None:
    assert differences(meeting(row, scaler, style, event)) == []


def test_every_algorithm_has_a_row() -> None:
    assert set(registered_rows()) == set(names())
