"""A mailbox over sockets where a rank is lost: its partners hear of it, and everything else goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from bagua_kernels.comm import Work
from bagua_kernels.comm.backends.sockets import inbox
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits
from tests.comm.backends.sockets.common import data, leaving_nothing, until
from tests.comm.mailbox.common import (
    HEADER,
    LEAVE,
    LETTER,
    PING,
    PONG,
    ByHand,
    among_threads,
    by_hand,
    frame,
    message,
    raises,
    zeros,
)
from tests.comm.mailbox.traffic import random_traffic
from tests.grids import grid


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


@pytest.mark.parametrize("which", ["tensors", "letters", "both"])
def test_broken_connection_concerns_its_rank_alone(which: str) -> None:
    """What has arrived is still there; a letter to the lost rank is dropped."""
    with by_hand(2) as box:
        got = [zeros(), zeros(), zeros()]
        lost, kept = box.exchange({1: got[0]}, {}, 0), box.exchange({2: got[1]}, {}, 0)
        both = box.exchange({1: got[0], 2: got[2]}, {}, 9)
        box.tensors[1].sendall(message(5, b"x" * 100) + message(6, b"half of it"[:5])[:-2])
        box.letters[1].sendall(frame(LETTER, b"last words"))
        for each in {"tensors": [box.tensors], "letters": [box.letters]}.get(which, [box.tensors, box.letters]):
            each[1].close()
        raises(lost, 1, r"rank 1 was lost \(its connection broke: .*\) during exchange #0")
        raises(both, 1, "exchange #9")
        assert box.lost().keys() == {1}
        box.post(1, b"dropped")
        assert box.take(1.0) == (1, b"last words")
        early = zeros()
        box.exchange({1: early}, {}, 5).wait()
        assert bytes(early.numpy()) == b"x" * 100
        for again in (box.exchange({1: got[0]}, {}, 6), box.exchange({}, {1: got[0]}, 7)):
            raises(again, 1, "rank 1 was lost")
        assert not kept.is_completed()
        box.tensors[2].sendall(message(0, b"y" * 100) + message(9, b"z" * 100))
        kept.wait()
        assert bytes(got[1].numpy()) == b"y" * 100
        until(lambda: not box._loop._inbox.unasked() or box._loop._inbox._ahead[2] == 100)
        assert not got[2].any()


def test_memory_of_what_was_for_a_lost_rank_is_freed() -> None:
    with by_hand() as box:
        work = box.exchange({}, {1: data(32 << 20)}, 0)
        until(lambda: bool(box._loop._links[1][0].out))
        box.letters[1].close()
        raises(work, 1, "rank 1")
        assert not box._loop._links[1][0].out


def test_what_has_arrived_counts_though_sending_fails_first() -> None:
    """A connection that has ended may fail to send before its last bytes were read."""
    with by_hand() as box:
        with box._loop._moving:
            box.tensors[1].sendall(message(0, b"x" * 100))
            box.letters[1].sendall(frame(LETTER, b"one") + frame(LEAVE, b"it left: enough"))
            box._loop._lose(box._loop._links[1][0], BrokenPipeError("it broke"))
        assert box.lost() == {1: "it left: enough"}
        assert box.take(0.0) == (1, b"one")
        got = zeros()
        box.exchange({1: got}, {}, 0).wait()
        assert bytes(got.numpy()) == b"x" * 100


def test_what_had_no_room_counts_though_its_rank_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_AHEAD", 1000)
    with by_hand() as box:
        texts = [bytes([number]) * 90_000 for number in range(3)]
        box.tensors[1].setblocking(False)
        sent = box.tensors[1].send(b"".join(message(number, text) for number, text in enumerate(texts)))
        box.tensors[1].close()
        until(lambda: 1 in box.lost())
        whole = sent // len(message(0, texts[0]))
        assert whole > 0
        for number in range(whole):
            got = zeros(90_000)
            box.exchange({1: got}, {}, number).wait()
            assert bytes(got.numpy()) == texts[number]


@grid(end=["lost", "late", "dropped"], begins=["early", "asked"], cover=1)
def test_memory_is_the_callers_again_after_an_error(end: str, begins: str) -> None:
    """The rest of a message that another partner's fault has cut short goes nowhere; the one behind it arrives."""
    with by_hand(2, timeout=0.5) as box:
        got, mine = zeros(), data(32 << 20)
        sent = mine.clone()
        if begins == "early":
            box.tensors[1].sendall(message(5, b"x" * 100)[:-40])
            until(lambda: bool(box._loop._inbox._arrivals))
        work = box.exchange({1: got, 2: zeros()}, {1: sent}, 5)
        if begins == "asked":
            until(lambda: len(box._loop._inbox._posted) == 2)
            box.tensors[1].sendall(message(5, b"x" * 100)[:-40])
        until(lambda: [each.left for each in box._loop._inbox._arrivals.values()] == [40])
        assert bool(got.any()) == (begins == "asked")
        if end == "lost":
            box.tensors[2].close()
            raises(work, 2, "rank 2")
        elif end == "late":
            answers = threading.Thread(target=answering, args=(box, work, [1, 2]))
            answers.start()
            with pytest.raises(CollectiveTimeoutError, match="ranks 1, 2 did not take part"):
                work.wait()
            answers.join()
        else:
            box.drop(below=6)
            with pytest.raises(CommunicationError, match="drop"):
                work.wait()
        got.zero_()
        sent.zero_()
        box.tensors[1].sendall(message(5, b"x" * 100)[-40:] + message(6, b"y" * 100))
        behind = zeros()
        box.exchange({1: behind}, {}, 6).wait()
        assert bytes(behind.numpy()) == b"y" * 100
        assert not got.any()
        # What had begun to leave arrives as it was.
        arrived = bytearray()
        box.tensors[1].settimeout(limits.seconds(10))
        while len(arrived) < HEADER.size + mine.numel():
            arrived += box.tensors[1].recv(1 << 20)
        assert arrived[HEADER.size :] == mine.numpy().tobytes()


