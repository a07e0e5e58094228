"""Which way is used for which size: the table itself, and how it is measured."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import EVER, WAYS, Cost, Limits, Tuning
from bagua_kernels.comm.tuning import measure as tuning_measure
from bagua_kernels.comm.tuning.measure import borders, tune
from tests.comm import contract
from tests.comm.values import check, oracle, values
from tests.grids import folded, grid, only


def test_way_at_the_borders() -> None:
    """A limit belongs to the way before it."""
    tuning = Tuning(all_reduce=((100, "exchange"), (1000.5, "halving"), (EVER, "base")))
    ways = [tuning.way("all_reduce", n) for n in (0, 1, 100, 101, 1000, 1001, 1 << 50)]
    assert ways == ["exchange"] * 3 + ["halving"] * 2 + ["base"] * 2
    assert tuning.way("broadcast", 256 << 10) == "star"
    assert tuning.way("broadcast", (256 << 10) + 1) == "chain"


@grid(
    cover=1,
    fields__text=[
        ({"all_reduce": ()}, "expected all_reduce to be"),
        ({"all_reduce": ((10, "direct"),)}, "up to infinity"),
        ({"all_reduce": ((20, "direct"), (10, "ring"), (EVER, "ring"))}, "ascending"),
        ({"all_reduce": ((EVER, "sockets"),)}, "all_reduce knows exchange, .*got 'sockets'"),
        ({"all_gather": ((EVER, "halving"),)}, "all_gather knows direct, rounds, ring, base, got 'halving'"),
        ({"all_to_all": ((EVER, "ring"),)}, "all_to_all knows direct, base, got 'ring'"),
        ({"broadcast": ((EVER, "sockets"),)}, "broadcast knows star, tree, direct, chain, base"),
        ({"piece": 0}, "piece to be a whole number, 1 or more, got 0"),
        ({"window": 0}, "window to be a whole number, 1 or more"),
        ({"stripes": -1}, "stripes to be a whole number, 1 or more"),
        ({"split": 0}, "split to be a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_followed(fields: dict[str, Any], text: str) -> None:
    """The error says what was expected and got."""
    with pytest.raises(ValueError, match=text):
        Tuning(**fields)


def test_text_and_back() -> None:
    """Infinity and what was measured included."""
    tuning = Tuning(
        all_reduce=((1.5, "doubling"), (4096, "ring"), (EVER, "halving")),
        broadcast=((EVER, "base"),),
        piece=12345,
        window=9,
        stripes=3,
        split=77,
        measured={"all_reduce": [(1024, {"ring": Cost(0.5, 0.125), "base": Cost(0.25, 1.0)})]},
    )
    again = Tuning.from_json(tuning.to_json())
    assert again == tuning
    assert hash(again) == hash(tuning)
    assert [again.way("all_reduce", n) for n in (1, 2, 5000)] == ["doubling", "ring", "halving"]
    ((nbytes, costs),) = again.measured["all_reduce"]
    assert (nbytes, costs["ring"].processor, costs["base"].seconds) == (1024, 0.125, 0.25)
    assert again.measured == tuning.measured
    assert Tuning.from_json(Tuning().to_json()) == Tuning()
    assert Tuning.from_json("{}") == Tuning()


def test_text_is_json_for_other_programs_too() -> None:
    """Python's own reader takes Infinity, which is no JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    fields = json.loads(Tuning().to_json(), parse_constant=refuse)
    assert fields["all_to_all"] == [[None, "direct"]]
    assert Tuning.from_json('{"all_to_all": [[Infinity, "base"]]}').all_to_all == ((EVER, "base"),)


