"""Algorithms that exchange parameters instead of gradients: beside training, or in rounds."""

from __future__ import annotations

import abc
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import torch

from bagua_kernels.algorithms.algorithm import Algorithm, check_keys
from bagua_kernels.algorithms.engine.member import EngineCounters
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.algorithms.models.kind import Kind
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.loop import Loop
from bagua_kernels.algorithms.models.means import Values, distance_from_mean, put_means
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.points import misfit
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.models.rounds import Rounds, RoundsOptions
from bagua_kernels.algorithms.models.states import average_states, load_states, module_state, put_module_state
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.equal import share_state
from bagua_kernels.algorithms.wrapping.optimizer_state import put_state
from bagua_kernels.algorithms.wrapping.sending import Sending
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Nodes, ReduceOp, open_mailbox
from bagua_kernels.comm.mailbox.courier import weakly

BUCKET_BYTES = 10 << 20
_STATE = {"steps", "parameters", "buffers", "optimizer", "vectors", "numbers"}


class ModelOptions(TypedDict, total=False):
    """Keyword arguments of `ModelAlgorithm`."""

    communicator: Communicator | None
    hierarchical: bool | None
    nodes: Nodes | Iterable[Iterable[int]] | None
    bucket_bytes: int
    average_states: bool
    scaler: torch.amp.GradScaler | None
    verify_every: int | None
    on_failure: str


