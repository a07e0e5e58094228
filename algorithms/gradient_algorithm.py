"""Algorithms that average gradients."""

from __future__ import annotations

import abc
import contextlib
import math
import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Self, Unpack

import torch

from bagua_kernels.algorithms.algorithm import TRAINING, Algorithm, Options, check_keys
from bagua_kernels.algorithms.engine.alone import PassesAlone
from bagua_kernels.algorithms.engine.backward_steps import BackwardSteps
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.engine.healing import Healing
from bagua_kernels.algorithms.engine.listener import Listener
from bagua_kernels.algorithms.engine.member import EngineCounters, Member, Place
from bagua_kernels.algorithms.engine.options import BucketOptions, EngineOptions, Manner
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named, check_trained, mean_of
from bagua_kernels.algorithms.policy.optimizer_fit import warn_of_adam
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.clipping import is_clipping
from bagua_kernels.algorithms.wrapping.equal import make_equal, share_state
from bagua_kernels.algorithms.wrapping.frozen import check_frozen
from bagua_kernels.algorithms.wrapping.replicas import sparse_parameters
from bagua_kernels.algorithms.wrapping.verification import compare
from bagua_kernels.algorithms.wrapping.weights import check_weights
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, LocalCommunicator

BUCKET_BYTES = 10 << 20
_STATE = {"steps", "order", "vectors", "decisions"}
# What exchanges remember that is the same on all ranks.
_COMMON = ("owner", "right", "left", "compressed_steps")


class FlightOptions(Options, total=False):
    """Keyword arguments of `GradientAlgorithm` but for the size of buckets and `apply_in_backward`."""

    in_flight: int | None


class PassOptions(FlightOptions, total=False):
    """Keyword arguments of `GradientAlgorithm` but for the size of buckets."""

    apply_in_backward: bool


class SizeOptions(FlightOptions, total=False):
    """Keyword arguments of `GradientAlgorithm` but for `apply_in_backward`."""

    bucket_bytes: int


class GradientOptions(SizeOptions, total=False):
    """Keyword arguments of `GradientAlgorithm`."""

    apply_in_backward: bool


