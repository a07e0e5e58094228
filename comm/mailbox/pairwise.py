"""Averages of two ranks: one asks, the other answers without its training thread."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.rests import Rests
from bagua_kernels.comm.work import Work
from bagua_kernels.compression import Codec

# Kinds of letters.
_ASK, _DONE = 16, 17
_NUMBER, _QUESTION = struct.Struct("<q"), struct.Struct("<qq")


class Debtor(Protocol):
    """A model that is read and changed beside its training."""

    def read(self, out: Sequence[torch.Tensor]) -> object:
        """Copies the model and what is owed to it, never in the middle of a step."""

    def owe(self, difference: list[torch.Tensor]) -> None:
        """Keeps a difference that is to be added to the model, and its memory; `read` counts it in."""

    def buffers(self) -> list[torch.Tensor]:
        """Returns memory like the model's, a flat vector per bucket, with anything in it."""


def half_difference(other: torch.Tensor, own: torch.Tensor) -> None:
    """Replaces `other` by (other - own) / 2, whose sum with that of the other rank is exactly zero."""
    other.sub_(own).mul_(0.5)


class Plain:
    """Models are sent as they are."""

    def __init__(self, half: Callable[[torch.Tensor, torch.Tensor], None] = half_difference) -> None:
        """Takes what becomes of the other's model and one's own: (other - own) / 2, in place of the former."""
        self._half = half

    def encode(self, peer: int, asks: bool, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what is sent for a model."""
        return list(read)

    def room(self, sent: Sequence[torch.Tensor], model: Debtor) -> list[torch.Tensor]:
        """Returns memory for what the other sends, which is like what is sent here; the model may have some to spare."""
        return model.buffers()

    def decode(
        self, peer: int, asks: bool, own: Sequence[torch.Tensor], other: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns half the difference between what the other has sent and what was sent here."""
        for theirs, ours in zip(other, own, strict=True):
            self._half(theirs, ours)
        return other


class Encoded:
    """Sent is what a model differs from a reference that both ends of an edge share, encoded.

    Both ends use the decoded models, s and y, so that what they add has the sum zero. Then (s + y) / 2 is the reference. An edge
    has two, for each end may ask.
    """

    def __init__(self, codec: Codec, rank: int, start: Sequence[torch.Tensor]) -> None:
        """Begins with one reference for all edges.

        Args:
            codec: of differences.
            rank: this one, for seeds.
            start: the model of all ranks, float32.
        """
        self._codec, self._rank, self._count = codec, rank, 0
        self.restart(start)
        for model in self._start:
            # A courier that compiles kernels answers nobody meanwhile, and would be taken for lost.
            codec.decode(codec.encode(torch.zeros_like(model), seed=0), torch.empty_like(model))

    def restart(self, start: Sequence[torch.Tensor]) -> None:
        """Begins anew with a model that all ranks have."""
        self._start = [each.to(torch.float32, copy=True) for each in start]
        self._references: dict[tuple[int, bool], list[torch.Tensor]] = {}

    def _reference(self, peer: int, asks: bool) -> list[torch.Tensor]:
        key = peer, asks
        if key not in self._references:
            self._references[key] = [each.clone() for each in self._start]
        return self._references[key]

    def encode(self, peer: int, asks: bool, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Plain.encode`."""
        payloads = []
        for own, reference in zip(read, self._reference(peer, asks), strict=True):
            self._count += 1
            payloads.append(
                self._codec.encode(own.to(torch.float32) - reference, seed=(self._count << 16) + self._rank)
            )
        return payloads

    def room(self, sent: Sequence[torch.Tensor], model: Debtor) -> list[torch.Tensor]:
        """See `Plain.room`."""
        return [torch.empty_like(each) for each in sent]

    def decode(
        self, peer: int, asks: bool, own: Sequence[torch.Tensor], other: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """See `Plain.decode`."""
        differences = []
        for ours, theirs, reference in zip(own, other, self._reference(peer, asks), strict=True):
            here = reference + self._codec.decode(ours, torch.empty_like(reference))
            there = reference + self._codec.decode(theirs, torch.empty_like(reference))
            differences.append((there - here).mul_(0.5))
            reference.copy_((there + here).mul_(0.5))
        return differences


@dataclass(frozen=True)
class _Question:
    """A question that is out: whom, since when, and its exchanges with what is sent and what is received."""

    peer: int
    began: float
    works: list[Work]
    sent: list[torch.Tensor]
    theirs: list[torch.Tensor]


class PairwiseAverage:
    """Ranks ask neighbours in turn, and both move half way to the other's model (AD-PSGD, Lian et al., ICML 2018).

    1. `start` asks a neighbour, with s, the model as it is read then; nothing is done if a question is out.
    2. The neighbour reads its model y when it hears of that, sends y, and is owed (s - y) / 2.
    3. This rank is owed (y - s) / 2.

    What is owed is added to the model, whatever training has done to it meanwhile. So the sum over both ranks stays the same, and
    no step is lost. A rank answers while its own question is out, so that no circle of ranks waits, in any graph.

    Attributes:
        exchanges: the number of questions that were asked here and answered.
    """

    def __init__(
        self,
        courier: Courier,
        neighbours: Sequence[int],
        model: Debtor,
        *,
        seed: int = 0,
        wire: Plain | Encoded | None = None,
    ) -> None:
        """Gives a courier, which is not started yet, its work.

        Args:
            courier: of this rank.
            neighbours: ranks that this one asks, drawn with equal probability; they must be able to reach all ranks.
            model: of this rank.
            seed: of the draws, to which the rank is added.
            wire: how models are sent; `Plain` by default.
        """
        self._courier, self._mailbox, self._neighbours = courier, courier.mailbox, tuple(neighbours)
        self._model, self._wire = model, wire or Plain()
        self._draws = random.Random(f"{seed} {courier.mailbox.rank}")
        self._rests = Rests(courier)
        self._asked = False
        self._count = 0
        self._question: _Question | None = None
        # What is sent while a question is out, and while one is answered.
        self._asking: list[torch.Tensor] = []
        self._read: list[torch.Tensor] = []
        self._later: list[tuple[int, int, int]] = []
        self.exchanges = 0
        courier.on(_ASK, lambda sender, body: self._later.append((sender, *_QUESTION.unpack(body))))
        courier.on(_DONE, self._hear_done)
        courier.work(self._rest)
        courier.work(self._answer)
        courier.work(self._ask)

    def start(self) -> None:
        """Asks the next neighbour, unless a question is out."""
        self._courier.check()
        with self._courier.changed:
            self._asked = True
        self._courier.wake()

    @property
    def rests(self) -> bool:
        """True from `rest` to `resume`."""
        return self._rests.resting

    @property
    def rest_number(self) -> int:
        """The number of this rank's present or next rest, from 0."""
        return self._rests.number

    def rest(self, *, early: bool = False) -> None:
        """Answers others, until all ranks rest; nobody asks afterwards until `resume`.

        Args:
            early: without effect: a question under way takes no longer than the rest.

        Raises:
            RankLostError: a rank is lost that did not rest.
        """
        self._rests.begin()
        self._rests.wait()

    def resume(self) -> None:
        """Ends a rest, when the model is what others may read again."""
        with self._courier.changed:
            self._rests.resume()
            self._asked = False
        self._courier.wake()

    def _rest(self) -> bool:
        """Sends word of a rest after the answer to this rank's last question, when nothing else is left to be done."""
        with self._courier.changed:
            tells = self._rests.resting and self._question is None and not self._rests.has_told()
        if tells:
            self._rests.tell(0)
        with self._courier.changed:
            self._rests.held = self._rests.everyone() is not None
        return False

    def _ask(self) -> bool:
        if self._question is not None:
            self._courier.expect(self._question.peer, self._question.began, "an average of two ranks")
        with self._courier.changed:
            if not self._asked or self._question is not None or self._rests.resting or not self._neighbours:
                return False
            self._asked = False
        peer = self._draws.choice(self._neighbours)
        read = self._asking = self._asking or self._model.buffers()
        self._model.read(read)
        sent = self._wire.encode(peer, True, read)
        theirs = self._wire.room(sent, self._model)
        # Of all questions of all ranks, each has numbers of its own.
        number = self._count * self._mailbox.size + self._mailbox.rank
        self._count += 1
        works = [
            self._mailbox.exchange({peer: other}, {peer: own}, number * len(sent) + index)
            for index, (own, other) in enumerate(zip(sent, theirs, strict=True))
        ]
        self._question = _Question(peer, self._mailbox.clock.now(), works, sent, theirs)
        self._courier.post(peer, _ASK, _QUESTION.pack(number, self._rests.number))
        return True

    def _answer(self) -> bool:
        """Answers a question. One of a rank that has resumed waits until this one has, whose model may be another until then."""
        with self._courier.changed:
            found = next((each for each in self._later if each[2] <= self._rests.number), None)
        if found is None:
            return False
        self._later.remove(found)
        sender, number, _ = found
        with torch.profiler.record_function(self._courier.label):
            self._read = self._read or self._model.buffers()
            self._model.read(self._read)
            sent = self._wire.encode(sender, False, self._read)
            theirs = self._wire.room(sent, self._model)
            for index, (own, other) in enumerate(zip(sent, theirs, strict=True)):
                self._mailbox.exchange({sender: other}, {sender: own}, number * len(sent) + index).wait()
            self._model.owe(self._wire.decode(sender, False, sent, theirs))
        self._courier.post(sender, _DONE, _NUMBER.pack(number))
        return True

    def _hear_done(self, sender: int, body: bytes) -> None:
        assert self._question is not None
        with torch.profiler.record_function(self._courier.label):
            for work in self._question.works:
                work.wait()
            self._model.owe(self._wire.decode(sender, True, self._question.sent, self._question.theirs))
        self._question = None
        self.exchanges += 1
