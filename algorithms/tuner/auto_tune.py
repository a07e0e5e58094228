"""AutoTune: the way of averaging gradients that is fastest for this model, on this machine and network."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import asdict, replace
from typing import Any, Unpack

import torch
from rich.table import Table

from bagua_kernels.algorithms.engine.exchange import Exchange
from bagua_kernels.algorithms.engine.options import BucketOptions
from bagua_kernels.algorithms.gradient_algorithm import BUCKET_BYTES, GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.policy.optimizer_fit import divides_by_second_moment
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.tuner.candidates import Candidate, candidates
from bagua_kernels.algorithms.tuner.cost.predict import predict
from bagua_kernels.algorithms.tuner.facts import Facts, codec_seconds, latency, pass_seconds, slowest
from bagua_kernels.algorithms.tuner.repaying import Repaying, owed_by
from bagua_kernels.algorithms.tuner.search import Search
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp

# Of the given size of buckets, for exact means: a smaller and a larger one are candidates, too.
_SIZES = (1.0, 0.2, 2.5)
_CLASSES = ("exact", "synchronous")


@register
class AutoTune(GradientAlgorithm):
    """Synchronous data parallelism with the exchange that takes the least time, found in the first 45 steps.

    1. Average gradients exactly for eight steps. Measure their time, the bytes, what communication threads and backward wait for,
       a message's latency, and what encoding and decoding costs here.
    2. Predict the time of a step with each candidate by `algorithms.tuner.cost`.
    3. The best three take turns of four steps, and exact means do where they are predicted to be near. What the payloads
       of one candidate lacked is added to the first gradients of the next.
    4. Go on with the one whose median step was the fastest, on the slowest rank.
    5. If the seconds of a byte are off by half for 50 steps, predict with the new bandwidth and go on with step 3.

    All ranks choose alike, for they use the same numbers. What an optimizer with a second moment does not forgive, few bits
    or low rank, is no candidate with such an optimizer, nor without one.

    Attributes:
        search: the state of the choice.
        facts: what was measured; None before.
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
        scaler: torch.amp.GradScaler | None = None,
        **options: Unpack[GradientOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`; it decides which candidates there are.
            exactness: "exact" for exact means alone, in buckets of several sizes; "synchronous" for those, and for means that
                are rounded alike on all ranks.
            facts: instead of measuring: those of an earlier run.
            scaler: that by which losses are scaled, if any.
            **options: as for `GradientAlgorithm`.

        Raises:
            ValueError: `exactness` is neither, or as for `GradientAlgorithm`.
        """
        if exactness not in _CLASSES:
            raise ValueError(f"expected exactness to be one of {', '.join(_CLASSES)}, got {exactness!r}")
        size = options.get("bucket_bytes", BUCKET_BYTES)
        sizes = [max(1, round(part * size)) for part in _SIZES]
        forgiving = optimizer is not None and not divides_by_second_moment(optimizer)
        self.candidates = {one.label: one for one in candidates(exactness, sizes, forgiving, scaler)}
        self.search = Search(next(iter(self.candidates)))
        self.facts, self.scaler = facts, scaler
        # The first buckets decide on connections; exact means use fewer. Training begins with the search's own choice.
        self._used = list(self.candidates.values())[-1]
        self._owed: dict[str, torch.Tensor] = {}
        self._rows: list[tuple[float, float, float, float]] = []
        self._before = (0.0, 0.0, 0.0)
        self.policy = _Watch(self)
        super().__init__(module, optimizer, **options)
        if facts is not None and self._engine is not None:
            self.search.begin(self._predicted(facts))
        self.follow()

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """See `GradientAlgorithm.alignment`."""
        return self._used.recipe.alignment

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`."""
        return self._used.recipe.place(name, parameter)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        made = self._used.recipe.exchange_for(bucket, communicator)
        return Repaying(made, self._owed) if any(name in self._owed for name in bucket.names) else made

    def follow(self) -> None:
        """Has the search's choice average the next gradients; collective, while no exchange is under way."""
        self._use(self.candidates[self.search.current])

    def _use(self, candidate: Candidate) -> None:
        engine = self._engine
        if engine is None or candidate is self._used:
            return
        # Buckets are for training, whatever mode this is called in.
        with torch.inference_mode(False), torch.no_grad():
            self._owed = owed_by(engine.buckets.state())
            self._used = candidate
            options = BucketOptions(candidate.recipe.alignment, candidate.bucket_bytes, candidate.recipe.small_first)
            engine.exchange_otherwise(candidate.recipe.place, options)
        self._owed = {}

    def _predicted(self, facts: Facts) -> dict[str, float]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in trained if p.dim() > 1 and p.numel()]
        elements = max(1, sum(p.numel() for p in trained))
        job, machine, network = facts.problem(matrices, elements, self._communicator.size)
        return {
            label: predict(one.method, replace(job, bucket_bytes=one.bucket_bytes), machine, network).seconds
            for label, one in self.candidates.items()
        }

    def end_step(self, seconds: float, communicator: Communicator) -> None:
        """Takes what a step took on this rank; collective."""
        assert self._engine is not None
        search, counters = self.search, self._engine.counters
        now = counters.wait_seconds, counters.exchange_seconds, float(self._bytes_sent)
        waited, busy, sent = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        if search.state == "measuring":
            if search.counts:
                self._rows.append((seconds, waited, busy, sent))
            search.note()
            if search.measured:
                self.facts = self._measure(communicator)
                search.begin(self._predicted(self.facts))
                self._before = (*now[:2], float(self._bytes_sent))
        elif search.state == "trying":
            search.took(_greatest(communicator, seconds))
        elif sent > 0:
            search.pace(busy / sent)
            if search.asks and search.drifted(_greatest(communicator, search.window)) and self.facts is not None:
                search.begin(self._predicted(self.facts.with_bandwidth(search.slower)))

    def _measure(self, communicator: Communicator) -> Facts:
        """What this machine and network are like, the same on all ranks; collective."""
        step, waited, busy, sent = (statistics.median(column) for column in zip(*self._rows, strict=True))
        device = communicator.device
        specs = sorted({one.method.codec for one in self.candidates.values() if one.method.codec})
        codecs = {"": 0.0, **codec_seconds(specs, device)}
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
                f"{facts.step:.3g} s a backward pass with exact means, {facts.waited:.3g} s of it waiting; "
                f"{facts.sent / 1e6:.3g} MB at {rate:.0f} Mbit/s; {1e3 * facts.latency:.2g} ms a message"
            )
        grid = Table(title=f"{search.state}: {search.current}\n{measured}", title_justify="left")
        for heading in ("candidate", "predicted s", "tried s", ""):
            grid.add_column(heading, justify="right" if heading.endswith(" s") else "left")
        for label in sorted(self.candidates, key=lambda one: search.predicted.get(one, 0.0)):
            predicted, times = search.predicted.get(label), search.tried.get(label)
            chosen = search.state == "chosen" and label == search.current
            grid.add_row(
                label,
                "" if predicted is None else f"{predicted:.4g}",
                f"{statistics.median(times):.4g}" if times else "",
                search.reason if chosen else "",
            )
        return grid

    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        found = dict(states[0]["decisions"])
        saved = {found["used"], *found["search"][2], *found["search"][3]} if "search" in found else set()
        if unknown := sorted(saved - set(self.candidates)):
            raise ValueError(
                f"the state was saved with the candidate {unknown[0]!r}, but there are {', '.join(self.candidates)}: use the "
                "same exactness and bucket_bytes, and an optimizer of the same kind"
            )
        # What was remembered belongs to the candidate in use, which may not be the one that is next.
        self._use(self.candidates[found.get("used", self.search.current)])
        super()._load(states)
        self.follow()

    @property
    def used(self) -> str:
        """Label of what has averaged the last gradients, or will average the next."""
        return self._used.label


