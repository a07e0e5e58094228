"""States of algorithms on parameters that earlier versions wrote: training goes on from them bit for bit.

`python -m tests.algorithms.test_earlier_model_states` writes them anew, which is only for a version with a new format of states.
A state is written in the middle of a round. What is compared is all that a state has after a few more steps.
"""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithms.exact_training import TRAININGS, Loop, stored
from tests.grids import grid

FOLDER = Path(__file__).parent / "states" / "models"
BEFORE, AFTER, ORDERS = 5, 6, 4
# Some numbers of a state are times.
TIMES = "speed of rank "


def written(loop: Loop) -> dict[str, Any]:
    loop.train(BEFORE)
    return stored(loop.model.algorithm_state_dict())


def resumed(loop: Loop, states: list[dict[str, Any]]) -> dict[str, Any]:
    loop.load(states[loop.rank])
    loop.train(AFTER)
    return stored(packed(loop.model.algorithm_state_dict()))


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """A state whose parts have one vector each, of all their tensors in order, and whose numbers are no times."""
    found = {key: joined(state[key]) for key in ("parameters", "buffers", "optimizer")}
    found["vectors"] = {key: joined(named) for key, named in state["vectors"].items()}
    found["numbers"] = {key: number for key, number in flat(state["numbers"]).items() if not key.startswith(TIMES)}
    return {"steps": state["steps"], **found}


def flat(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by the names that the first versions gave them, in one level."""
    found = {name: value for name, value in numbers.items() if not isinstance(value, Mapping)}
    if pace := numbers.get("pace"):
        found |= {"rounds": pace["rounds"], "end of round": pace["end"]}
        found |= {f"steps of rank {rank}": steps for rank, steps in enumerate(pace["steps"])}
        found |= {f"speed of rank {rank}": speed for rank, speed in enumerate(pace["speeds"])}
    for index, norms in numbers.get("penalty", {}).items():
        found |= {f"norm {index} {name}": norms[name] for name in ("count", "mean", "variance")}
        found |= {f"norm {index} high {place}": norm for place, norm in enumerate(norms["high"])}
    found |= {f"lr of group {group}": rate for group, rate in numbers.get("learning_rates", {}).items()}
    if quorum := numbers.get("quorum"):
        found |= {"posts": quorum["posts"], **{f"merges {part}": merges for part, merges in quorum["merges"].items()}}
    return {name: float(value) for name, value in found.items()}


def joined(of: Any) -> torch.Tensor:
    tensors = [each.detach().reshape(-1).double() for each in tensors_of(of)]
    return torch.cat(tensors).to(torch.float32) if tensors else torch.zeros(0)


def tensors_of(of: Any) -> list[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        return [of]
    values = [of[key] for key in sorted(of, key=str)] if isinstance(of, dict) else of
    return [each for value in values for each in tensors_of(value)] if isinstance(values, list | tuple) else []


def load(name: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(gzip.decompress((FOLDER / f"{name}.pt.gz").read_bytes())), weights_only=True)


def save(name: str) -> None:
    training = TRAININGS[name]
    states = training.run(written)
    file = io.BytesIO()
    torch.save({"states": states, "expected": training.run(resumed, states)}, file)
    # Most of an archive of small tensors is what is between them.
    (FOLDER / f"{name}.pt.gz").write_bytes(gzip.compress(file.getvalue(), mtime=0))


@pytest.mark.filterwarnings("ignore:the penalty leaves out")
@grid(cover=1, name=[*TRAININGS])
def test_training_goes_on(name: str) -> None:
    training, saved = TRAININGS[name], load(name)
    # A rank whose courier was asked before its first step answers before the step or after it: an order has one of both.
    for seed in range(ORDERS if training.timed else 1):
        found = training.run(resumed, saved["states"], seed=seed)
        different = differences(found, saved["expected"], training.exact)
        if not different:
            return
    raise AssertionError(f"training goes on differently from a state of an earlier version: {different[:5]} differ")


def differences(found: Any, expected: Any, exact: bool, place: str = "") -> list[str]:
    """The places at which two states differ."""
    if type(found) is not type(expected):
        return [place]
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{place} {sorted(found)} {sorted(expected)}"]
        return [text for key in expected for text in differences(found[key], expected[key], exact, f"{place}[{key!r}]")]
    if isinstance(expected, list):
        return [
            text
            for rank, (one, other) in enumerate(zip(found, expected, strict=True))
            for text in differences(one, other, exact, f"rank {rank}: ")
        ]
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    return [] if same else [place]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:] or TRAININGS:
        save(each)
