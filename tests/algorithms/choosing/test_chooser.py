"""The chooser by itself: without an engine it chooses nothing, and a state of other candidates leaves it as it was."""

from __future__ import annotations

from typing import Any

import pytest

from bagua_kernels.algorithms import AutoTune
from bagua_kernels.algorithms.choosing.candidates import candidates
from bagua_kernels.algorithms.choosing.chooser import Chooser
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.choosing.tuned import PLAIN, SLOW, Wide, force, sgd
from tests.algorithms.ranks import loss_of

SIZE = 10 << 20


def chooser(exactness: str = "synchronous") -> Chooser:
    return Chooser(Wide(), candidates(exactness, [SIZE], None, True, None), [], SLOW, applies=False)


def test_without_an_engine_nothing_is_chosen() -> None:
    found = chooser()
    before, used = found.decisions(), found.used
    found.begin()
    found.resume()
    assert found.decisions() == before
    assert found.used is used
    assert found.search.state == "measuring"
    assert found.better == ""
    assert found.compares


def test_decisions_come_back() -> None:
    first, second = chooser(), chooser()
    first.search.current, first.search.state, first.search.reason = PLAIN, "chosen", "told to"
    second.load(second.expect(first.decisions()))
    assert second.search.save() == first.search.save()
    assert second.facts == first.facts
    assert not second.compares


def test_unknown_candidates_are_refused_before_anything_changes() -> None:
    found = chooser("exact")
    decisions: list[Any] = chooser().decisions()
    before = found.decisions()
    with pytest.raises(ValueError, match=r"saved with the candidate .* use the same exactness and bucket_bytes"):
        found.expect(decisions)
    assert found.decisions() == before


def test_a_closed_wrapper_chooses_no_more() -> None:
    """Its engine is gone, so that another choice replaces no exchanges."""

    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW, exactness="any")
        assert algorithm.elsewhere
        loss_of(algorithm, communicator.rank, 0).backward()
        used = algorithm.chooser.used
        algorithm.close()
        force(algorithm, algorithm.search.plain)
        assert algorithm.chooser.used is used
        assert algorithm.settled() is algorithm
        algorithm.close()

    run_ranks(2, rank)
