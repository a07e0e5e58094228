"""An exchange that takes longer than the timeout goes on while something moves of it, or at the ranks that it waits for."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

import pytest

from bagua_kernels.comm.failures.stillness import Stir
from bagua_kernels.comm.mailbox.clock import RealClock
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.work import Work
from bagua_kernels.errors import CollectiveTimeoutError
from tests.comm.mailbox.common import PING, PONG, ByHand, by_hand, frame, message, zeros

ASK, TOLD = 4, 5
TOLD_BODY = struct.Struct("<QQ")
TIMEOUT, LENGTHS = 0.6, 2.5


def answering(box: ByHand, work: Work, tell: Callable[[int], tuple[int, int]]) -> None:
    """Rank 1 is there, and tells what it moves and begins at each look."""
    looks = 0
    while not work.is_completed():
        if {PING, ASK} & {kind for kind, _ in box.answers(1)}:
            looks += 1
            box.letters[1].sendall(frame(PONG) + frame(TOLD, TOLD_BODY.pack(*tell(looks))))
        time.sleep(0.01)


def pieces(box: ByHand, data: bytes) -> None:
    """Rank 1 sends a message in pieces, all of which together take some timeouts."""
    step = int(len(data) / (8 * LENGTHS))
    for begin in range(0, len(data), step):
        box.tensors[1].sendall(data[begin : begin + step])
        time.sleep(box.timeout / 8)


def test_a_message_may_take_longer_than_the_timeout() -> None:
    with by_hand(1, timeout=TIMEOUT) as box:
        got = zeros(800)
        work = box.exchange({1: got}, {}, 0)
        sending = threading.Thread(target=pieces, args=(box, message(0, b"x" * 800)))
        answers = threading.Thread(target=answering, args=(box, work, lambda looks: (0, 0)))
        sending.start()
        answers.start()
        work.wait()
        sending.join()
        answers.join()
        assert bytes(got.numpy()) == b"x" * 800


def test_a_partner_that_exchanges_with_others_first_is_waited_for() -> None:
    """It says what it moves; its own message comes after some timeouts."""
    with by_hand(1, timeout=TIMEOUT) as box:
        got = zeros()
        work = box.exchange({1: got}, {}, 0)
        answers = threading.Thread(target=answering, args=(box, work, lambda looks: (1000 * looks, 1)))
        late = threading.Timer(LENGTHS * box.timeout, box.tensors[1].sendall, [message(0, b"y" * 100)])
        answers.start()
        late.start()
        work.wait()
        late.join()
        answers.join()
        assert bytes(got.numpy()) == b"y" * 100


@pytest.mark.parametrize("busy", [True, False])
def test_a_partner_that_never_comes_is_late(busy: bool) -> None:
    """It answers, and in one case exchanges with others for ever."""
    with by_hand(1, timeout=TIMEOUT) as box:
        work = box.exchange({1: zeros()}, {}, 0)
        tell: Callable[[int], tuple[int, int]] = (
            (lambda looks: (1000 * looks, 100 * looks)) if busy else lambda _: (7, 7)
        )
        answers = threading.Thread(target=answering, args=(box, work, tell))
        answers.start()
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not take part") as caught:
            work.wait()
        answers.join()
        assert caught.value.ranks == (1,)


def test_an_error_tells_how_much_has_come() -> None:
    with by_hand(1, timeout=TIMEOUT) as box:
        work = box.exchange({1: zeros()}, {}, 0)
        box.tensors[1].sendall(message(0, b"x" * 100)[:-40])
        answers = threading.Thread(target=answering, args=(box, work, lambda looks: (0, 0)))
        answers.start()
        with pytest.raises(
            CollectiveTimeoutError, match=r"60 bytes of it came or went here, then nothing for [\d.]+ s"
        ):
            work.wait()
        answers.join()


class Clock(RealClock):
    """One that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Told:
    """What a courier uses of a mailbox; rank 1 tells how much it has moved."""

    rank, size, timeout = 0, 2, 10.0

    def __init__(self) -> None:
        self.clock = Clock()
        self.moved = self.begun = 0

    def ask(self, rank: int) -> None:
        pass

    def stir(self, rank: int) -> Stir:
        return Stir(self.moved, self.begun)

    def post(self, dst: int, letter: bytes) -> None:
        pass


@pytest.mark.parametrize("how", ["expect", "silent"])
def test_a_courier_waits_for_a_rank_that_moves_bytes(how: str) -> None:
    """Its courier is within a long exchange, and answers no letter; when nothing moves any more, its time runs."""
    told = Told()
    courier = Courier(told)  # type: ignore[arg-type]

    def gone() -> bool:
        if how == "silent":
            return courier.silent([1]) == [1]
        try:
            courier.expect(1, 0.0, "an answer")
        except CollectiveTimeoutError:
            return True
        return False

    for _ in range(100):
        told.clock.time += 1
        told.moved += 1000
        assert not gone()
    waited = 0
    while not gone():
        told.clock.time += 1
        waited += 1
    assert told.timeout - 1 <= waited <= told.timeout + 2
