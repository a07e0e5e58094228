"""What a guard or a trial has decided when a rank is lost: the same on all that are left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.algorithms.policy.guard import Guard
from bagua_kernels.algorithms.policy.only_if_faster import BLOCKS, OnlyIfFaster
from bagua_kernels.comm import Communicator, Membership, run_ranks
from tests.algorithms.test_healing import lose_the_barrier, parts_of, step_of, vector, wrapped

RANKS, TIMEOUT = 4, 5.0
SPEC = "sign:min_numel=0,error_feedback=False"
Look = Callable[[Engine, int, int], None]


class EndedError(Exception):
    """The end of a rank."""


def trains(communicator: Communicator, steps: int, look: Look, options: dict[str, Any]) -> dict[str, Any] | None:
    members = Membership(communicator)
    net, optimizer = parts_of(SPEC)
    algorithm = wrapped(SPEC, members, net, optimizer, **options)
    assert isinstance(algorithm, GradientAlgorithm)
    for step in range(steps):
        assert algorithm._engine is not None
        look(algorithm._engine, communicator.rank, step)
        try:
            step_of(algorithm, optimizer, communicator.rank, step)
        except EndedError:
            return None
    found = {"own": vector(net), "ranks": members.ranks, "epoch": members.epoch, "decided": algorithm.policy.state()}
    algorithm.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def survivors(steps: int, look: Look, **options: Any) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        # Of a guard that found much lost.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = [each for each in run_ranks(RANKS, trains, steps, look, options, timeout=TIMEOUT) if each is not None]
    for each in found:
        assert torch.equal(each["own"], found[0]["own"])
        assert each["decided"] == found[0]["decided"]
    return found


def test_a_decision_that_one_rank_has_missed() -> None:
    """The guard decides when the first pass ends. Rank 1 does not learn that others have come to that end."""

    def look(engine: Engine, rank: int, step: int) -> None:
        if (rank, step) == (1, 0):
            lose_the_barrier(engine.communicators[0])

    found = survivors(6, look, guard=Guard(every=100, bound=0.01, action="widen"))
    assert [each["epoch"] for each in found] == [2] * RANKS
    assert dict(found[0]["decided"])["guard"]


def test_a_decision_stays_after_a_loss() -> None:
    def look(engine: Engine, rank: int, step: int) -> None:
        if (rank, step) == (0, 3):

            def ends() -> None:
                raise EndedError

            engine.end = ends  # type: ignore[method-assign]

    found = survivors(6, look, guard=Guard(every=100, bound=0.01, action="exact"))
    assert [each["ranks"] for each in found] == [(1, 2, 3)] * 3
    assert dict(found[0]["decided"])["guard"]


def test_a_trial_that_loses_a_rank_begins_again() -> None:
    """Rank 0 ends when all compare their times."""
    length = 4 * BLOCKS
    ended = []

    def look(engine: Engine, rank: int, step: int) -> None:
        listener = engine._listener
        if (rank, step) != (0, length - 1) or not isinstance(listener, OnlyIfFaster):
            return
        assert listener.trial.outcome == "running"

        def ends(*_: Any) -> None:
            ended.append(step)
            raise EndedError

        listener.pass_ended = ends  # type: ignore[method-assign]

    found = survivors(length + 4, look, only_if_faster=True)
    assert ended
    assert [each["ranks"] for each in found] == [(1, 2, 3)] * 3
    assert found[0]["decided"] == []
    found = survivors(2 * length + 4, look, only_if_faster=True)
    assert dict(found[0]["decided"])["trial"] in ("compressed", "plain")
