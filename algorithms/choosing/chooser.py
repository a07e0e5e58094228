"""The choice among candidates: measures, predicts, and has the engine go on with other exchanges."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.table import Table

from bagua_kernels.algorithms.choosing.candidates import Candidate, by_nodes
from bagua_kernels.algorithms.choosing.cost.facts import Network
from bagua_kernels.algorithms.choosing.cost.methods import Method
from bagua_kernels.algorithms.choosing.cost.predict import predict
from bagua_kernels.algorithms.choosing.elsewhere import faster
from bagua_kernels.algorithms.choosing.facts import (
    Facts,
    codec_seconds,
    greatest,
    latency,
    pass_seconds,
    sending,
    slowest,
)
from bagua_kernels.algorithms.choosing.handover import Handover
from bagua_kernels.algorithms.choosing.search import Search
from bagua_kernels.algorithms.choosing.turns import BLOCK
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.engine.listener import Listener
from bagua_kernels.algorithms.engine.member import Place
from bagua_kernels.algorithms.engine.options import BucketOptions, Manner
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.repaying import owed_by
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Nodes, StripedCommunicator

_MATTERS = 0.1  # part of a step with exact means by which its exchanges have to change


class Chooser(Listener):
    """Tries candidates in training, and goes on with the fastest; all ranks choose alike.

    Without an engine, as on one rank alone, it chooses nothing.

    Attributes:
        candidates: all of them, by label; the exact mean comes first.
        ranked: labels of those that are predicted, which are no variations of others.
        used: the candidate that has averaged the last gradients, or will average the next.
        search: the state of the choice.
        facts: what was measured; None before.
        elsewhere: predicted seconds of algorithms of other classes, by name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        listed: Sequence[Candidate],
        outside: Sequence[Method],
        facts: Facts | None,
        applies: bool,
    ) -> None:
        """Has chosen nothing.

        Args:
            module: whose gradients are averaged.
            listed: the candidates that do not depend on ranks; the exact mean is the first.
            outside: algorithms of other classes, which are only predicted.
            facts: those of an earlier run, which are used instead of measuring.
            applies: True if the engine updates parameters.
        """
        self.candidates = {one.label: one for one in listed}
        self.ranked: list[str] = []
        # The first buckets decide on connections; exact means use fewer. Training begins with the search's own choice.
        self.used = listed[-1]
        self.search = Search(next(iter(self.candidates)))
        self.facts = facts
        self.elsewhere: dict[str, float] = {}
        self._module, self._outside, self._applies = module, outside, applies
        self._engine: Engine | None = None
        self._nodes: Nodes | None = None
        self._stripes: list[int] = []
        self._handover = Handover()
        self._leaving = False
        self._rows: list[tuple[float, float, float, float]] = []
        self._block: list[float] = []  # seconds of the steps of a turn
        self._before, self._ended = (0.0, 0.0, 0.0), 0.0

    def connect(self, engine: Engine, nodes: Nodes | None) -> None:
        """Takes the engine, whose exchanges `exchange_for` has made, and lists what there is to choose from.

        Args:
            engine: whose exchanges are replaced.
            nodes: between which payloads are exchanged, and exact means may be; None for one tier.
        """
        self._engine, communicator = engine, engine.communicators[0]
        ranked = list(self.candidates.values())
        self._nodes = nodes
        if nodes is not None:
            ranked.append(by_nodes(ranked[0], nodes))
        beneath = communicator.flat
        opened = beneath.stripes if isinstance(beneath, StripedCommunicator) else 1
        used = beneath.tuning.stripes if isinstance(beneath, StripedCommunicator) else 1
        sockets = sorted({1, opened} - {used})
        varied = {one.label: one.variations(sockets, engine.in_flight > 1, self._applies) for one in ranked}
        self.candidates = {one.label: one for one in [*ranked, *itertools.chain(*varied.values())]}
        self.ranked = [one.label for one in ranked]
        self.search.variations = {label: [one.label for one in ones] for label, ones in varied.items()}

    def disconnect(self) -> None:
        """Drops the engine, which has been closed; calling it again does nothing."""
        self._engine = None

    def begin(self) -> None:
        """Has the first choice average the next gradients; collective."""
        if self.facts is not None and self._engine is not None:
            self.search.begin(self.predict(self.facts))
        self.follow()

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`."""
        return self.used.recipe.place(name, parameter)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`: it goes on with what the bucket's last exchange remembers."""
        return self._handover.to(self.used.recipe.exchange_for(bucket, communicator))

    def follow(self) -> None:
        """Has the search's choice average the next gradients; collective, while no exchange is under way."""
        self._use(self.candidates[self.search.plain if self._leaving else self.search.current])

    def _use(self, candidate: Candidate) -> None:
        engine = self._engine
        if engine is None or candidate is self.used:
            return
        # Buckets are for training, whatever mode this is called in.
        with torch.inference_mode(False), torch.no_grad():
            self._handover = Handover(engine.buckets, stays=candidate.recipe is self.used.recipe)
            self.used = candidate
            self._use_sockets(engine.communicators, candidate.sockets)
            engine.exchange_otherwise(candidate.recipe.place, _manner(candidate))
        self._handover = Handover()

    @property
    def is_plain(self) -> bool:
        """True if exact means will average the next gradients."""
        return self.used is self.candidates[self.search.plain]

    def restart(self) -> tuple[Place, Manner]:
        """Begins anew with exact means, as ranks are others; returns where gradients belong then, and how they are exchanged."""
        self.search.restart()
        self.elsewhere.clear()
        self.facts = None
        self._rows, self._block, self._stripes, self._leaving = [], [], [], False
        self._before, self._ended = (0.0, 0.0, 0.0), 0.0
        self.used = self.candidates[self.search.plain]
        return self.used.recipe.place, _manner(self.used)

    def _use_sockets(self, communicators: Sequence[Communicator], count: int | None) -> None:
        """Has messages take so many sockets between two ranks; None for as many as were used before."""
        found = [one.flat for one in communicators if isinstance(one.flat, StripedCommunicator)]
        if count is not None and not self._stripes:
            self._stripes = [one.tuning.stripes for one in found]
        elif count is None and not self._stripes:
            return
        for one, before in zip(found, self._stripes, strict=True):
            one.retune(replace(one.tuning, stripes=before if count is None else count))
        if count is None:
            self._stripes = []

    def predict(self, facts: Facts) -> dict[str, float]:
        """Returns the predicted seconds of a step with each candidate but for variations; predicts `elsewhere`, too."""
        assert self._engine is not None
        trained = [p for p in self._module.parameters() if p.requires_grad]
        matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in trained if p.dim() > 1 and p.numel()]
        elements = max(1, sum(p.numel() for p in trained))
        job, machine, network = facts.problem(matrices, elements, self._engine.communicators[0].size)
        found = {}
        for label in self.ranked:
            one = self.candidates[label]
            there = network
            if self._nodes is not None and not one.is_plain:
                # What was measured is a rank's part of its node's link.
                ranks = min(len(node) for node in self._nodes.members)
                there = Network(
                    ranks * len(self._nodes.members), ranks * network.bits_per_second, network.latency, ranks
                )
            found[label] = predict(one.method, replace(job, bucket_bytes=one.bucket_bytes), machine, there)
        self.elsewhere.update({one.name: predict(one, job, machine, network).seconds for one in self._outside})
        return {label: one.seconds for label, one in found.items()}

    @property
    def compares(self) -> bool:
        """See `Listener.compares`."""
        return self.search.state != "chosen"

    def pass_ended(self, step: int, seconds: float, communicator: Communicator) -> None:
        """See `Listener.pass_ended`."""
        assert self._engine is not None
        if communicator.size == 1:
            return  # alone, and others may come
        # The optimizer's step and the next forward pass count, too: some candidates leave them less of the processor.
        ended = self._engine.timer.clock()
        since, self._ended = ended - (self._ended or ended), ended
        self._note(self._engine, since, communicator)
        self.follow()

    def _note(self, engine: Engine, seconds: float, communicator: Communicator) -> None:
        """Takes what a step took on this rank; collective."""
        search, counters = self.search, engine.counters
        if search.state == "measuring":
            now = counters.wait_seconds, counters.exchange_seconds, float(sent_by(engine))
            waited, busy, sent = (after - before for after, before in zip(now, self._before, strict=True))
            self._before = now
            if search.counts:
                self._rows.append((seconds, waited, busy, sent))
            search.note()
            if search.measured:
                self.facts = self._measure(communicator)
                search.drifted(sending(communicator, self.facts), 0.0)  # what later looks meet
                search.begin(self.predict(self.facts))
        elif search.state == "trying":
            self._block.append(seconds)
            if len(self._block) == BLOCK:  # a message in each step would take long where delays are
                for each in greatest(communicator, self._block):
                    search.took(each)
                self._block = []
        elif search.rest() and self.facts is not None:
            there = sending(communicator, self.facts)
            if search.drifted(there, _MATTERS * self.facts.step):
                search.begin(self.predict(self.facts.with_bandwidth(search.slower)))

    def _measure(self, communicator: Communicator) -> Facts:
        """What this machine and network are like, the same on all ranks; collective."""
        step, waited, busy, sent = (statistics.median(column) for column in zip(*self._rows, strict=True))
        device = communicator.device
        specs = sorted({one.method.codec for one in self.candidates.values() if one.method.codec})
        codecs = codec_seconds(specs, device) | {"": 0.0}
        own = Facts(step, waited, busy, sent, latency(communicator), codecs, pass_seconds(device))
        self._rows = []
        return slowest(communicator.all_gather_object(own))

    @property
    def better(self) -> str:
        """Name of the algorithm of another class that is predicted to be faster; empty if none is, or nothing is chosen."""
        decided = self._engine is not None and self.search.state == "chosen"
        return faster(self.elsewhere, self.search) if decided else ""

    def leave(self) -> bool:
        """Has exact means average the next gradients, for good, so that they pay what payloads have lacked; collective.

        Returns:
            True once nothing is owed to a parameter that is trained.
        """
        assert self._engine is not None
        self._leaving = True
        self.follow()
        trained = {member.name for member in self._engine.members if member.parameter.requires_grad}
        return trained.isdisjoint(owed_by(self._engine.buckets.state()))

    def table(self) -> Table:
        """What was measured, predicted, tried and chosen."""
        search, facts = self.search, self.facts
        measured = "nothing measured yet"
        if facts is not None:
            rate = 8 * facts.sent * search.slower**-1 / max(facts.exchange, 1e-9) / 1e6
            measured = (
                f"{facts.step:.3g} s a step with exact means, {facts.waited:.3g} s of it waiting; "
                f"{facts.sent / 1e6:.3g} MB at {rate:.0f} Mbit/s; {1e3 * facts.latency:.2g} ms a message"
            )
        grid = Table(title=f"{search.state}: {search.current}\n{measured}", title_justify="left")
        for heading in ("candidate", "predicted s", "tried s", ""):
            grid.add_column(heading, justify="right" if heading.endswith(" s") else "left")
        shown = [label for label in self.candidates if label in self.ranked or label in search.tried]
        for label in sorted(shown, key=lambda one: search.predicted.get(one, math.inf)):
            predicted, times = search.predicted.get(label), search.tried.get(label)
            chosen = search.state == "chosen" and label == search.current
            grid.add_row(
                label,
                "" if predicted is None else f"{predicted:.4g}",
                f"{statistics.median(times):.4g}" if times else "",
                search.reason if chosen else "",
            )
        for name, seconds in sorted(self.elsewhere.items(), key=lambda one: one[1]):
            grid.add_row(name, f"{seconds:.4g}", "", "of another class")
        return grid

    def decisions(self) -> list[Any]:
        """Pairs of a name and a plain value, equal on all ranks."""
        found = [("search", self.search.save()), ("used", self.used.label)]
        return [*found, ("facts", None if self.facts is None else asdict(self.facts))]

    def expect(self, decisions: Sequence[Any]) -> list[Any]:
        """Has the candidate that was in use average gradients, as what is loaded next belongs to it; collective.

        Args:
            decisions: of a state, maybe with variations that there are not here.

        Returns:
            The decisions, with candidates that there are here, for `load`.

        Raises:
            ValueError: one of the candidates is not known here; nothing has changed then.
        """
        found: dict[str, Any] = dict(decisions)
        saved: set[str] = set()
        if "search" in found:
            # Other sockets, or one more exchange at a time, are no reason to refuse a choice.
            state, current, predicted, tried, *rest = found["search"]
            tables = [{self._known(label): value for label, value in table.items()} for table in (predicted, tried)]
            found |= {"search": [state, self._known(current), *tables, *rest], "used": self._known(found["used"])}
            saved = {found["used"], *tables[0], *tables[1]}
        if unknown := sorted(saved - set(self.candidates)):
            raise ValueError(
                f"the state was saved with the candidate {unknown[0]!r}, but there are {', '.join(self.ranked)}: use the "
                "same exactness and bucket_bytes, and an optimizer of the same kind"
            )
        # What was remembered belongs to the candidate in use, which may not be the one that is next.
        self._use(self.candidates[found.get("used", self.search.current)])
        return list(found.items())

    def load(self, decisions: Sequence[Any]) -> None:
        """Takes what `expect` gave."""
        found = dict(decisions)
        if found.get("facts") is not None:
            self.facts = Facts(**found["facts"])
        if "search" in found:
            self.search.load(found["search"])

    def resume(self) -> None:
        """Goes on from what was loaded; collective. A trial that was under way begins again."""
        self._block, self._rows = [], []
        if self.facts is not None and self._engine is not None:
            predicted = self.predict(self.facts.with_bandwidth(self.search.slower))
            if self.search.state == "trying":
                self.search.begin(predicted)
        self.follow()

    def _known(self, label: str) -> str:
        """The candidate of a label; of a variation that there is not here, what it is a variation of."""
        if label in self.candidates:
            return label
        return next((one for one in self.ranked if label.startswith(f"{one}, ")), label)


def _manner(candidate: Candidate) -> Manner:
    """Returns how a candidate's buckets are put together and exchanged."""
    options = BucketOptions(candidate.recipe.alignment, candidate.bucket_bytes, candidate.recipe.small_first)
    return Manner(options, candidate.in_flight, candidate.in_backward)


def sent_by(engine: Engine) -> int:
    """Bytes that this rank has put on the wire for an engine since its communicators were made."""
    return sum(each.bytes_sent for each in engine.communicators)
