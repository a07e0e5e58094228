"""Ranks compare digests of what they hold, and send only what differs."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch

from bagua_kernels.algorithms import Decentralized
from bagua_kernels.algorithms.wrapping import sending
from bagua_kernels.algorithms.wrapping.equal import digests, in_common, make_equal, share_state, sum_of_words
from bagua_kernels.algorithms.wrapping.sending import Sending
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.failures.session import Session
from tests import limits

CPU = torch.device("cpu")
LITTLE = 4096  # bytes that the comparison may take


def model() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(100_000), torch.randn(30, 70).t(), torch.arange(7), torch.zeros(3, dtype=torch.uint8)]
    tensors[0][:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return tensors


def test_what_is_equal_is_not_sent() -> None:
    """Also numbers that are not equal to themselves."""
    start = model()

    def rank(c: Communicator) -> int:
        make_equal(copy.deepcopy(start), c)
        return c.bytes_sent

    assert max(run_ranks(3, rank)) < LITTLE


@pytest.mark.parametrize(("index", "value"), [(0, 7.0), (1, 0.0), (0, -float("nan"))])
def test_only_what_differs_is_sent(index: int, value: float) -> None:
    """By its bits: 0.0 in place of -0.0 is a difference. All ranks get those of the source."""
    start = model()

    def rank(c: Communicator) -> list[torch.Tensor]:
        tensors = copy.deepcopy(start)
        if c.rank == 1:
            tensors[0][index] = value
            tensors[2][3] = 5
        tensors[1] += c.rank == 2
        own = [each.clone() for each in tensors]
        make_equal(tensors, c, src=1)
        if c.rank == 1:
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(own, tensors, strict=True))
        return tensors

    results = run_ranks(3, rank)
    for tensors in results:
        for got, expected in zip(tensors, results[1], strict=True):
            assert got.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))


def test_one_bit_changes_a_digest() -> None:
    """Of any dtype and length, by either way to compute it."""
    for data in (
        torch.zeros(1, dtype=torch.uint8),
        torch.zeros(4099, dtype=torch.uint8),
        torch.zeros(1 << 23, dtype=torch.uint8),
    ):
        seen = {tuple(digests([data], CPU)[0].tolist()), tuple(sum_of_words(data).tolist())}
        for place in {0, len(data) // 2, len(data) - 1}:
            changed = data.clone()
            changed[place] = 128
            seen |= {tuple(digests([changed], CPU)[0].tolist()), tuple(sum_of_words(changed).tolist())}
        assert len(seen) == 2 * (1 + len({0, len(data) // 2, len(data) - 1}))
    swapped = (
        torch.tensor([1, 2], dtype=torch.int32).view(torch.uint8),
        torch.tensor([2, 1], dtype=torch.int32).view(torch.uint8),
    )
    assert sum_of_words(swapped[0]).tolist() != sum_of_words(swapped[1]).tolist()
    # A view that begins within a word.
    assert (
        sum_of_words(torch.ones(9, dtype=torch.uint8)[1:]).tolist()
        == sum_of_words(torch.ones(8, dtype=torch.uint8)).tolist()
    )


@pytest.mark.parametrize("differs", [False, True])
def test_state_of_an_optimizer(differs: bool) -> None:
    """Adam's moments are as large as two models."""

    def rank(c: Communicator) -> tuple[int, float]:
        parameter = torch.nn.Parameter(torch.zeros(100_000))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        parameter.grad = torch.ones(100_000) * (1 + c.rank * differs)
        optimizer.step()
        share_state(optimizer, c)
        return c.bytes_sent, float(optimizer.state[parameter]["exp_avg"].mean())

    results = run_ranks(2, rank)
    assert results[0][1] == results[1][1]
    assert (max(sent for sent, _ in results) > 800_000) == differs


