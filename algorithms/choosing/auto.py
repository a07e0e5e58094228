"""AutoTune: the way of averaging gradients that is fastest for this model, on this machine and network."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Mapping
from typing import Any, Unpack

import torch
from rich.table import Table

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.choosing.candidates import candidates
from bagua_kernels.algorithms.choosing.chooser import Chooser, sent_by
from bagua_kernels.algorithms.choosing.cost.methods import CLASSES, known, methods
from bagua_kernels.algorithms.choosing.facts import Facts
from bagua_kernels.algorithms.engine.member import Place
from bagua_kernels.algorithms.engine.options import Manner
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.gradient_algorithm import BUCKET_BYTES, GradientAlgorithm, GradientOptions
from bagua_kernels.algorithms.models.points import misfit
from bagua_kernels.algorithms.policy.optimizer_fit import divides_by_second_moment
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.compression.codec import parse_spec
from bagua_kernels.suggestions import did_you_mean

# Of the given size of buckets, for exact means: a smaller and a larger one are candidates, too.
_SIZES = (1.0, 0.2, 2.5)
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
    optimizer, nor without one. Where several ranks share a node, and there are several nodes, payloads are exchanged between
    nodes, and exact means by nodes are a candidate, too. With `exactness="any"`, see `settled`.

    Options and their defaults, all by keyword::

        exactness='synchronous'  "exact" for exact means alone; "synchronous" also for means that are rounded alike on
                                 all ranks; "any" also for what `settled` may return
        facts=None               those of an earlier run, which are used instead of measuring
        scaler=None              that by which losses are scaled, if any
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        hierarchical=None        True to average inside nodes in full precision first, and then between them; False for
                                 never; None where nodes have several ranks
        nodes=None               which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
        verify_every=None        steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'       "raise", or "heal": when ranks are lost, those that are left go on without an error

    Attributes:
        chooser: what measures, predicts, tries and chooses.
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
            scaler: that by which losses are scaled, if any.
            **options: as for `GradientAlgorithm`.

        Raises:
            ValueError: `exactness` is not one of these, "any" comes without an optimizer, or as for `GradientAlgorithm`.
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
        sized = None if "bucket_bytes" in options else module
        listed = candidates(exactness, sizes, sized, forgiving, scaler)
        # Local steps are counted by each rank, which a step that a scaler skips on one of them would upset.
        outside = [one for one in methods() if one.exactness == "any" and not (scaler and one.when == "rounds")]
        applies = options.get("apply_in_backward", False)
        self.exactness, self.scaler = exactness, scaler
        self.chooser = Chooser(module, listed, outside if exactness == "any" else [], facts, applies)
        self.search, self.elsewhere = self.chooser.search, self.chooser.elsewhere
        self.alignment, self.listener = self.chooser.used.recipe.alignment, self.chooser
        self._is_given = False
        super().__init__(module, optimizer, **options)
        if not self._is_given:
            self.chooser.begin()

    @property
    def facts(self) -> Facts | None:
        """What was measured; None before."""
        return self.chooser.facts

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        return misfit(self.optimizer, trained) if self.exactness == "any" and self.optimizer is not None else ""

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        super()._start(module, optimizer)
        engine = self._engine
        if engine is not None:
            communicator = self.communicator
            self.chooser.connect(engine, communicator.nodes if isinstance(communicator, TieredCommunicator) else None)
            # Where ranks are is found out before training.
            self._setup_bytes = sent_by(engine)

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        super()._stop()
        self.chooser.disconnect()

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`."""
        return self.chooser.place(name, parameter)

    def _refuses_healing(self) -> str:
        """See `Algorithm._refuses_healing`."""
        if self.exactness == "any":
            return "exactness='any' may go on with another algorithm, which ranks that join do not have; leave it out"
        if self._applies:
            return "a choice begins anew when ranks change, in the middle of a pass, too; leave out apply_in_backward"
        return ""

    def _otherwise(self) -> tuple[Place, Manner]:
        """See `GradientAlgorithm._otherwise`."""
        return self.chooser.restart()

    def _give_engine(self, state: Mapping[str, Named], steps: int) -> None:
        """See `GradientAlgorithm._give_engine`: members begin anew with exact means, a rank that was alone among them."""
        self._is_given = self._pair is not None
        if self._is_given and self._engine is not None and not self.chooser.is_plain:
            self._engine.begin_otherwise(*self.chooser.restart(), {})
        super()._give_engine(state, steps)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return self.chooser.exchange_for(bucket, communicator)

    def settled(self) -> Algorithm:
        """What to train with from now on: this wrapper, or with `exactness="any"` an algorithm that is predicted to be faster.

        To be called between steps, on all ranks: `model = model.settled()`. It returns this wrapper until the choice is made,
        within `join`, and where exact or rounded means are as fast. Otherwise the algorithm that follows averages parameters,
        or takes local steps. Of those within 5 % of the fastest, it is the one that changes least. Before, steps with exact
        means pay what payloads have lacked of parameters that are trained. Ranks then have different models between two
        exchanges: see `ModelAlgorithm` for evaluating and saving. With `verify_every` ranks are compared from then on, too. It
        warns where they have nothing in common any more.

        Returns:
            This wrapper; or another, after which this one cannot be used any more.
        """
        name = "" if self._joining else self.chooser.better
        if not name or not self.chooser.leave():
            return self
        kind, options = parse_spec(known()[name].spec)
        plain = self.chooser.candidates[self.search.plain]
        arguments: dict[str, Any] = {**options, "bucket_bytes": plain.bucket_bytes}
        if self.scaler is not None:
            arguments["scaler"] = self.scaler
        follower = Algorithm.registered[kind]
        if self.verify_every is not None and follower.refuses_verification:
            warnings.warn(
                f"{follower.__name__} follows, and ranks are no longer compared: {follower.refuses_verification}. For "
                f'verify_every={self.verify_every} to go on, pass exactness="synchronous"',
                RuntimeWarning,
                stacklevel=2,
            )
        elif self.verify_every is not None:
            arguments["verify_every"] = self.verify_every
        return self.switch_to(follower, optimizer=self.optimizer, **arguments)

    def table(self) -> Table:
        """What was measured, predicted, tried and chosen."""
        return self.chooser.table()

    def _decisions(self) -> list[Any]:
        """See `GradientAlgorithm._decisions`."""
        return self.chooser.decisions()

    def _decide(self, decisions: list[Any]) -> None:
        """See `GradientAlgorithm._decide`."""
        self.chooser.load(decisions)

    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        decisions = self.chooser.expect(states[0]["decisions"])
        super()._load([{**states[0], "decisions": decisions}, *states[1:]])
        self.chooser.resume()