class GradientAlgorithm(Algorithm):
    """Base of the algorithms that average gradients in each backward pass.

    A subclass has `exchange_for`, which makes the exchange of a bucket, and `place`, by which parameters share buckets.

    Attributes:
        policy: what encodes buckets, in which step.
        listener: what compares the times of backward passes; None if nothing does.
        scaler: that by which losses are scaled, if the exchanges' state follows it.
        alignment: the alignment of tensors in a bucket, in elements; of the first buckets where exchanges are replaced.
        small_first: True if the first buckets are small, so that the wire is in use early.
        in_flight: buckets that are exchanged at a time; None for the engine's own number.
        holds_back: the payloads that lack most of a gradient, for `OptimizerFitWarning`; empty if none do.
        has_hook: True if its exchanges are all that it does, so that a hook of `DistributedDataParallel` may run them.
    """

    policy: Policy = Policy()
    listener: Listener | None = None
    scaler: torch.amp.GradScaler | None = None
    alignment = 1
    small_first = True
    holds_back = ""
    has_hook = True
    takes_drafts = supplies = heals_on_streams = True
    in_flight: int | None

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        in_flight: int | None = None,
        apply_in_backward: bool = False,
        **options: Unpack[Options],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            bucket_bytes: gradients are exchanged in buckets of about this size; the first ones may be smaller.
                Smaller ones start earlier and overlap better with backward; larger ones pay the network's latency less often.
            in_flight: buckets that are exchanged at a time, each on a thread and connections of its own; by default 2 on CPUs, 1
                on GPUs. On CPUs `GradientAllReduce` has them share connections.
            apply_in_backward: True to update each bucket's parameters as soon as its mean has arrived, while backward goes
                on. The optimizer's options are read when backward begins. `grad` is None afterwards, so that
                `optimizer.step()` is left with its hooks and sparse gradients. A GradScaler or a norm of all gradients
                cannot come between. The optimizer is one of `bagua_kernels.optim`.
            **options: as for `Algorithm`.

        Raises:
            TypeError: `apply_in_backward` has no optimizer of this package, or as for `Algorithm`.
            ValueError: `bucket_bytes` or `in_flight` is below 1, or as for `Algorithm`.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes=}")
        if in_flight is not None and in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, or None, got {in_flight=}")
        if apply_in_backward and self.scaler is not None:
            raise ValueError("a scaler looks at all gradients before its step: leave out apply_in_backward, or scaler")
        self.in_flight, self._bucket_bytes, self._applies = in_flight, bucket_bytes, apply_in_backward
        self._engine: Engine | None = None
        self._alone: PassesAlone | None = None
        self._all_communicators: list[Communicator] = []
        self._joining = False
        self._announced: int | None = None
        # Forward passes that begin with buffers: that have begun, for which buffers are equal, and whose backward has ended.
        self._forwards = self._synced = self._ended_synced = self._passes_alone = 0
        super().__init__(module, optimizer, **options)

    @classmethod
    def recipe(cls, communicator: Communicator | None = None, **options: Any) -> Self:
        """Returns an algorithm around no module: it makes exchanges for others to run, and has none itself.

        Args:
            communicator: the ranks whose options are compared; one rank alone if None.
            **options: of the class.
        """
        found = LocalCommunicator.alone() if communicator is None else communicator
        return cls(torch.nn.Module(), communicator=found, **options)

    @classmethod
    def default_bucket_bytes(cls, module: torch.nn.Module) -> int:
        """Returns the size of buckets for a module, if none is given."""
        return BUCKET_BYTES

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """Returns where the gradient of a parameter belongs.

        Returns:
            Its kind, which distinguishes buckets (`Bucket.kind`), and whether it is averaged without compression.
        """
        return None, False

    @abc.abstractmethod
    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """Returns what happens to a bucket.

        Called on all ranks in the order of buckets when these are laid out, which is more than once at construction.
        """

    def _warn(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._warn`."""
        warn_of_adam(type(self).__name__, self.holds_back, optimizer)

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        rows, steps = sparse_parameters(module), self._counters().steps
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        members = [Member(name, p, *self.place(name, p), sparse=p in rows) for name, p in trained]
        dense = {m.name: m.parameter for m in members if not m.sparse}
        in_backward = BackwardSteps(optimizer, dense) if self._applies else None
        if not members:
            return
        buckets = BucketOptions(self.alignment, self._bucket_bytes, self.small_first)
        healing = (
            None
            if self.members is None
            else Healing(self.members, self._pass_ended, self._supply_after, commits=self._applies)
        )
        options = EngineOptions(
            buckets, self.in_flight, in_backward, self.scaler, self.name, type(self).__name__, healing
        )
        self._all_communicators = [self.communicator]
        self._engine = Engine(
            members, self.exchange_for, self.communicator, self._duplicate, self.policy, options, self.listener
        )
        self._engine.enabled = self.require_backward_grad_sync
        self._engine.counters.steps = steps
        self._give_engine({}, steps)

    def _pass_ended(self) -> None:
        self._ended_synced = self._synced

    def _start_alone(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start_alone`."""
        if self.members is not None and self._applies:
            BackwardSteps(optimizer, {})  # refuses what could not go on with others
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._alone = PassesAlone(trained) if trained else None

    def _duplicate(self) -> Communicator:
        # Noted at once: what is closed after an error includes it.
        self._all_communicators.append(made := self.communicator.duplicate())
        made.call = TRAINING
        return made

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        if self._engine is not None:
            self._engine.shut_down(self._communicators())
            self._engine = None
        if self._alone is not None:
            self._alone.close()

    def _communicators(self) -> list[Communicator]:
        """See `Algorithm._communicators`."""
        first, *others = super()._communicators()
        return [*(self._all_communicators or [first]), *others]

    def _before_forward(self) -> None:
        """See `Algorithm._before_forward`."""
        if self._engine is None and self.training and torch.is_grad_enabled():
            self._before_forward_alone()
        if self._engine is None:
            return
        self._engine.check_idle()
        if self._engine.enabled and self.training:
            check_frozen(self.frozen)
            self._let_in()
            source = 0
            if self._joining:
                source = self._announced if self._announced is not None else self._announce(1.0)
            self._announced = None
            self._forwards += 1
            self._mended(lambda: self._begin_pass(source))

    def _before_forward_alone(self) -> None:
        """Lets others join a rank that was alone from the start; they begin with the pass that it is in."""
        if self._alone is not None and self._alone.steps > self._passes_alone:
            self._passes_alone, self._ended_synced = self._alone.steps, self._synced
        self._let_in()
        if self._engine is None and self.require_backward_grad_sync:
            self._forwards += 1
            self._synced = self._forwards

    def _begin_pass(self, source: int) -> None:
        """Synchronizes buffers for a forward pass, unless that was done in a change of epochs."""
        if self._synced < self._forwards:
            self._synchronize_buffers(source, average=not self._joining)
            self._verify()
            self._synced = self._forwards

    def _verify(self) -> None:
        """Compares parameters in some passes, where all ranks take part."""
        # Of these all ranks have ended as many, also just after others were lost.
        passes, every = self._counters().steps, self.verify_every
        if every is None or not passes or passes % every or self._joining:
            return
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        for work in compare(self.communicator, trained, "parameters", passes, counts=not self.is_behind):
            work.wait()

    def _refuses_healing(self) -> str:
        """See `Algorithm._refuses_healing`."""
        return ""

    def _report(self) -> Any:
        """See `Algorithm._report`: passes to whose end this rank has come, and forward passes that have begun with buffers."""
        return [self._counters().steps, self._synced]

    def _go_on(self, reports: Mapping[int, Any], old: Communicator) -> None:
        """See `Algorithm._go_on`.

        1. Ranks that have come to another forward pass than others have its buffers.
        2. Each pass, or each bucket of it, is completed by all or repeated by all, see `Healing`.
        3. What was decided on some rank holds on all. A trial that was under way begins again.
        4. New members get what all ranks have alike. They begin with the pass that the others are in.
        """
        self._all_communicators = [self.communicator]
        if self._engine is None:
            # This rank was alone from the start.
            super()._go_on(reports, old)
            if self.communicator.size > 1:
                if self._alone is not None:
                    self._alone.close()
                    self._steps_alone, self._alone = self._alone.steps, None
                self._start(self.module, self.optimizer)
            return
        steps = {rank: told[0] for rank, told in reports.items()}
        syncs = {rank: told[1] for rank, told in reports.items()}
        last = max(syncs.values())
        if len({*syncs.values()}) > 1 and self.broadcast_buffers:
            first = min(rank for rank, count in syncs.items() if count == last)
            self._buffers_of_ranks.synchronize(old, sorted(reports).index(first))
            old.drain()
        self._synced, self._agreed_passes = last, max(steps.values())
        self._engine.complete(max(steps.values()), old)
        if len(self.policy.chain()) > 1:
            furthest = max(sorted(reports), key=lambda rank: steps[rank])
            self._decide(old.broadcast_object(self._decisions(), sorted(reports).index(furthest)))
        super()._go_on(reports, old)
        state = self._engine.go_on_with(self.communicator, self._duplicate, old, self._otherwise())
        self._give_engine(state, max(steps.values()))

    def _otherwise(self) -> tuple[Place, Manner] | None:
        """Returns where gradients belong, and how buckets are exchanged, once ranks are others; None to leave that as it is."""
        return None

    def _give_engine(self, state: Mapping[str, Named], steps: int) -> None:
        """Gives new members what exchanges have alike, and where the others are.

        Args:
            state: of the exchanges of this rank.
            steps: passes to whose end all ranks come.
        """
        if self._pair is None or self._engine is None:
            return
        # What was averaged without compression has the same momentum on all ranks.
        exact = {member.name for member in self._engine.members if member.exact}
        common = {
            key: {
                name: one if key in _COMMON or name in exact else torch.zeros_like(one) for name, one in named.items()
            }
            for key, named in state.items()
        }
        # A new member takes part in the backward pass whose forward pass the others have made.
        within = self._synced > self._ended_synced
        told = self._give([common, steps, self._synced, within, self._decisions()])
        self._engine.share_committed(self._pair)
        if self._is_new:
            common, steps, self._synced, within, decisions = told
            self._decide(decisions)
            self._ended_synced = self._forwards = self._synced - within
            self._take_steps(steps)
            if common:
                self._engine.buckets.load(common)

    def _set_sync(self, value: bool) -> None:
        """See `WrappedModule._set_sync`."""
        super()._set_sync(value)
        if self._engine is not None:
            self._engine.enabled = value
        if self._alone is not None:
            self._alone.enabled = value

    def weigh(self, weight: float) -> None:
        """See `WrappedModule.weigh`."""
        if self._engine is None:
            super().weigh(weight)
            return
        self._check_weighable()
        self._announced = self._announce(weight)
        if self._announced < 0:
            raise ValueError("all ranks gave the weight 0, so there is nothing to average")

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """See `WrappedModule.join`."""
        self._check_weighable()
        self._joining, self._announced = True, None
        try:
            yield
            with self.communicator.within("join()"):
                self._take_part(optimizer)
        finally:
            self._joining = False

    def _take_part(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Takes part in the passes of ranks that have more batches, and then gets all that the last of them has."""
        last = 0
        while self._engine is not None and (source := self._announce(0.0)) >= 0:
            last = source
            if self.training:
                self._synchronize_buffers(source, average=False)
            self._engine.take_part()
        if self._engine is not None:
            last = max(self.communicator.all_gather_object(last))
            make_equal([*self.module.parameters(), *self.module.buffers()], self.communicator, last)
            if optimizer is not None:
                share_state(optimizer, self.communicator, last)

    def _announce(self, weight: float) -> int:
        """Gathers the weights of all ranks; returns the first rank that has one, or -1 if none has."""
        assert self._engine is not None
        self._engine.check_idle()
        weights = torch.empty(self.communicator.size, dtype=torch.float64, device=self.communicator.device)
        self.communicator.all_gather(weights, weights.new_tensor([weight])).wait()
        # waits: where ranks join with unequal data, once for each of their passes.
        given = weights.tolist()
        check_weights(given)
        total = math.fsum(given)
        self._engine.weight = weight * len(given) / total if total else 1.0  # nobody takes another step
        return next((rank for rank, w in enumerate(given) if w > 0), -1)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `WrappedModule.clip_grad_norm_`."""
        self._check_clipping()
        return super().clip_grad_norm_(max_norm, norm_type)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """See `torch.nn.Module.parameters`.

        Raises:
            RuntimeError: `torch.nn.utils` would clip their gradients, which `apply_in_backward` has used by then.
        """
        # Clipping would find no gradients, and return the norm 0.
        if is_clipping(sys._getframe(1)):
            self._check_clipping()
        yield from super().parameters(recurse)

    def _check_clipping(self) -> None:
        """Raises if gradients have been used before they could be clipped."""
        if self._applies and self._engine is not None:
            raise RuntimeError(
                "with apply_in_backward=True parameters are updated before all gradients are known, so that these cannot be "
                "clipped by their norm; leave it out"
            )

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        from_all = vars(super().stats())
        from_policy = {"errors": self.policy.errors(), "guards": self.policy.guards(), "trial": self.policy.outcome}
        return Stats(**{**from_all, **from_policy})

    def _counters(self) -> EngineCounters:
        if self._engine is not None:
            return self._engine.counters
        return super()._counters() if self._alone is None else EngineCounters(self._alone.steps)

    def _take_steps(self, steps: int) -> None:
        super()._take_steps(steps)
        if self._alone is not None:
            self._alone.steps = steps
        if self._engine is not None:
            self._engine.counters.steps = steps

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        exchanges = [] if self._engine is None else self._engine.buckets.exchanges
        return math.sqrt(math.fsum(exchange.residual_norm() ** 2 for exchange in exchanges))

    def algorithm_state_dict(self) -> dict[str, Any]:
        """See `Algorithm.algorithm_state_dict`.

        Returns:
            `steps`; `order`, the names of parameters in the order of the buckets, empty while it is not known. In `vectors`, for
            each key of the exchanges' states, a tensor for each name; and `decisions`. Each rank needs its own again.
        """
        order: list[str] = []
        vectors: dict[str, dict[str, torch.Tensor]] = {}
        if self._engine is not None:
            self._engine.check_idle()
            # Without an order the buckets of the resumed run will be laid out anew, as those of this one.
            if self._engine.order_is_known:
                order = [self._engine.members[position].name for position in self._engine.buckets.order]
            vectors = self._engine.buckets.state()
        return {"steps": self.stats().steps, "order": order, "vectors": vectors, "decisions": self._decisions()}

    def _decisions(self) -> list[Any]:
        """What was decided in training: pairs of a name and a plain value, equal on all ranks."""
        return self.policy.state()

    def _decide(self, decisions: list[Any]) -> None:
        """Takes what `_decisions` gave."""
        self.policy.load(decisions)

    def load_algorithm_state_dict(self, state: Any) -> None:
        """See `Algorithm.load_algorithm_state_dict`."""
        states = [state] if isinstance(state, Mapping) else list(state)
        check_keys(type(self).__name__, states, _STATE)
        if self._engine is not None and self.communicator.size == 1:
            # It was left alone, and others may join it.
            self._load(states)
            return
        super().load_algorithm_state_dict(state)
        if self._engine is None and self.members is not None:
            self._decide(states[0]["decisions"])

    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        if self._engine is None:
            self._take_steps(int(states[0]["steps"]))
            return
        self._engine.check_idle()
        positions = {member.name: position for position, member in enumerate(self._engine.members)}
        if states[0]["order"]:
            check_trained(states[0]["order"], positions)
        self._take_steps(int(states[0]["steps"]))
        self._decide(states[0]["decisions"])
        order = [positions[name] for name in states[0]["order"]] or None
        self._engine.lay_out(order, mean_of([one["vectors"] for one in states]))