class _Watch(Policy):
    """Passes the ends of steps on to an algorithm."""

    def __init__(self, algorithm: AutoTune) -> None:
        super().__init__()
        self._algorithm = algorithm

    def end_step(self, step: int, seconds: float, communicator: Communicator) -> None:
        """See `Policy.end_step`."""
        self._algorithm.end_step(seconds, communicator)

    def after_pass(self) -> None:
        """See `Policy.after_pass`."""
        self._algorithm.follow()

    def now(self, device: torch.device) -> float:
        """See `Policy.now`; while steps are compared, when the device has done what it was given."""
        if device.type == "cuda" and self._algorithm.search.state != "chosen":
            torch.cuda.synchronize(device)
        return super().now(device)

    def state(self) -> list[Any]:
        """See `Policy.state`."""
        facts = self._algorithm.facts
        found = [("search", self._algorithm.search.save()), ("used", self._algorithm.used)]
        return [*found, ("facts", None if facts is None else asdict(facts))]

    def load(self, decisions: list[Any]) -> None:
        """See `Policy.load`."""
        found = dict(decisions)
        if found.get("facts") is not None:
            self._algorithm.facts = Facts(**found["facts"])
        if "search" in found:
            self._algorithm.search.load(found["search"])


def _greatest(communicator: Communicator, value: float) -> float:
    """The greatest of all ranks' values; collective."""
    found = torch.tensor([value], dtype=torch.float64, device=communicator.device)
    communicator.all_reduce(found, ReduceOp.MAX).wait()
    return float(found)