@folded(
    text=[
        "",
        "7",
        "[]",
        "no json",
        '{"unknown": [[1, "ring"]]}',
        '{"all_reduce": 5}',
        '{"all_reduce": [["x", "ring"]]}',
        '{"all_reduce": [[1, "ring"]]}',
        '{"all_reduce": [[1]]}',
        '{"piece": "big"}',
        '{"piece": 0}',
        '{"piece": 1.5}',
        '{"window": null}',
        '{"measured": 3}',
        '{"measured": {"all_reduce": [[1024, {"ring": 0.5}]]}}',
        '{"measured": {"all_reduce": [[1024, {"ring": [0.5]}]]}}',
    ],
)
def test_text_that_is_no_tuning(text: str) -> None:
    """Always a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        Tuning.from_json(text)


def chosen(rows: Sequence[tuple[int, Any]], *args: Any, **options: Any) -> Limits:
    """Calls `borders` with seconds, or pairs of seconds and processor time, which is 1 where it is not given."""
    full = [
        (nbytes, {way: Cost(*(cost if isinstance(cost, tuple) else (cost, 1.0))) for way, cost in costs.items()})
        for nbytes, costs in rows
    ]
    return borders(full, *args, **options)


def test_borders() -> None:
    """Geometric means between sizes whose fastest ways differ; beyond the last size, no way that sends too much."""
    rows = [
        (1024, {"exchange": 1.0, "direct": 2.0, "base": 3.0}),
        (4096, {"exchange": 1.0, "direct": 1.5, "base": 3.0}),
        (65536, {"exchange": 9.0, "direct": 2.0, "base": 3.0}),
        (1 << 20, {"direct": 7.0, "base": 3.0}),
    ]
    expected = ((math.sqrt(4096 * 65536), "exchange"), (math.sqrt(65536 * (1 << 20)), "direct"), (EVER, "base"))
    assert chosen(rows) == expected
    assert chosen(rows[:2]) == ((4096.0, "exchange"), (EVER, "direct"))
    assert chosen(rows[:1]) == ((1024.0, "exchange"), (EVER, "direct"))
    assert chosen([(1, {"direct": 2.0, "base": 1.0})]) == ((EVER, "base"),)
    for n in range(1, 5):
        Tuning(all_reduce=chosen(rows[:n]))
    beyond = ((1e4, "exchange"), (1e6, "halving"), (EVER, "ring"))
    table = chosen(rows[:3], beyond=beyond)
    assert table == (expected[0], (2.0 * 65536, "direct"), *beyond[1:])
    assert chosen([], beyond=beyond) == beyond
    close = {"direct": 1.0, "ring": 0.95, "base": 1.05}
    assert chosen([(1 << 20, close)]) == ((EVER, "ring"),)
    assert chosen([(1 << 20, close)], "direct", 1.12) == ((EVER, "direct"),)
    assert chosen([(1 << 20, {**close, "base": 0.9})], "direct", 1.12) == ((EVER, "base"),)


def test_processor_time_counts() -> None:
    """As much as it is told to, but not for a way that is much slower than the fastest."""
    rows = [(1 << 20, {"direct": (1.0, 0.3), "ring": (1.1, 0.2), "halving": (1.24, 0.0), "base": (1.05, 0.4)})]
    assert chosen(rows) == chosen(rows, processor=0.79) == ((EVER, "direct"),)
    assert chosen(rows, processor=2.0) == ((EVER, "halving"),)
    rows[0][1]["halving"] = (1.26, 0.0)
    assert chosen(rows, processor=0.9) == ((EVER, "direct"),)
    assert chosen(rows, processor=2.0) == ((EVER, "ring"),)
    assert chosen(rows, "base", 1.06, processor=2.0) == ((EVER, "base"),)


class Modelled:
    """A communicator on a network of one's own making, where each way takes the time that its table says.

    Args:
        size: the number of ranks.
        delay: seconds one way.
        rate: bytes a second of a link.
    """

    def __init__(self, size: int, delay: float, rate: float) -> None:
        self.size = size
        self.delay = delay
        self.rate = rate
        self.stripes = 1
        self.tuning = Tuning()
        self.spent = 0.0
        self.most = 0

    def retune(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [self.spent]  # nothing but the clock of the tuning asks

    def seconds(self, operation: str, way: str, nbytes: int) -> float:
        n = self.size
        least = 2 * (n - 1) / n
        table = {
            "exchange": (1, n - 1),
            "doubling": (math.log2(n), math.log2(n)),
            "direct": (2, least),
            "halving": (2 * math.log2(n), least),
            "ring": (2 * (n - 1), least),
            "base": (4 * (n - 1), 2 * least),
        }
        if operation == "broadcast":
            piece, log = min(1.0, Tuning().link / nbytes), math.log2(n)
            table = {"star": (1, n - 1), "chain": (n - 1, 1 + (n - 2) * piece), "base": (2 * (n - 1), n - 1)}
            table |= {"tree": (log, log), "direct": (2, least)}
        elif operation != "all_reduce":
            table = {"direct": (1, n - 1), "base": (2 * (n - 1), 2 * (n - 1))}
            table |= {"ring": (n - 1, n - 1), "rounds": (math.log2(n), n - 1)}
        delays, factor = table[way]
        return delays * self.delay + factor * nbytes / self.rate


@grid(rate=[10e6, 1e9], delay=[20e-6, 1e-3, 25e-3], size=[2, 4, 16, 64], cover=2)
def test_choice_on_a_modelled_network(size: int, delay: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times are what the ways cost, no size takes much longer than by its best way, and the budget is kept."""
    budget = 4.0
    model, chance = Modelled(size, delay, rate), random.Random(size)
    Call = tuple[str, int, Tuning]

    def call(communicator: Modelled, operation: str, nbytes: int, tuning: Tuning) -> Call:
        return operation, nbytes, tuning

    def race(
        communicator: Modelled,
        calls: dict[str, Call],
        rounds: int,
        row: int = 1,
        over: Callable[[], bool] | None = None,
    ) -> dict[str, Cost]:
        costs = {}
        for name, (operation, nbytes, tuning) in calls.items():
            seconds = chance.uniform(0.95, 1.1) * model.seconds(operation, tuning.way(operation, nbytes), nbytes)
            costs[name] = Cost(seconds, chance.uniform(0.0, seconds))
            model.most = max(model.most, nbytes)
        # As the real one, it asks after each round whether time is left.
        for done in range(1, rounds + 2):
            model.spent += sum(row * cost.seconds + model.delay for cost in costs.values())
            if over is not None and over():
                return costs if done > 1 else {}
        return costs

    monkeypatch.setattr(tuning_measure, "_barrier_time", lambda communicator: delay)
    monkeypatch.setattr(tuning_measure, "_call", call)
    monkeypatch.setattr(tuning_measure, "_race", race)
    tuning = tuning_measure._measure(model, budget)  # type: ignore[arg-type]
    # A round that has begun ends.
    assert model.spent <= 1.15 * budget
    assert model.most >= (1 << 22 if rate > 1e8 and delay < 1e-2 and size < 64 else 1 << 12)
    for operation, ways in WAYS.items():
        if operation == "barrier":
            continue
        for nbytes in (1 << shift for shift in range(8, 31)):
            times = {way: model.seconds(operation, way, nbytes) for way in ways}
            taken = times[tuning.way(operation, nbytes)]
            assert taken <= 4 * min(times.values()), (operation, nbytes, tuning.way(operation, nbytes), times)