class ModelAlgorithm(Algorithm):
    """Base of the algorithms that exchange parameters; each rank has its own parameters between exchanges.

    Trainable parameters become views of flat buckets. Gradients, the optimizer's step and its state stay local. So do buffers in
    training: the statistics of a batch norm belong to a rank's own parameters. `synchronize` averages them, and gives all ranks
    rank 0's other buffers.

    A subclass has `loop_for`, which makes what exchanges parameters around the steps of training.

    Attributes:
        local: this rank's model in training.
        average_states: True if `synchronize` averages the optimizer's states, too.
        heals_by_mean: True if all ranks begin with the mean of their parameters where some are lost, and False if each keeps its
            own.
    """

    refuses_verification = "each rank has parameters of its own, which are never equal"
    heals_by_mean = True
    # Ranks that mix with neighbours have no common mean of gradients that weights could change.
    weighable = False
    # An overflow of one rank changes the scale there alone.
    may_differ = frozenset({"scaler"})

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        communicator: Communicator | None = None,
        hierarchical: bool | None = None,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        average_states: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        verify_every: int | None = None,
        on_failure: str = "raise",
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`. Move it before, and `fuse_optimizer` is not used with it: parameters move into buckets.
            optimizer: whose steps change the parameters; its state is set to rank 0's.
            communicator: as for `Algorithm`.
            hierarchical: as for `Algorithm`.
            nodes: as for `Algorithm`.
            bucket_bytes: parameters are exchanged in buckets of about this size.
            average_states: True if `synchronize` averages the optimizer's states, too.
            scaler: a `GradScaler` that may leave out this optimizer's step on one rank alone. Its `step` then counts that step.
                Its states may differ between ranks. Optimizers of this package need no scaler here.
            verify_every: as for `Algorithm`.
            on_failure: as for `Algorithm`.

        Raises:
            TypeError: there is no optimizer, or as for `Algorithm`.
            ValueError: `bucket_bytes` is below 1, two parameters share memory, or as for `Algorithm`.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{type(self).__name__} acts before and after the steps of an optimizer, got {optimizer!r}: make the optimizer "
                "first, and pass it as the second argument"
            )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes=}")
        self.average_states = average_states
        self._bucket_bytes = bucket_bytes
        self.local = LocalModel(type(self).__name__, self.name, optimizer, scaler)
        self._loop: Loop | None = None
        self._alone: Any = None
        super().__init__(
            module,
            optimizer,
            communicator=communicator,
            hierarchical=hierarchical,
            nodes=nodes,
            broadcast_buffers=False,
            verify_every=verify_every,
            on_failure=on_failure,
        )

    def _refuses_healing(self) -> str:
        """See `Algorithm._refuses_healing`."""
        return ""

    def _report(self) -> Any:
        """See `Algorithm._report`: the steps, and the step whose exchange is lost."""
        loop, steps = self._loop, self.local.steps + self.local.ending
        return [steps, None if loop is None else loop.unfinished, 0]

    def interrupt(self, reason: str) -> None:
        """See `Follower.interrupt`."""
        super().interrupt(reason)
        self.local.leave(reason)

    @torch.no_grad()
    def _go_on(self, reports: Mapping[int, Any], old: Communicator) -> None:
        """See `Algorithm._go_on`.

        1. What ranks have alike becomes the same again, see `_reconcile`.
        2. New members get parameters, and what ranks have alike.
        3. There is a loop among all ranks. An exchange that was lost is made again, at the next step.
        """
        loop = self._loop
        if loop is None:
            # This rank was left alone, and others join it.
            super()._go_on(reports, old)
            if self.communicator.size > 1:
                self._alone.remove()
                self._start(self.module, self.optimizer)
            return
        loop.stop()
        self.local.flat.check()
        lost = [step for _, step, _ in reports.values() if step is not None]
        if self.communicator.size == 1 and not self.acts_alone:
            self.local.close()
            self.local.follow(None)
            self._loop = None
            self._start_alone(self.module, self.optimizer)
            return
        state = self._reconcile(loop, reports, old)
        super()._go_on(reports, old)
        self.local.reopen(self.communicator, open_mailbox(self.communicator, lasting=False))
        made = self._loop = self.loop_for(self.local)
        self.local.follow(made)
        self._take_up(made, state)
        self._give_loop(made, max(lost) if lost else max(steps for steps, _, _ in reports.values()))
        made.prepare()
        made.begin()
        self.local.mark()

    def _reconcile(self, loop: Loop, reports: Mapping[int, Any], old: Communicator) -> Any:
        """Makes equal what ranks have alike, where some of them are further than others; collective over those of before.

        Args:
            loop: that among the ranks before.
            reports: of `report`.
            old: of these ranks.

        Returns:
            What `_take_up` gets.
        """
        assert self.members is not None
        # What one that leaves has found stays in the mean.
        by_mean = self.heals_by_mean or bool(self.members.leaving)
        for bucket in self.local.flat.buckets if by_mean else []:
            old.all_reduce(bucket.flat, ReduceOp.AVG).wait()
        self.local.flat.forget()
        return None

    def _take_up(self, loop: Loop, state: Any) -> None:
        """Begins with a loop that was made for other ranks.

        Args:
            loop: this rank's.
            state: what `_reconcile` returned.
        """
        loop.restart()

    def _give_loop(self, loop: Loop, steps: int) -> None:
        """Counts steps as all ranks do, and gives new members that number, and what ranks have alike."""
        told = self._give([steps, self._common_state(loop)])
        if self._is_new:
            self._take_common(loop, told[1])
        self._align(told[0])

    def _common_state(self, loop: Loop) -> Any:
        """Returns what all ranks have alike beside parameters."""
        return None

    def _take_common(self, loop: Loop, state: Any) -> None:
        """Takes what `_common_state` returned elsewhere, as a new member."""

    def _align(self, steps: int) -> None:
        """Counts steps as all other ranks do."""
        self._take_steps(steps)

    def _misfit(self, trained: Mapping[str, torch.nn.Parameter]) -> str:
        """See `Algorithm._misfit`."""
        return misfit(self.local.optimizer, trained)

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        kinds = {name: self.kind(name, parameter) for name, parameter in trained.items()}
        flat = FlatParameters(trained, bucket_bytes=self._bucket_bytes, align=_alignment, kinds=kinds)
        mailbox = open_mailbox(self.communicator, lasting=False)
        self.local.open(flat, self.communicator, mailbox, self.frozen)
        if (members := self.members) is not None:
            self.local.mend, self.local.is_wanted = members.change, weakly(self._is_to_change)
        self._loop = loop = self.loop_for(self.local)
        loop.restart()
        self._listen(loop)
        if self._pair is not None:
            with torch.no_grad():
                self._give_loop(loop, self.local.steps)
            self.local.mark()
        loop.prepare()
        self._setup_bytes = self._bytes_sent
        loop.begin()

    def _is_to_change(self) -> bool:
        """Returns True if members are to change at the next forward pass, where no exchange is under way."""
        return self.members is not None and self.members.is_wanted

    def _listen(self, loop: Loop) -> None:
        """Lets a loop act at the points of training."""
        points = self.local.listen(self.module, loop)
        # The hooks may outlive this wrapper. Weakly: they have the optimizer, whose other hooks may have this wrapper.
        weakref.finalize(self, weakly(points.close))

    def _start_alone(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start_alone`."""
        found = weakref.ref(self.local)

        def count(*_: Any) -> None:
            if (local := found()) is not None:
                local.steps += 1

        # The optimizer may outlive this wrapper.
        self._alone = self.local.optimizer.register_step_post_hook(count)
        weakref.finalize(self, self._alone.remove)

    @abc.abstractmethod
    def loop_for(self, local: LocalModel) -> Loop:
        """Returns what exchanges the parameters; called once, on several ranks; collective.

        Args:
            local: this rank's model, with its parameters in buckets.
        """

    def kind(self, name: str, parameter: torch.Tensor) -> Kind | None:
        """Returns what the parameters of a bucket have in common beside their dtype; None if that is nothing."""
        return None

    def wait(self) -> None:
        """Waits for the exchanges under way, and puts their results in place."""
        self._mended(lambda: None if self._loop is None else self._loop.wait())

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        found = super().stats()
        return found if self._loop is None else self._loop.stats(found)

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        return 0.0 if self._loop is None else self._loop.residual_norm()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives all ranks the exact mean of parameters and running statistics, and rank 0's other buffers; collective.

        Running statistics are buffers of floating point named `running_mean` or `running_var`, as in batch norm. Optimizer
        states stay local, unless `average_states` is True.
        """
        self._completed(self._synchronize)

    def _synchronize(self) -> None:
        loop = self._in_place("synchronize()")
        if loop is not None:
            self._put_means(loop, "synchronize()")
            if self.average_states:
                optimizer = self.local.optimizer
                with self.communicator.within("synchronize()"):
                    state = optimizer.state_dict()
                    average_states(state, self.communicator)
                    put_state(optimizer, state)
            loop.restart()
            self.local.written = self.local.own = False
            self.local.mark()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module has the mean parameters within the block, and this rank's own afterwards; collective at its beginning.

        Its buffers are those that `synchronize` would leave. In the block, evaluate in `eval` mode or under `torch.no_grad()`.
        """
        own: Values | None = None

        def average() -> None:
            nonlocal own
            if own is not None:
                own.put()
            loop = self._in_place("averaged()")
            own = Values(self.module, self.local.flat)
            try:
                if loop is not None:
                    self._put_means(loop, "averaged()")
            except BaseException:
                own.put()
                own = None
                raise

        @contextlib.contextmanager
        def aside() -> Iterator[None]:
            nonlocal own
            assert own is not None
            means = Values(self.module, self.local.flat)
            own.put()
            yield
            # Not after an error: then the rank keeps its own.
            own = Values(self.module, self.local.flat)
            means.put()

        self._completed(average, aside)
        assert own is not None
        is_own, self.local.own = self.local.own, False
        try:
            yield
        finally:
            self.local.own = is_own
            own.put()

    @torch.no_grad()
    def consensus(self) -> float:
        """Returns the root mean square distance of the ranks' parameters from their mean; collective.

        That is sqrt(sum_i |x_i - xbar|^2 / P) over the P ranks, in float64.
        """
        return self._completed(self._consensus)

    def _consensus(self) -> float:
        loop = self._in_place("consensus()")
        with self.communicator.within("consensus()"):
            return 0.0 if loop is None else distance_from_mean(self.local.flat, self.communicator)

    def _put_means(self, loop: Loop, call: str) -> None:
        """Puts the means of ranks into parameters and buffers, for a call of all ranks."""
        # Around a ring each rank sends, and gets, all of it but a share, twice.
        times = 4 * (self.communicator.size - 1) / self.communicator.size
        nbytes = times * sum(4 * each.flat.numel() for each in self.local.flat.buckets)
        with self.communicator.within(call), Sending("the mean model", nbytes, self.communicator):
            put_means(self.module, self.local.flat, loop.mean_sources(), loop.mean_of_ranks, loop.give_first)

    def _before_forward(self) -> None:
        """See `Algorithm._before_forward`; a rank that is left alone has no loop that lets others in."""
        if self._loop is None and self.training and torch.is_grad_enabled():
            self._let_in()

    def _in_place(self, call: str) -> Loop | None:
        """Puts what is under way in place; returns None for one rank alone.

        Raises:
            RuntimeError: it was closed.
        """
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} was closed: call {call} before")
        if self._loop is not None:
            self._loop.arrive(call)
        return self._loop

    def switch_to(self, algorithm: type[Algorithm], **arguments: Any) -> Algorithm:
        """As `Algorithm.switch_to`, after `synchronize`; the states of the optimizer and of `scaler` become rank 0's."""
        self.synchronize()
        loop = self._loop
        if loop is not None:
            # With gradients that are equal on all ranks, other states would let replicas drift apart.
            with self.communicator.within("switch_to()"):
                share_state(self.local.optimizer, self.communicator)
                self._share_scale()
            self.local.stop_listening()
        try:
            return super().switch_to(algorithm, **arguments)
        except Exception:
            if loop is not None and not self._closed:
                # The other one may have taken them before it was refused.
                self.local.flat.take_back()
                self.local.mark()
                self._listen(loop)
            raise

    def _share_scale(self) -> None:
        """Gives all ranks the scale of rank 0's losses: gradients of other scales have no mean."""
        scaler = self.local.scaler
        if scaler is not None:
            state = self.communicator.broadcast_object(scaler.state_dict())
            if state:
                scaler.load_state_dict(state)

    def _hand_over(self) -> None:
        """See `Algorithm._hand_over`; nothing is under way, and the parameters may lie in the other one's memory."""
        Algorithm.close(self)
        self.local.flat.move_out(for_ever=True)

    def close(self) -> None:
        """See `Algorithm.close`; takes part in what other ranks do until all have come here."""
        if self.members is None and not self._closed and self.local.failure is None:
            self._finish()
        super().close()
        self.local.flat.move_out(for_ever=True)

    def _finish(self) -> None:
        """See `Algorithm._finish`."""
        if self._loop is not None:
            self._loop.finish()

    def unflatten(self) -> None:
        """See `Algorithm.unflatten`."""
        self.local.flat.move_out()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        if self._alone is not None:
            self._alone.remove()
        self.local.close()
        if self.local.failure is not None:
            # Other ranks may not come to a farewell.
            for each in self._communicators():
                each.abort(f"an exchange failed: {self.local.failure}")
        if self._loop is not None:
            self._loop.stop()

    def _communicators(self) -> list[Communicator]:
        """See `Algorithm._communicators`."""
        return [*super()._communicators(), *self.local.opened]

    def _counters(self) -> EngineCounters:
        return EngineCounters(self.local.steps, self.local.wait_seconds, self.local.exchange_seconds)

    def _take_steps(self, steps: int) -> None:
        super()._take_steps(steps)
        self.local.steps = steps
        if self._loop is not None:
            self._loop.take_steps(steps)

    @property
    def _bytes_sent(self) -> int:
        return super()._bytes_sent + self.local.bytes_sent

    def algorithm_state_dict(self) -> dict[str, Any]:
        """See `Algorithm.algorithm_state_dict`; exchanges under way are put in place first.

        Returns:
            `steps`. This rank's `parameters` and `buffers` by name, and the state of its `optimizer`. In `vectors`, for each key
            a tensor for each parameter's name. In `numbers`, further numbers. Each rank needs its own again.
        """
        return self._found_state(copies=True)

    def _state_to_save(self) -> dict[str, Any]:
        """See `Algorithm._state_to_save`."""
        return self._found_state(copies=False)

    def _found_state(self, *, copies: bool) -> dict[str, Any]:
        self._completed(lambda: self._in_place("algorithm_state_dict()"))
        loop, local = self._loop, self.local
        if loop is not None and not local.in_step and local.has_written():
            local.written = not local.is_part_of_step()
        if local.written and not local.in_step:
            local.accept_written()
        optimizer = local.optimizer.state_dict()
        return {
            "steps": self.stats().steps,
            **module_state(self.module, copies=copies),
            "optimizer": copy.deepcopy(optimizer) if copies else optimizer,
            "vectors": {} if loop is None else loop.vectors(copies=copies),
            "numbers": {} if loop is None else loop.numbers(),
        }

    def load_algorithm_state_dict(self, state: Any) -> None:
        """See `Algorithm.load_algorithm_state_dict`; another number of ranks begins with the means of the earlier ones."""
        states = [state] if isinstance(state, Mapping) else list(state)
        check_keys(type(self).__name__, states, _STATE)
        self._load(states)

    @torch.no_grad()
    def _load(self, states: list[Mapping[str, Any]]) -> None:
        """See `Algorithm._load`."""
        loop, local = self._in_place("load_algorithm_state_dict()"), self.local
        put_module_state(self.module, states)
        put_state(local.optimizer, load_states([one["optimizer"] for one in states]))
        self._take_steps(int(states[0]["steps"]))
        if loop is not None:
            loop.restart()
            loop.load_vectors(states)
            if len(states) == 1:
                loop.load_numbers(states[0]["numbers"])
            local.written = False
            # The means of several states are the same on all ranks.
            local.own = len(states) == 1
            local.mark()


