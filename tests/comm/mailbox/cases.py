"""What every mailbox does: functions of one rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Mailbox, Work
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError, RankLostError
from tests import limits
from tests.comm.backends.sockets.common import until

LARGE = 1 << 40


def neighbours(box: Mailbox) -> tuple[int, int]:
    """The ranks to the left and to the right on a ring."""
    return (box.rank - 1) % box.size, (box.rank + 1) % box.size


def value(src: int, dst: int, number: int, n: int = 5) -> torch.Tensor:
    """What a rank sends to another one under a number."""
    return torch.from_numpy(np.random.default_rng([src, dst, number]).standard_normal(n))


def meet(box: Mailbox, number: int = LARGE - 1) -> None:
    """Waits for all other ranks."""
    others = [rank for rank in range(box.size) if rank != box.rank]
    got = {rank: torch.zeros(1) for rank in others}
    box.exchange(got, {rank: torch.ones(1) for rank in others}, number).wait()
    assert all(one.item() == 1 for one in got.values())


def case_all_with_all(box: Mailbox) -> None:
    """Each rank sends something else to each."""
    others = [rank for rank in range(box.size) if rank != box.rank]
    got = {src: torch.empty(5, dtype=torch.float64) for src in others}
    work = box.exchange(got, {dst: value(box.rank, dst, 7) for dst in others}, 7)
    work.wait()
    work.wait()
    assert work.is_completed()
    for src, one in got.items():
        assert one.equal(value(src, box.rank, 7))


def case_shapes_and_dtypes(box: Mailbox) -> None:
    """Sizes and dtypes may differ between the two directions; no element is no message."""
    left, right = neighbours(box)
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
    for number, dtype in enumerate(kinds):
        sent = torch.arange(-6, 6).reshape(3, 4).to(dtype)
        got = torch.zeros(12, dtype=dtype)
        box.exchange({left: got}, {right: sent}, number).wait()
        assert got.view(torch.uint8).equal(sent.flatten().view(torch.uint8)), dtype
    large, small = torch.empty(1000, dtype=torch.float64), torch.empty((), dtype=torch.int16)
    if box.rank < right:
        box.exchange({right: small}, {right: value(0, 0, 0, 1000)}, LARGE).wait()
        assert small.item() == 7
    if left < box.rank:
        box.exchange({left: large}, {left: torch.tensor(7, dtype=torch.int16)}, LARGE).wait()
        assert large.equal(value(0, 0, 0, 1000))
    nothing = torch.empty(0)
    assert box.exchange({left: nothing}, {right: nothing}, LARGE + 1).is_completed()
    assert box.exchange({}, {}, LARGE + 1).is_completed()


def case_any_order(box: Mailbox) -> None:
    """Numbers match, whatever the order of the calls and of the waits; also those that 32 bits do not hold."""
    left, right = neighbours(box)
    numbers = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 63) - 1]
    order = np.random.default_rng(box.rank)
    got = {number: torch.empty(5, dtype=torch.float64) for number in numbers}
    works = [
        box.exchange({left: got[number]}, {right: value(box.rank, right, number % 1000)}, number)
        for number in order.permutation(np.array(numbers, dtype=object))
    ]
    for place in order.permutation(len(works)):
        works[place].wait()
    for number, one in got.items():
        assert one.equal(value(left, box.rank, number % 1000)), number


def case_any_thread(box: Mailbox) -> None:
    """Several threads exchange at once; others wait for what they have started."""
    left, right = neighbours(box)
    got = torch.empty(40, 5, dtype=torch.float64)
    works: dict[int, Work] = {}

    def start(numbers: Sequence[int]) -> None:
        for number in numbers:
            works[number] = box.exchange({left: got[number]}, {right: value(box.rank, right, number)}, number)

    def wait(numbers: Sequence[int]) -> None:
        for number in numbers:
            works[number].wait()

    everything = np.random.default_rng(box.rank).permutation(40).tolist()
    for do in (start, wait):
        threads = [threading.Thread(target=do, args=(everything[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limits.seconds(30))
            assert not thread.is_alive()
    for number in range(40):
        assert got[number].equal(value(left, box.rank, number))


def case_only_one_way(box: Mailbox) -> None:
    """A rank that only sends does not wait for its receiver; what it sent is there when it is asked for."""
    left, right = neighbours(box)
    sent = value(box.rank, right, 3)
    box.exchange({}, {right: sent}, 3).wait()
    sent.zero_()
    meet(box)
    got = torch.empty(5, dtype=torch.float64)
    box.exchange({left: got}, {}, 3).wait()
    assert got.equal(value(left, box.rank, 3))


def case_one_tensor_for_all(box: Mailbox) -> None:
    """Several ranks may get one tensor."""
    others = [rank for rank in range(box.size) if rank != box.rank]
    mine, got = value(box.rank, 0, 0), {src: torch.empty(5, dtype=torch.float64) for src in others}
    box.exchange(got, dict.fromkeys(others, mine), 0).wait()
    assert all(one.equal(value(src, 0, 0)) for src, one in got.items())


def case_letters(box: Mailbox) -> None:
    """Letters of two ranks arrive in order, whatever their length; time can be up."""
    others = [rank for rank in range(box.size) if rank != box.rank]
    letters = [b"", b"x", bytes(range(256)) * 256, b"last"]
    assert len(letters[2]) == 64 << 10
    for letter in letters:
        for dst in others:
            box.post(dst, letter)
    taken = [box.take(10.0) for _ in range(len(letters) * len(others))]
    for src in others:
        assert [one[1] for one in taken if one is not None and one[0] == src] == letters
    meet(box)
    assert box.take(0.0) is None
    with pytest.raises(ValueError, match="at most 65536 bytes, got 65537"):
        box.post(others[0], b"x" * 65537)


def case_bytes_sent(box: Mailbox) -> None:
    """Tensors and letters count, without headers."""
    left, right = neighbours(box)
    before = box.bytes_sent
    box.exchange({left: torch.empty(100)}, {right: torch.ones(100)}, 0).wait()
    box.post(right, b"12345")
    assert box.take(10.0) is not None
    assert box.bytes_sent - before == 405


def case_arguments(box: Mailbox) -> None:
    """Errors name what was got and expected, and leave the mailbox usable."""
    _, right = neighbours(box)
    x = torch.zeros(4)
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "torch.Tensor, got list", lambda: box.exchange({right: [1.0]}, {}, 0)),  # type: ignore[dict-item]
        (ValueError, "contiguous", lambda: box.exchange({}, {right: torch.zeros(4, 2).t()}, 0)),
        (ValueError, "on cpu", lambda: box.exchange({}, {right: torch.zeros(4, device="meta")}, 0)),
        (ValueError, "another rank", lambda: box.exchange({box.rank: x}, {}, 0)),
        (ValueError, f"from 0 to {box.size - 1}", lambda: box.exchange({box.size: x}, {}, 0)),
        (ValueError, "memory of its own", lambda: box.exchange({right: x}, {right: x}, 0)),
        (ValueError, "number", lambda: box.exchange({right: x}, {}, 1 << 63)),
        (ValueError, "number", lambda: box.exchange({right: x}, {}, -1)),
        (TypeError, "bytes", lambda: box.post(right, "letter")),  # type: ignore[arg-type]
        (TypeError, "int", lambda: box.post("0", b"")),  # type: ignore[arg-type]
        (ValueError, "another rank", lambda: box.drop([box.rank])),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    meet(box)


def case_mismatch(box: Mailbox) -> None:
    """Sizes and dtypes that differ at the two ends: the receiver hears both, and everything else goes on."""
    left, right = neighbours(box)
    for number, (sent, expected, text) in enumerate(
        [
            (torch.zeros(3), torch.zeros(4), r"rank \d sent (3 elements|12 bytes) of torch.float32.*(4|16)"),
            (torch.zeros(4, dtype=torch.int32), torch.zeros(4), r"torch.int32.* expected .*torch.float32"),
        ]
    ):
        work = box.exchange({left: expected}, {right: sent}, number)
        with pytest.raises(MismatchError, match=text) as caught:
            work.wait()
        assert caught.value.ranks == tuple(sorted((left, box.rank)))
    assert box.lost() == {}
    meet(box)


def case_late_neighbour(box: Mailbox, seconds: float = 2.0) -> None:
    """A rank that is late is waited for."""
    left, right = neighbours(box)
    if box.rank == 1:
        time.sleep(seconds)
    got = torch.empty(5, dtype=torch.float64)
    box.exchange({left: got}, {right: value(box.rank, right, 0)}, 0).wait()
    assert got.equal(value(left, box.rank, 0))


def case_timeout(box: Mailbox) -> None:
    """A partner that does not take part is named, is not lost, and may take part in the next exchange."""
    left, right = neighbours(box)
    box.timeout = 0.3
    if box.rank == 0:
        got = torch.zeros(5)
        work = box.exchange({right: got}, {}, 0)
        with pytest.raises(CollectiveTimeoutError, match=rf"exchange #0 did not .* 0.3 s: rank {right}") as caught:
            work.wait()
        assert caught.value.ranks == (right,)
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
        assert box.take(0.1) is None
    box.timeout = 20.0
    meet(box)
    assert box.lost() == {}


def case_drop_below(box: Mailbox) -> None:
    """What was sent under lower numbers is gone, now and later; what waits for it fails."""
    left, right = neighbours(box)
    for number in range(3):
        box.exchange({}, {right: torch.full((5,), float(number))}, number).wait()
    meet(box)
    waiting = box.exchange({left: torch.zeros(5)}, {}, 99)
    box.drop(below=100)
    with pytest.raises(CommunicationError, match="drop"):
        waiting.wait()
    with pytest.raises(ValueError, match="from 100 on"):
        box.exchange({left: torch.zeros(5)}, {}, 99)
    box.drop(below=50)
    meet(box, LARGE)
    got = torch.empty(5)
    box.exchange({left: got}, {right: torch.ones(5)}, 100).wait()
    assert got.tolist() == [1.0] * 5


def case_drop_ranks(box: Mailbox) -> None:
    """A dropped rank hears why; to the others it is lost, with no word of it in errors about another rank."""
    if box.size < 4:
        return
    got = torch.empty(1)
    if box.rank == 0:
        box.exchange({}, dict.fromkeys(range(1, box.size), torch.ones(1)), 5).wait()
        meet(box)
        until(lambda: len(box.lost()) == box.size - 1)
        assert box.lost() == dict.fromkeys(range(1, box.size), "it left: it dropped this rank")
        return
    meet(box)
    meets = [rank for rank in range(1, box.size) if rank != box.rank]
    box.drop([0])
    assert box.lost()[0]
    with pytest.raises(RankLostError, match=r"rank 0 was lost \(it") as caught:
        box.exchange({0: got}, {}, 5).wait()
    assert caught.value.ranks == (0,)
    box.exchange({rank: torch.empty(1) for rank in meets}, dict.fromkeys(meets, torch.ones(1)), 6).wait()
    if box.rank == 1:
        box.leave("enough")
        return
    with pytest.raises(RankLostError, match=r"rank 1 was lost \(it left: enough\) during exchange #7$") as caught:
        box.exchange({1: got}, {}, 7).wait()
    assert caught.value.ranks == (1,)


def case_leave(box: Mailbox) -> None:
    """A rank that leaves is lost, with its reason, after everything that it sent; the others go on."""
    if box.size < 3:
        return
    others = range(1, box.size)
    meet(box)
    if box.rank == 0:
        for dst in others:
            box.exchange({}, {dst: value(0, dst, 1, 100_000)}, 1).wait()
            box.post(dst, b"good-bye")
        waiting = box.exchange({1: torch.zeros(1)}, {}, 77)
        box.leave("enough of it")
        box.leave("again")
        for broken in (waiting.wait, lambda: box.take(1.0), lambda: box.post(1, b""), lambda: meet(box)):
            with pytest.raises(CommunicationError, match="it left: enough of it"):
                broken()
        return
    until(lambda: 0 in box.lost())
    assert box.lost() == {0: "it left: enough of it"}
    got = torch.empty(100_000, dtype=torch.float64)
    box.exchange({0: got}, {}, 1).wait()
    assert got.equal(value(0, box.rank, 1, 100_000))
    assert box.take(0.0) == (0, b"good-bye")
    for broken in (box.exchange({0: torch.zeros(5)}, {}, 2), box.exchange({}, {0: torch.zeros(5)}, 2)):
        with pytest.raises(CommunicationError, match=r"rank 0 was lost \(it left: enough of it\)") as caught:
            broken.wait()
        assert caught.value.ranks == (0,)  # type: ignore[attr-defined]
    box.post(0, b"dropped")
    got = torch.empty(1)
    rest = {rank: torch.empty(1) for rank in others if rank != box.rank}
    box.exchange(rest, {rank: torch.ones(1) for rank in rest}, 3).wait()
    assert all(one.item() == 1 for one in rest.values())


CASES = [found for name, found in list(globals().items()) if name.startswith("case_")]