def tuned(size: int, fn: Callable[[StripedCommunicator], Any], stripes: int = 1, **changes: Any) -> list[Any]:
    """Runs `fn` on ranks that are threads."""

    def run(c: Communicator) -> Any:
        communicator = StripedCommunicator(c, stripes=stripes, tuning=Tuning(**changes), host="127.0.0.1")
        try:
            result = fn(communicator)
            communicator.close()
        finally:
            communicator.abort()
        return result

    return run_ranks(size, run)


@pytest.mark.slow
@pytest.mark.parametrize("apply", only([True, False], True))
def test_ranks_agree_and_results_stay_right(
    apply: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same table on all ranks, followed if wanted."""
    monkeypatch.setattr(tuning_measure, "_SIZES", (1 << 10, 1 << 14, 1 << 20))
    monkeypatch.setattr(tuning_measure, "_LONG", math.inf)  # or every second size would do on a busy machine
    before = replace(Tuning(), piece=7777)

    def fn(c: StripedCommunicator) -> str:
        found = tune(c, budget=2.0, apply=apply)
        assert c.tuning == (found if apply else before)
        for n in (1, 5000, 300_001):
            parts = [values(r, n, torch.float32) for r in range(c.size)]
            x = parts[c.rank].clone()
            c.all_reduce(x, ReduceOp.AVG).wait()
            check(x, oracle(parts, ReduceOp.AVG))
        contract.case_movement(c)
        for operation in set(WAYS) - {"barrier"}:
            rows = found.measured[operation]
            assert [nbytes for nbytes, _ in rows] == [1 << 10, 1 << 14, 1 << 20][: len(rows)]
            assert all("base" in costs and min(min(cost) for cost in costs.values()) > 0 for _, costs in rows)
        assert found.stripes in (1, 2)
        return found.to_json()

    tables = tuned(3, fn, stripes=2, piece=7777)
    assert len(set(tables)) == 1
    assert set(json.loads(tables[0])) >= {"all_reduce", "measured", "stripes"}
    # Rank 0 alone has said what it was doing.
    lines = capsys.readouterr().err.splitlines()
    assert {line.split(",")[0] for line in lines} == {
        f"tune: measuring {operation}" for operation in set(WAYS) - {"barrier"}
    }
    assert len(lines) == len(WAYS) - 1


def test_table_is_kept_where_measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error leaves the table as it was."""

    def fail(communicator: Communicator, budget: float, progress: bool) -> Tuning:
        communicator.retune(Tuning(piece=1))  # type: ignore[attr-defined]
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(tuning_measure, "_measure", fail)

    def fn(c: StripedCommunicator) -> None:
        with pytest.raises(ZeroDivisionError):
            tune(c)
        assert c.tuning == Tuning(piece=54321)

    tuned(2, fn, piece=54321)


def test_what_there_is_to_choose_from() -> None:
    """One rank has nothing to measure, and other communicators have no table."""
    assert tuned(1, tune) == [Tuning()]

    def fn(c: Communicator) -> None:
        with pytest.raises(ValueError, match="expects a StripedCommunicator, got LocalCommunicator"):
            tune(c)

    run_ranks(2, fn)


def test_no_member_of_a_split_does_not_tune_all_ranks() -> None:
    """What `split` returned is passed on as it is."""
    with pytest.raises(ValueError, match="got None, which split returns"):
        tune(None)