class RoundOptions(ModelOptions, total=False):
    """Keyword arguments of `RoundAlgorithm`."""

    interval: int


class RoundAlgorithm(ModelAlgorithm):
    """Base of the algorithms that exchange all buckets after a step, or beside it.

    All ranks take the same number of steps, at their own pace: a rank waits for the neighbours of its round, and for no one
    else. A rank that leaves out `optimizer.step()` calls `skip_step()` instead.

    A subclass has `round_for`, which makes the `Round` of a bucket.

    Attributes:
        rounds: what takes place between steps; None for one rank alone.
        interval: the number of steps for which there is one round.
        delay: the number of optimizer's steps that come before results are put in place.
    """

    delay = 0

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 1,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            interval: the number of steps for which there is one round of exchanges.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: `interval` is below 1, or as for `ModelAlgorithm`.
        """
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval=}")
        self.interval = interval
        self.rounds: Rounds | None = None
        super().__init__(module, optimizer, **options)

    @abc.abstractmethod
    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """Returns the rounds of a bucket; called for each bucket, in the same order on all ranks.

        Args:
            local: this rank's model.
            bucket: of its parameters.
        """

    def loop_for(self, local: LocalModel) -> Rounds:
        """See `ModelAlgorithm.loop_for`. A subclass that makes what the rounds of all buckets share does that before."""
        return self.rounds_with(local, RoundsOptions(delay=self.delay))

    def rounds_with(self, local: LocalModel, options: RoundsOptions) -> Rounds:
        """Returns the rounds of all buckets.

        Args:
            local: this rank's model.
            options: how rounds take place.
        """
        rounds = [self.round_for(local, bucket) for bucket in local.flat.buckets]
        self.rounds = Rounds(local, rounds, Plan(self.interval), options)
        self._watch(self.rounds)
        return self.rounds

    def _watch(self, rounds: Rounds) -> None:
        """Lets ranks be compared before some rounds, if that is asked for."""
        if self.verify_every is not None:
            rounds.comparison = weakly(self._comparison)

    def _comparison(self, number: int) -> Callable[[], None] | None:
        """See `Rounds.comparison`."""
        assert self.verify_every is not None
        if not number or number % -(-self.verify_every // self.interval):
            return None
        return partial(self._compare, number * self.interval)

    @torch.no_grad()
    def _compare(self, steps: int) -> None:
        """Raises, on all ranks, if what they have alike differs; collective.

        Args:
            steps: that have been taken, about.
        """

    def skip_step(self) -> None:
        """Takes part in a round without an optimizer's step, for example because this rank leaves out a bad batch."""
        if self.rounds is None:
            self.local.steps += 1
        else:
            self.rounds.skip_step()

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: a rank that is through goes on mixing until all are.

        1. Within the block a rank announces each round in which it takes part to all others.
        2. At the end of the block it announces that it is through.
        3. It then takes part in each round that another rank has announced, without a step of its own.
        4. When all ranks are through, all have taken part in the same rounds.

        Parameters and states stay this rank's; call `synchronize()` for their mean. All ranks enter the block at the same step.

        Args:
            optimizer: not needed, for its state stays local.
        """
        with contextlib.nullcontext() if self.rounds is None else self.rounds.join():
            yield


def _alignment(kind: Any) -> int:
    return kind.alignment if isinstance(kind, Kind) else 1