def answering(box: ByHand, work: Work, peers: list[int]) -> None:
    """Some ranks are there, but not in the exchange."""
    while not work.is_completed():
        for peer in peers:
            box.letters[peer].sendall(frame(PONG))
        time.sleep(0.02)


def test_silent_rank_is_lost_and_one_that_answers_is_not() -> None:
    """Only the one that does not answer is lost: at once for later exchanges."""
    with by_hand(2, timeout=0.6) as box:
        silent = box.exchange({1: zeros()}, {}, 0)
        raises(silent, 1, r"rank 1 was lost \(nothing came from it for [\d.]+ s\)")
        assert [kind for kind, _ in box.answers(1)][:1] == [PING]
        later = box.exchange({1: zeros()}, {}, 1)
        until(later.is_completed)  # before anybody waits for it, whose timeout could end it
        raises(later, 1, "rank 1")
        late = box.exchange({2: zeros()}, {}, 0)
        answers = threading.Thread(target=answering, args=(box, late, [2]))
        answers.start()
        with pytest.raises(CollectiveTimeoutError, match="rank 2 did not take part") as caught:
            late.wait()
        answers.join()
        assert caught.value.ranks == (2,)
        assert box.lost().keys() == {1}


def test_rank_behind_the_partner_is_named() -> None:
    """Rank 2 answers that it waits for rank 1, which is silent: rank 1 is lost, though it is no partner."""
    with by_hand(2, timeout=0.8) as box:
        work = box.exchange({2: zeros()}, {}, 0)

        def answer() -> None:
            while not work.is_completed():
                if PING in (kind for kind, _ in box.answers(2)):
                    box.letters[2].sendall(frame(PONG, (1).to_bytes(4, "little")))
                time.sleep(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        raises(work, 1, "rank 1 was lost .nothing came from it")
        thread.join()
        assert box.lost().keys() == {1}


def test_questions_are_answered_with_the_ranks_that_are_waited_for() -> None:
    with by_hand(3) as box:
        work = box.exchange({1: zeros(), 3: zeros()}, {}, 0)
        box.letters[2].sendall(frame(PING))
        until(lambda: box.answers(2) == [(PONG, b"")])
        waiting = threading.Thread(target=raises, args=(work, 3, "rank 3"))
        waiting.start()
        until(lambda: bool(box._loop.waiting))
        box.letters[2].sendall(frame(PING))
        until(lambda: box.answers(2) == [(PONG, bytes([1, 0, 0, 0, 3, 0, 0, 0]))])
        box.tensors[1].sendall(message(0, bytes(100)))
        until(lambda: bool(box._loop._inbox._wanted[1] == 0))
        box.letters[2].sendall(frame(PING))
        until(lambda: box.answers(2) == [(PONG, bytes([3, 0, 0, 0]))])
        box.tensors[3].close()
        waiting.join(limits.seconds(10))
        assert not waiting.is_alive()


@pytest.mark.parametrize("text", [b"\x07\x00\x00\x00\x00", frame(LETTER, bytes(70_000))[:100]])
def test_frame_that_is_none(text: bytes) -> None:
    """Only the rank that sent it is lost."""
    with by_hand(2) as box:
        box.letters[1].sendall(text)
        until(lambda: 1 in box.lost())
        assert "expected a letter" in box.lost()[1]
        box.letters[2].sendall(frame(LETTER, b"x"))
        assert box.take(5.0) == (2, b"x")


def test_number_that_is_used_twice() -> None:
    with by_hand() as box:
        first = box.exchange({1: zeros()}, {}, 5)
        with pytest.raises(CommunicationError, match="number 5 is under way with rank 1"):
            box.exchange({1: zeros()}, {}, 5).wait()
        box.tensors[1].sendall(message(5, bytes(100)))
        first.wait()
        box.tensors[1].sendall(message(6, bytes(100)) * 2)
        until(lambda: 1 in box.lost())
        assert "sent number 6 again" in box.lost()[1]


@grid(ranks=[[1], [1, 2]])
def test_dropped_ranks(ranks: list[int]) -> None:
    """Nothing is kept of them, they hear why, and errors about others do not name them."""
    with by_hand(3) as box:
        for peer in (1, 2):
            box.tensors[peer].sendall(message(0, bytes(100)) + message(1, bytes(100))[:-1])
            box.letters[peer].sendall(frame(LETTER, b"x"))
        until(lambda: sum(box._loop._inbox._ahead.values()) == 400 and len(box._box._letters) == 2)
        box.drop(ranks)
        until(lambda: box.lost().keys() == {*ranks})
        assert sum(box._loop._inbox._ahead.values()) == 400 - 200 * len(ranks)
        assert {arrival.key[0] for arrival in box._loop._inbox.unasked()} == {1, 2} - {*ranks}
        assert len(box._box._letters) == 2 - len(ranks)
        assert box.answers(1) == [(LEAVE, b"it left: it dropped this rank")]
        raises(box.exchange({1: zeros()}, {}, 0), 1, "it was dropped")
        box.tensors[3].close()
        raises(box.exchange({3: zeros()}, {}, 0), 3, "rank 3")


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_and_a_loss(seed: int) -> None:
    among_threads(2 + seed % 4, lambda box: random_traffic(box, seed))
