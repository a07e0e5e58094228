"""AutoTune: the way of averaging gradients that is fastest for this model, on this machine and network."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Unpack

import torch
from rich.table import Table

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.choosing.candidates import Candidate, by_nodes, candidates
from bagua_kernels.algorithms.choosing.cost.facts import Network
from bagua_kernels.algorithms.choosing.cost.methods import CLASSES, methods
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
from bagua_kernels.algorithms.engine.listener import Listener
from bagua_kernels.algorithms.engine.options import BucketOptions, Manner
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.repaying import owed_by
from bagua_kernels.algorithms.gradient_algorithm import BUCKET_BYTES, GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.models.points import misfit
from bagua_kernels.algorithms.policy.optimizer_fit import divides_by_second_moment
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Nodes, StripedCommunicator
from bagua_kernels.comm.hierarchical.arguments import given
from bagua_kernels.compression.codec import parse_spec
from bagua_kernels.suggestions import did_you_mean

# Of the given size of buckets, for exact means: a smaller and a larger one are candidates, too.
_SIZES = (1.0, 0.2, 2.5)
_MATTERS = 0.1  # part of a step with exact means by which its exchanges have to change
logger = logging.getLogger(__name__)


@register
class AutoTune(GradientAlgorithm):
    """Synchronous data parallelism with the exchange that takes the least time, found in the first 60 steps.

    1. Average gradients exactly for four steps. Measure their time, the bytes, what communication threads and backward wait for,
       a message's latency, and what encoding and decoding costs here.
    2. Predict the time of a step with each candidate by `algorithms.choosing.cost`.
    3. The best three take turns of four steps, and exact means do where they are predicted to be near. What the payloads
       of one candidate lacked is added to the first gradients of the next.
    4. The fastest on the slowest rank, by its median step, and its variations take turns of four steps. These are one exchange
       at a time, other numbers of sockets, and with `apply_in_backward` all updates at the end of backward.
    5. Go on with the fastest of these.
    6. Each 25 steps, time an exact sum of 256 KiB. If it is off by half twice, predict with the new bandwidth and go on
       with step 3.

    A step is measured from the end of a backward pass to that of the next. All ranks choose alike, for they use the same
    numbers. What an optimizer with a second moment does not forgive, few bits or low rank, is no candidate with such an
    optimizer, nor without one. Where several ranks share a node, and there are several nodes, exact means by nodes are a
    candidate, too. With `exactness="any"`, see `settled`.

    Options and their defaults, all by keyword::

        exactness='synchronous'  "exact" for exact means alone; "synchronous" also for means that are rounded alike on
                                 all ranks; "any" also for what `settled` may return
        facts=None               those of an earlier run, which are used instead of measuring
        nodes=None               which ranks share a node; found from the environment if None
        scaler=None              that by which losses are scaled, if any
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        lanes=None               buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several

    Attributes:
        search: the state of the choice.
        facts: what was measured; None before.
        elsewhere: with `exactness="any"`, predicted seconds of algorithms that do not average each gradient, by name.
    """

    name = "auto"
    has_hook = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        exactness: str = "synchronous",
        facts: Facts | None = None,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[GradientOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`; it decides which candidates there are.
            exactness: "exact" for exact means alone; "synchronous" also for means that are rounded alike on all ranks; "any"
                also for what `settled` may return. Exact means are tried in buckets of several sizes.
            facts: those of an earlier run, which are used instead of measuring.
            nodes: which ranks share a node; found from the environment if None.
            scaler: that by which losses are scaled, if any.
            **options: as for `GradientAlgorithm`.

        Raises:
            ValueError: `exactness` is none of these, "any" comes without an optimizer, or as for `GradientAlgorithm`.
        """
        if exactness not in CLASSES:
            raise ValueError(
                f"expected exactness to be one of {', '.join(CLASSES)}, got {exactness!r}{did_you_mean(exactness, CLASSES)}"
            )
        if exactness == "any" and optimizer is None:
            raise ValueError('exactness="any" may go on with steps of single ranks: pass the optimizer, too')
        size = options.get("bucket_bytes", BUCKET_BYTES)
        sizes = [max(1, round(part * size)) for part in _SIZES]
        forgiving = optimizer is not None and not divides_by_second_moment(optimizer)
        self.exactness, self.nodes, self._optimizer = exactness, nodes, optimizer
        sized = None if "bucket_bytes" in options else module
        self.candidates = {one.label: one for one in candidates(exactness, sizes, sized, forgiving, scaler)}
        self.search = Search(next(iter(self.candidates)))
        self.facts, self.scaler = facts, scaler
        self.elsewhere: dict[str, float] = {}
        # The first buckets decide on connections; exact means use fewer. Training begins with the search's own choice.
        self._used = list(self.candidates.values())[-1]
        self._ranked: list[str] = []
        self._stripes: list[int] = []
        self._handover = Handover()
        self._leaving = False
        self._rows: list[tuple[float, float, float, float]] = []
        self._block: list[float] = []  # seconds of the steps of a turn
        self._before, self._ended = (0.0, 0.0, 0.0), 0.0
        super().__init__(module, optimizer, **options)
        if facts is not None and self._engine is not None:
            self.search.begin(self._predicted(facts))
        self.follow()

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        return misfit(self._optimizer, trained) if self.exactness == "any" and self._optimizer is not None else ""

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        super()._start(module, optimizer)
        if self._engine is None:
            return
        nodes = self._found_nodes()
        ranked = list(self.candidates.values())
        if nodes is not None and 1 < len(nodes.members) < self.communicator.size:
            ranked.append(by_nodes(ranked[0], nodes))
        communicator, several = self.communicator, self._engine.in_flight > 1
        opened = communicator.stripes if isinstance(communicator, StripedCommunicator) else 1
        used = communicator.tuning.stripes if isinstance(communicator, StripedCommunicator) else 1
        sockets = sorted({1, opened} - {used})
        varied = {one.label: one.variations(sockets, several, self._applies) for one in ranked}
        self.candidates = {one.label: one for one in [*ranked, *itertools.chain(*varied.values())]}
        self._ranked = [one.label for one in ranked]
        # Where ranks are is found out before training.
        self._setup_bytes = self._bytes_sent
        self.search.variations = {label: [one.label for one in ones] for label, ones in varied.items()}

    def _found_nodes(self) -> Nodes | None:
        """Which ranks share a node; None if that cannot be found, for it is needed for one candidate only."""
        if self.nodes is not None:
            return given(self.nodes).agree(self.communicator)
        try:
            return Nodes.find(self.communicator)
        except ValueError as error:  # the same on all ranks
            if self.communicator.rank == 0:
                logger.warning("means by nodes are no candidate: %s", error)
            return None

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """See `GradientAlgorithm.alignment`."""
        return self._used.recipe.alignment

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`."""
        return self._used.recipe.place(name, parameter)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return self._handover.to(self._used.recipe.exchange_for(bucket, communicator))

    def follow(self) -> None:
        """Has the search's choice average the next gradients; collective, while no exchange is under way."""
        self._use(self.candidates[self.search.plain if self._leaving else self.search.current])

    def _use(self, candidate: Candidate) -> None:
        engine = self._engine
        if engine is None or candidate is self._used:
            return
        # Buckets are for training, whatever mode this is called in.
        with torch.inference_mode(False), torch.no_grad():
            self._handover = Handover(engine.buckets, stays=candidate.recipe is self._used.recipe)
            self._used = candidate
            options = BucketOptions(candidate.recipe.alignment, candidate.bucket_bytes, candidate.recipe.small_first)
            self._use_sockets(candidate.sockets)
            manner = Manner(options, candidate.in_flight, candidate.in_backward)
            engine.exchange_otherwise(candidate.recipe.place, manner)
        self._handover = Handover()

    def _use_sockets(self, count: int | None) -> None:
        """Has messages take so many sockets between two ranks; None for as many as were used before."""
        found = [one for one in self._communicators() if isinstance(one, StripedCommunicator)]
        if count is not None and not self._stripes:
            self._stripes = [one.tuning.stripes for one in found]
        elif count is None and not self._stripes:
            return
        for one, before in zip(found, self._stripes, strict=True):
            one.retune(replace(one.tuning, stripes=before if count is None else count))
        if count is None:
            self._stripes = []

    def _predicted(self, facts: Facts) -> dict[str, float]:
        """Predicts a step of each candidate but for variations, and what each does on the processor."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in trained if p.dim() > 1 and p.numel()]
        elements = max(1, sum(p.numel() for p in trained))
        job, machine, network = facts.problem(matrices, elements, self.communicator.size)
        found = {}
        for label in self._ranked:
            one = self.candidates[label]
            there = network
            if one.nodes is not None:
                # What was measured is a rank's part of its node's link.
                ranks = min(len(node) for node in one.nodes.members)
                there = Network(ranks * len(one.nodes.members), ranks * network.bits_per_second, network.latency, ranks)
            found[label] = predict(one.method, replace(job, bucket_bytes=one.bucket_bytes), machine, there)
        if self.exactness == "any":
            # Local steps are counted by each rank, which a step that a scaler skips on one of them would upset.
            outside = [
                one for one in methods() if one.exactness == "any" and not (self.scaler and one.when == "rounds")
            ]
            self.elsewhere = {one.name: predict(one, job, machine, network).seconds for one in outside}
        return {label: one.seconds for label, one in found.items()}

    @property
    def listener(self) -> Listener:  # type: ignore[override]
        """See `GradientAlgorithm.listener`."""
        return self

    @property
    def compares(self) -> bool:
        """See `Listener.compares`."""
        return self.search.state != "chosen"

    def pass_ended(self, step: int, seconds: float, communicator: Communicator) -> None:
        """See `Listener.pass_ended`."""
        assert self._engine is not None
        # The optimizer's step and the next forward pass count, too: some candidates leave them less of the processor.
        ended = self._engine.timer.clock()
        since, self._ended = ended - (self._ended or ended), ended
        self._note(since, communicator)
        self.follow()

    def _note(self, seconds: float, communicator: Communicator) -> None:
        """Takes what a step took on this rank; collective."""
        assert self._engine is not None
        search, counters = self.search, self._engine.counters
        if search.state == "measuring":
            now = counters.wait_seconds, counters.exchange_seconds, float(self._bytes_sent)
            waited, busy, sent = (after - before for after, before in zip(now, self._before, strict=True))
            self._before = now
            if search.counts:
                self._rows.append((seconds, waited, busy, sent))
            search.note()
            if search.measured:
                self.facts = self._measure(communicator)
                search.drifted(sending(communicator, self.facts), 0.0)  # what later looks meet
                search.begin(self._predicted(self.facts))
        elif search.state == "trying":
            self._block.append(seconds)
            if len(self._block) == BLOCK:  # a message in each step would take long where delays are
                for each in greatest(communicator, self._block):
                    search.took(each)
                self._block = []
        elif search.rest() and self.facts is not None:
            there = sending(communicator, self.facts)
            if search.drifted(there, _MATTERS * self.facts.step):
                search.begin(self._predicted(self.facts.with_bandwidth(search.slower)))

    def settled(self) -> Algorithm:
        """What to train with from now on: this wrapper, or with `exactness="any"` an algorithm that is predicted to be faster.

        To be called between steps, on all ranks: `model = model.settled()`. It returns this wrapper until the choice is made,
        within `join`, and where exact or rounded means are as fast. Otherwise the algorithm that follows averages parameters,
        or takes local steps. Of those within 5 % of the fastest, it is the one that changes least. Before, steps with exact
        means pay what payloads have lacked of parameters that are trained. Ranks then have different models between two
        exchanges: see `ModelAlgorithm` for evaluating and saving.

        Returns:
            This wrapper; or another, after which this one cannot be used any more.
        """
        decided = self.search.state == "chosen" and self._engine is not None and not self._joining
        name = faster(self.elsewhere, self.search) if decided else ""
        if not name or self._engine is None:
            return self
        self._leaving = True
        self.follow()
        trained = {member.name for member in self._engine.members if member.parameter.requires_grad}
        if not trained.isdisjoint(owed_by(self._engine.buckets.state())):
            return self
        kind, options = parse_spec(next(one.spec for one in methods() if one.name == name))
        arguments: dict[str, Any] = {**options, "bucket_bytes": self._bucket_bytes}
        if self.scaler is not None:
            arguments["scaler"] = self.scaler
        return self.switch_to(Algorithm.registered[kind], optimizer=self._optimizer, **arguments)

    def _measure(self, communicator: Communicator) -> Facts:
        """What this machine and network are like, the same on all ranks; collective."""
        step, waited, busy, sent = (statistics.median(column) for column in zip(*self._rows, strict=True))
        device = communicator.device
        specs = sorted({one.method.codec for one in self.candidates.values() if one.method.codec})
        codecs = codec_seconds(specs, device) | {"": 0.0}
        own = Facts(step, waited, busy, sent, latency(communicator), codecs, pass_seconds(device))
        self._rows = []
        return slowest(communicator.all_gather_object(own))

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
        shown = [label for label in self.candidates if label in self._ranked or label in search.tried]
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

    def _decisions(self) -> list[Any]:
        """See `GradientAlgorithm._decisions`."""
        found = [("search", self.search.save()), ("used", self.used)]
        return [*found, ("facts", None if self.facts is None else asdict(self.facts))]

    def _decide(self, decisions: list[Any]) -> None:
        """See `GradientAlgorithm._decide`."""
        found = dict(decisions)
        if found.get("facts") is not None:
            self.facts = Facts(**found["facts"])
        if "search" in found:
            self.search.load(found["search"])

    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        found = dict(states[0]["decisions"])
        if "search" in found:
            # Other sockets, or one more exchange at a time, are no reason to refuse a choice.
            state, current, predicted, tried, *rest = found["search"]
            tables = [{self._known(label): value for label, value in table.items()} for table in (predicted, tried)]
            found |= {"search": [state, self._known(current), *tables, *rest], "used": self._known(found["used"])}
            states = [{**states[0], "decisions": list(found.items())}, *states[1:]]
        saved = {found["used"], *found["search"][2], *found["search"][3]} if "search" in found else set()
        if unknown := sorted(saved - set(self.candidates)):
            raise ValueError(
                f"the state was saved with the candidate {unknown[0]!r}, but there are {', '.join(self._ranked)}: use the "
                "same exactness and bucket_bytes, and an optimizer of the same kind"
            )
        # What was remembered belongs to the candidate in use, which may not be the one that is next.
        self._use(self.candidates[found.get("used", self.search.current)])
        super()._load(states)
        search, self._block, self._rows = self.search, [], []
        if self.facts is not None:
            predicted = self._predicted(self.facts.with_bandwidth(search.slower))
            if search.state == "trying":
                search.begin(predicted)
        self.follow()

    def _known(self, label: str) -> str:
        """The candidate of a label; of a variation that there is not here, what it is a variation of."""
        if label in self.candidates:
            return label
        return next((one for one in self._ranked if label.startswith(f"{one}, ")), label)

    def close(self) -> None:
        """See `Algorithm.close`."""
        try:
            for candidate in self.candidates.values():
                if candidate.nodes is not None:
                    candidate.recipe.close()
        finally:
            super().close()

    @property
    def used(self) -> str:
        """Label of what has averaged the last gradients, or will average the next."""
        return self._used.label
