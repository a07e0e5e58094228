"""Batches of ranks that may be lost, and that join: what nobody has drawn is dealt anew, and nothing twice."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import RoundSampler, from_spec
from bagua_kernels.algorithms.data.places import Places
from bagua_kernels.algorithms.local_steps import outer_loop
from bagua_kernels.algorithms.local_steps.outer_rounds import OuterRounds
from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.comm import Communicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from tests import limits
from tests.algorithms.local_steps.clocked import Clock, N, Vector
from tests.comm.membership.over_sockets import ends, with_joiner
from tests.grids import grid

SAMPLES, BATCH, EPOCHS, INTERVAL = 240, 2, 2, 4
SECRET = Secret.from_text("known to the ranks of this test alone")


class Drawn:
    """What ranks have drawn for steps, by name, how many rounds are in place, and how much was drawn for these."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}
        self.names: dict[LocalModel, int] = {}
        self.whole: dict[int, int] = {}
        self.placed: dict[int, int] = {}
        self.clocks: dict[threading.Thread, Clock] = {}

    def note(self, rounds: OuterRounds) -> None:
        name = self.names[rounds.local]
        self.placed[name] += 1
        self.whole[name] = len(self.samples[name]) - BATCH * rounds.options.delay


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    made, wait = Drawn(), OuterRounds.wait

    def noted(rounds: OuterRounds) -> None:
        was_under_way = rounds.under_way
        wait(rounds)
        if was_under_way:
            made.note(rounds)

    def paced(*arguments: Any, **options: Any) -> Pace:
        return Pace(*arguments, clock=made.clocks[threading.current_thread()], **options)

    monkeypatch.setattr(OuterRounds, "wait", noted)
    # In each epoch there is another one.
    monkeypatch.setattr(outer_loop, "Pace", paced)
    return made


def trains(members: Membership, spec: str, end: int | None, drawn: Drawn, *hooks: Any) -> bool:
    """Trains some epochs; returns False where it ends two steps after those of so many rounds that are in place."""
    module = Vector()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    clock = drawn.clocks[threading.current_thread()] = Clock()
    model: Any = from_spec(spec, module, optimizer, communicator=members.communicator, on_failure="heal")
    sampler = RoundSampler(SAMPLES, BATCH, model, seed=1)
    drawn.names[model.local] = members.name
    drawn.whole[members.name] = drawn.placed[members.name] = taken = 0
    batches = drawn.samples[members.name] = []
    for _ in range(sampler.epoch, EPOCHS):
        for indices in sampler:
            if drawn.placed[members.name] == end and len(batches) - drawn.whole[members.name] == 2 * BATCH:
                members._end("its process has ended")
                model.__exit__(RuntimeError, RuntimeError(), None)
                return False
            model()
            module.x.grad = torch.ones(N)
            clock.now += 1.0 + members.name
            optimizer.step()
            batches += indices
            taken += 1
            for hook in hooks:
                hook(taken)
    model.close()
    return True


def check_counts(drawn: list[int]) -> None:
    """Of what was drawn, each sample was drawn as often as any other, and once more in an epoch that has begun."""
    counts = np.bincount(drawn, minlength=SAMPLES)
    assert len(drawn) >= EPOCHS * SAMPLES
    assert counts.min() >= len(drawn) // SAMPLES
    assert counts.max() <= -(-len(drawn) // SAMPLES)


@grid(
    spec=["local_sgd", "diloco", "local_sgd:by_speed=True", "diloco:delay=1"],
    losses=[{2: 2}, {0: 2, 1: 2}, {3: 1, 0: 3}, {1: 0, 2: 0, 0: 1}],
    cover=1,
)
def test_what_lost_ranks_have_drawn_is_dealt_anew(spec: str, losses: dict[int, int], drawn: Drawn) -> None:
    """Steps of a lost rank count up to its last round that is in place."""

    def program(communicator: Communicator) -> None:
        members = Membership(communicator)
        text = f"{spec}{',' if ':' in spec else ':'}interval={INTERVAL}"
        if trains(members, text, losses.get(communicator.rank), drawn):
            members.prepare_close()
            members.communicator.barrier().wait()
            members.close()

    run_ranks(4, program, timeout=limits.seconds(10.0))
    assert len(drawn.samples) == 4
    check_counts(
        [
            index
            for rank, batches in drawn.samples.items()
            for index in (batches[: drawn.whole[rank]] if rank in losses else batches)
        ]
    )


@pytest.mark.parametrize("spec", ["diloco:interval=4", "local_sgd:interval=4,by_speed=True"])
def test_a_rank_that_joins_is_dealt_what_is_left(spec: str, drawn: Drawn) -> None:
    def program(members: Membership, joiner: threading.Thread) -> None:
        def hook(taken: int) -> None:
            if members.name == 0 and taken == 6:
                joiner.start()
            if taken == 6 and not members.has_joined:
                limits.until(lambda: members.is_wanted or len(members.ranks) > 3, "a process asks")

        assert trains(members, spec, None, drawn, hook)
        ends(members)

    with_joiner(3, SECRET, program, 30.0)
    assert len(drawn.samples) == 4
    assert drawn.samples[3]
    check_counts([index for batches in drawn.samples.values() for index in batches])


def test_places_against_lists() -> None:
    """Of lists, which are what places stand for."""
    dice = np.random.default_rng(0)
    for _ in range(100):
        made, known = Places(), list(range(1000))
        for _ in range(4):
            cuts = sorted(dice.integers(0, 60, 6).tolist())
            chosen, rest = list(zip(cuts[::2], cuts[1::2], strict=True)), cuts[-1] + int(dice.integers(0, 5))
            made = made.after([piece for begin, end in chosen for piece in made.pieces(begin, end)], rest)
            known = [known[index] for begin, end in chosen for index in range(begin, end)] + known[rest:]
            assert [made.at(index) for index in range(300)] == known[:300]