def test_tensors_of_a_state_are_sent_as_tensors() -> None:
    """Counters that are views of one vector, tensors in two places and strides; with few bytes beside the elements."""

    class Kept(torch.optim.SGD):
        """Has states of several kinds."""

        def fill(self, value: float) -> None:
            parameters = self.param_groups[0]["params"]
            steps = torch.full((len(parameters),), value)
            shared = torch.full((5,), value)
            for number, parameter in enumerate(parameters):
                self.state[parameter] = {
                    "step": steps[number],
                    "exp_avg": torch.full((4, 3), value + number).t(),
                    "shared": (shared, [value]),
                    "wide": torch.full((2,), value, dtype=torch.float64).expand(3, 2),
                }

    def rank(c: Communicator) -> int:
        parameters = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(400)]
        optimizer = Kept(parameters, lr=torch.tensor(0.5 + c.rank))
        optimizer.fill(1.5 + c.rank)
        before = c.bytes_sent
        share_state(optimizer, c)
        states = [optimizer.state[parameter] for parameter in parameters]
        for number, state in enumerate(states):
            assert float(state["step"]) == 1.5
            assert state["exp_avg"].eq(1.5 + number).all()
            assert state["exp_avg"].stride() == (1, 3)
            assert state["wide"].tolist() == [[1.5, 1.5]] * 3
            assert state["shared"][0] is states[0]["shared"][0]
            assert state["shared"][1] == [1.5]
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
        return c.bytes_sent - before

    assert sum(run_ranks(2, rank)) < 400 * 300


@pytest.mark.parametrize("differs", [False, True])
def test_what_ranks_have_in_common(differs: bool) -> None:
    """All of it costs a digest; what others lack costs the texts."""

    def rank(c: Communicator) -> tuple[list[object], int]:
        mine: dict[tuple[int, str], str] = {(number, "exp_avg"): "float32 (3,)" for number in range(500)}
        if differs and c.rank == 1:
            del mine[7, "exp_avg"]
            mine[8, "exp_avg"] = "float32 (4,)"
        before = c.bytes_sent
        return in_common(mine, c), c.bytes_sent - before

    results = run_ranks(3, rank)
    assert len({str(keys) for keys, _ in results}) == 1
    keys, sent = results[0]
    assert set(keys) == {(number, "exp_avg") for number in range(500) if not differs or number not in (7, 8)}
    assert (sent < 200) == (not differs)


def test_an_equal_model_is_wrapped_without_sending_it() -> None:
    """And one of another seed becomes rank 0's."""
    torch.manual_seed(0)
    equal = torch.nn.Linear(300, 300)

    def rank(c: Communicator) -> tuple[int, torch.Tensor]:
        module = copy.deepcopy(equal)
        wrapper = Decentralized(module, torch.optim.Adam(module.parameters()), communicator=c)
        sent = wrapper._setup_bytes
        wrapper.close()
        if c.rank == 1:
            torch.nn.init.zeros_(module.weight)
        wrapper = Decentralized(module, torch.optim.Adam(module.parameters()), communicator=c)
        wrapper.close()
        return sent, module.weight.detach()

    results = run_ranks(2, rank)
    assert all(sent < 90_000 for sent, _ in results)
    assert all(torch.equal(weight, equal.weight) for _, weight in results)


class Slow:
    """A communicator that says how many bytes have moved, with a clock of the test's."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.session = Session("world", 1.0, 0, (0, 1), None)


def test_long_sending_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line: what, how much, how fast, how long."""
    slow, told = Slow(), threading.Event()
    now = iter(range(10**6))
    monkeypatch.setattr(sending, "_LOOK", 0.001)
    monkeypatch.setattr(sending.time, "monotonic", lambda: float(next(now)))
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Sending, "_show", lambda *_: told.set())
    counts = iter([0, *[375_000] * 10**6])
    slow.session.moves = lambda: next(counts)
    with Sending("a model", 10e6, slow):  # type: ignore[arg-type]
        assert told.wait(limits.seconds(20))
    assert (
        len(
            [each for each in caplog.messages if each.startswith("a model is being sent: 10 MB, of which 375 kB took ")]
        )
        == 1
    )
