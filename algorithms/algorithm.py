"""What all algorithms share: a module that is used like `DistributedDataParallel`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.engine.backward_steps import BackwardSteps
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.engine.gates import Gates, check_waits
from bagua_kernels.algorithms.engine.member import Counters, Member
from bagua_kernels.algorithms.engine.rows import Rows
from bagua_kernels.algorithms.engine.vectors import Named, mean_of
from bagua_kernels.algorithms.policy.only_if_faster import Trial
from bagua_kernels.algorithms.policy.optimizer_fit import warn_of_adam
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.buffers import Buffers
from bagua_kernels.algorithms.wrapping.claims import Claim, taken
from bagua_kernels.algorithms.wrapping.ddp import exchanging, is_inside_ddp, refusal
from bagua_kernels.algorithms.wrapping.options import Options, recorded
from bagua_kernels.algorithms.wrapping.replicas import check_replicas, sparse_parameters, synchronize
from bagua_kernels.algorithms.wrapping.wrapped import WrappedModule
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.errors import CommunicationError

BUCKET_BYTES = 10 << 20
_FAREWELL = 10.0  # seconds that a constructor which failed waits for the other ranks to fail too
# While one bucket is being encoded, reduced or decoded, another one has the wire. Kernels of two NCCL communicators, in turn,
# may each wait for the other's place on a GPU.
_LANES = {"cpu": 2, "cuda": 1}
_STATE = {"steps", "order", "vectors", "decisions"}


class Algorithm(WrappedModule):
    """Base of all gradient-averaging algorithms.

    At construction, rank 0's parameters (frozen ones too) and buffers are given to all ranks. On one rank everything is left
    to the module, bit for bit. A subclass says how a bucket is exchanged, and what it remembers.

    The class and the arguments of all its constructors, a subclass's own too, are compared between ranks.

    Attributes:
        name: what `from_spec` knows the algorithm by.
        may_differ: names of this class's own constructor arguments that need not be equal on all ranks. Those of its bases
            count too.
        late: whether the mean of a parameter may be other than zero though no rank has a gradient for it, because something
            of earlier steps is still to come.
    """

    name: ClassVar[str]
    may_differ: ClassVar[frozenset[str]] = frozenset({"module", "communicator"})
    late = True
    _trial: Trial | None = None
    _claim: Claim | None = None
    _closed = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    @recorded
    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        communicator: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        lanes: int | None = None,
        broadcast_buffers: bool = True,
        average_buffers: bool = False,
        apply_in_backward: bool = False,
        wait_in_forward: bool = False,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: on the communicator's device, with equal parameters' names, shapes and dtypes on all ranks.
            optimizer: if given, its state is set to rank 0's.
            communicator: the ranks that train together; those of `comm.init()` if None, which is called if it has not been. The
                algorithm talks on a duplicate of its own, so its messages never meet the caller's.
            bucket_bytes: gradients are exchanged in buckets of about this size; the first ones may be smaller.
                Smaller ones start earlier and overlap better with backward; larger ones pay the network's latency less often.
            lanes: buckets that are exchanged at a time, each on a thread and connections of its own; by default 2 on CPUs, 1
                on GPUs and with `wait_in_forward`, where what is needed first would share the wire with what is not. On CPUs
                `GradientAllReduce` has them share connections.
            broadcast_buffers: whether each forward pass in training mode begins with rank 0's buffers on all ranks.
            average_buffers: whether it begins with the means over all ranks instead, of buffers of floating point.
            apply_in_backward: whether each bucket's parameters are updated as soon as its mean has arrived, while backward
                goes on, with what the optimizer's options are when that begins. `grad` is None afterwards, so that
                `optimizer.step()` has nothing left to do but its hooks and sparse gradients; a GradScaler or a norm of all
                gradients cannot come between. The optimizer is one of `bagua_kernels.optim`.
            wait_in_forward: whether, with `apply_in_backward`, backward does not wait at its end, but each module of the next
                forward pass for its own parameters; what forward needs first is exchanged first. Whoever reads parameters
                by references of his own calls `wait` before.

        Raises:
            TypeError: a trainable parameter is complex, `apply_in_backward` has no optimizer of this package, or `optimizer` has
                no `load_state_dict`.
            ValueError: the modules or any options differ between ranks, a parameter is on another device than the
                communicator, or `bucket_bytes` or `lanes` is below 1; another algorithm or `DistributedDataParallel` exchanges
                gradients of the module already; or with `wait_in_forward` a gradient is not for `apply_in_backward`.
        """
        super().__init__()
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes=}")
        if lanes is not None and lanes < 1:
            raise ValueError(f"lanes must be at least 1, or None, got {lanes=}")
        if optimizer is not None and not hasattr(optimizer, "load_state_dict"):
            raise TypeError(
                f"the second argument is an optimizer, or None, got {optimizer!r}: leave out device_ids; move the module to its "
                "device first"
            )
        self.module = module
        self.broadcast_buffers = broadcast_buffers or average_buffers
        self.average_buffers = average_buffers
        self._engine: Engine | None = None
        self._steps: BackwardSteps | None = None
        self._joining = False
        self._announced: int | None = None
        self._steps_alone = 0
        self._world = _world(module) if communicator is None else communicator
        self._communicator = self._world.duplicate()
        self._lanes = [self._communicator]
        self._setup_bytes = 0
        options: Options = self.__dict__.pop("_options")
        try:
            if self._communicator.size > 1:
                self._start(module, optimizer, options, bucket_bytes, lanes, apply_in_backward, wait_in_forward)
            elif problem := exchanging(module, Algorithm):
                raise ValueError(problem)
        except Exception as error:
            self._give_up(error)
            raise

    def _give_up(self, error: Exception) -> None:
        """Leaves nothing open after a constructor that failed."""
        if self._claim is not None:
            self._claim.release()
        if self._engine is not None:
            self._engine.close()
        for lane in self._communicators():
            try:
                lane.close(_FAREWELL)
            except CommunicationError:  # the others have not failed
                lane.abort(f"{type(self).__name__} could not be made: {error}")

    def _start(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: Options,
        bucket_bytes: int,
        lanes: int | None,
        apply_in_backward: bool,
        wait_in_forward: bool,
    ) -> None:
        """Agrees with the other ranks, and begins to exchange."""
        if self._communicator.rank == 0:
            warn_of_adam(self, optimizer)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        problem = exchanging(module, Algorithm) or taken(trained)
        check_replicas(module, self._communicator, type(self), options, _may_differ(type(self)), problem)
        synchronize([*module.parameters(), *module.buffers()], self._communicator)
        if optimizer is not None:
            optimizer.load_state_dict(self._communicator.broadcast_object(optimizer.state_dict()))
        self._setup_bytes = self._communicator.bytes_sent
        self._claim = Claim(self, trained)
        self._buffers_of_ranks = Buffers(module)
        rows = sparse_parameters(module)
        members = [Member(name, p, *self.place(name, p), sparse=p in rows) for name, p in trained.items()]
        if apply_in_backward:
            self._steps = BackwardSteps(optimizer, {m.name: m.parameter for m in members if not m.sparse})
        if wait_in_forward:
            check_waits(members, optimizer, apply_in_backward)
        trial, gates = self._trial, Gates() if wait_in_forward else None
        device = self._communicator.device.type
        # What forward needs first is not to share the wire with what it needs later.
        count = lanes or (1 if wait_in_forward else _LANES[device])
        # Two streams of bytes on one link hinder each other. Sparse gradients take several collectives, one after the other.
        shared = self.waits and device == "cpu" and not any(member.sparse for member in members)
        if members:
            self._engine = Engine(
                members,
                self._exchange,
                align=self.alignment,
                bucket_bytes=bucket_bytes,
                small_first=self.small_first,
                reorder=self._reorder,
                settle=self.settle,
                late=self.late,
                name=self.name,
                steps=self._steps,
                lend=self.lends,
                adopt=self.adopts and device == "cpu",
                gates=gates,
                agree=None if gates is None else self._agree,
                ranks=self._communicator.size,
                untrained=[(name, p) for name, p in module.named_parameters() if not p.requires_grad],
                title=type(self).__name__,
                clock=time.perf_counter if trial is None else partial(trial.now, self._communicator.device),
                lanes=1 if shared else count,
                depth=count if shared else 1,
            )
            if gates is not None and optimizer is not None:
                gates.install(module, optimizer, [m.parameter for m in self._engine.members])
                if device == "cpu":
                    # Buffers are synchronized while buckets may be under way.
                    self._lanes = [self._world.duplicate()]
            self._lanes += [self._world.duplicate() for _ in range(self._engine.lanes - 1)]

    @property
    def holds_back(self) -> str:
        """The payloads that lack most of a gradient, for `OptimizerFitWarning`; empty if none do."""
        return ""

    @property
    def alignment(self) -> int:
        """Elements to whose multiples tensors are aligned in a bucket."""
        return 1

    @property
    def lends(self) -> bool:
        """Whether `exchange` reads gradients that are to be compressed where backward left them, if they are in `bucket.lent`."""
        return False

    @property
    def adopts(self) -> bool:
        """Whether a gradient's memory may become that of its bucket, so that `exchange` finds it elsewhere in each step."""
        return False

    @property
    def small_first(self) -> bool:
        """Whether the first buckets are to be small, so that the wire is in use early."""
        return True

    @property
    def waits(self) -> bool:
        """Whether `start` returns before the exchange has ended, so that all lanes may share one connection."""
        return False

    def lane(self, bucket: Bucket | Rows) -> Communicator:
        """The communicator on which a bucket is exchanged; others may be exchanged on others at the same time."""
        return self._lanes[bucket.index % len(self._lanes)]

    def _communicators(self) -> list[Communicator]:
        """All that are open, each once."""
        return list(dict.fromkeys([self._communicator, *self._lanes]))

    def frozen(self, bucket: Bucket) -> list[int]:
        """Slots of a bucket whose parameters are frozen now; their residuals stay as they are."""
        return [] if self._engine is None else self._engine.frozen(bucket)

    def _agree(self, bucket: Bucket | Rows) -> int:
        lane = self.lane(bucket)
        index = torch.tensor([bucket.index], dtype=torch.int64, device=lane.device)
        lane.all_reduce(index, ReduceOp.MIN).wait()
        return int(index)

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """Says where the gradient of a parameter belongs.

        Returns:
            Its kind, by which buckets are told apart (`Bucket.kind`), and whether it is averaged without compression.
        """
        return None, False

    def exchange(self, bucket: Bucket, step: int) -> None:
        """Replaces `bucket.flat` and `bucket.exact` by their means over all ranks, on the bucket's `lane`; runs on its thread.

        Args:
            bucket: the gradients of one bucket; where the algorithm `lends`, see `Bucket.lent`.
            step: number of the backward pass, equal on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how a bucket is exchanged")

    def start(self, bucket: Bucket, step: int) -> Callable[[], None] | None:
        """Starts an exchange; the lane starts the next one while what is returned waits for the end of this one.

        An algorithm that does one collective to a bucket may override it, and `waits`; else all is done here, in turn.
        """
        self.exchange(bucket, step)
        return None

    def compresses(self, bucket: Bucket, step: int) -> bool:
        """Whether any of a bucket is compressed in a step."""
        return False

    def lasting(self, step: int) -> bool:
        """Whether buckets are compressed from this step on as in all later ones, so that it tells how fast that is."""
        return True

    def _exchange(self, bucket: Bucket | Rows, step: int) -> Callable[[], None] | None:
        if isinstance(bucket, Rows):
            bucket.exchange(self.lane(bucket))
            return None
        if self._steps is not None and self._engine is not None:
            self._steps.begin(bucket, self._engine.present(bucket))
        wait = self.start(bucket, step)

        def finish() -> None:
            if wait is not None:
                wait()
            bucket.lent.clear()
            if self._steps is not None:
                self._steps.finish(bucket)

        return finish

    def remembered(self, bucket: Bucket) -> dict[str, Named]:
        """What is remembered of a bucket from step to step: of each thing a tensor for each parameter's name; collective."""
        return {}

    def remember(self, bucket: Bucket, vectors: Mapping[str, Named]) -> None:
        """Takes what `remembered` gave, of all parameters, after buckets were laid out anew; what is lacking starts anew."""

    def forget(self) -> None:
        """Drops what is kept by the number of a bucket, since these are laid out anew."""

    def settle(self, step: int, seconds: float) -> None:
        """Decides what follows from an exchange; called after each backward pass, on its thread, when nothing is under way.

        While buckets are exchanged, nothing is decided that concerns others: ranks exchange those of different lanes in
        different orders.

        Args:
            step: as for `exchange`.
            seconds: from the first gradient to the end of the last exchange; with `wait_in_forward` to the next pass's first
                gradient.
        """
        if self._trial is not None and not self._trial.decided and self._engine is not None:
            compressed = self.lasting(step) and any(self.compresses(bucket, step) for bucket in self._engine.buckets)
            self._trial.ended(self._communicator, compressed, step, seconds)

    def decisions(self) -> list[Any]:
        """What was decided in training, vectors aside: pairs of a name and a plain value, equal on all ranks."""
        return [] if self._trial is None or not self._trial.decided else [("trial", self._trial.outcome)]

    def take_decisions(self, decisions: list[Any]) -> None:
        """Takes what `decisions` gave."""
        if self._trial is not None:
            self._trial.resume(dict(decisions).get("trial", ""))

    def switch_to(self, algorithm: type[Algorithm], **arguments: Any) -> Algorithm:
        """Ends this algorithm and goes on with another on the same module and ranks; collective.

        What this one remembers (residuals) is dropped; its count of steps is kept, so that random numbers do not repeat.

        Args:
            algorithm: the class.
            **arguments: of its constructor; the communicator is this one's.

        Returns:
            The new wrapper; this one cannot be used any more.
        """
        steps = self.stats().steps
        if self._claim is not None:
            self._claim.release()
        try:
            other = algorithm(self.module, communicator=self._world, **arguments)
        except Exception:
            if self._claim is not None:
                self._claim.renew()
            raise
        self.close()
        other.train(self.training)
        other._steps_alone = steps
        if other._engine is not None:
            other._engine.counters.steps = steps
        return other

    def close(self) -> None:
        """Stops exchanging gradients and frees the connections; collective over all ranks.

        The module goes on as it is, by itself. This wrapper evaluates; a forward pass for training raises, since its gradients
        would be this rank's only.
        """
        try:
            if self._engine is not None:
                self._engine.complete()
        finally:
            self._closed = True
            if self._claim is not None:
                self._claim.release()
            if self._engine is not None:
                if self._engine.interruption.happened:
                    # Exchanges that are under way may wait for ranks that will not answer.
                    for lane in self._communicators():
                        lane.abort("it was closed after a backward pass that was interrupted")
                self._engine.close()
                self._engine = None
            for lane in self._communicators():
                lane.close()

    def _check_call(self) -> None:
        """See `WrappedModule.forward`."""
        if self._closed and self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"this {type(self).__name__} was closed and exchanges nothing any more: call its .module, wrap that anew, or "
                "evaluate with eval() or under torch.no_grad()"
            )
        if is_inside_ddp(self):
            raise RuntimeError(refusal(type(self)))

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuses `DistributedDataParallel`, whose constructor reads this attribute of its module."""
        raise RuntimeError(refusal(type(self)))

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """False; FSDP sets this attribute on every module around which it is put, and is refused."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        raise RuntimeError(refusal(type(self), "FSDP"))

    def stats(self) -> Stats:
        """What the algorithm has done so far on this rank."""
        if self._engine is not None:
            self._engine.complete()
        counters = Counters(self._steps_alone) if self._engine is None else self._engine.counters
        sent = sum(lane.bytes_sent for lane in self._communicators()) - self._setup_bytes
        waits = counters.wait_seconds, counters.exchange_seconds
        outcome = "" if self._trial is None else self._trial.outcome
        return Stats(counters.steps, sent, *waits, self.residual_norm(), self.errors(), outcome)

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank's payloads have lacked so far; 0 without error feedback."""
        return 0.0

    def errors(self) -> dict[str, float]:
        """What `Stats.errors` holds."""
        return {}

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What, beside the module's and the optimizer's state, a resumed run needs to go on as if uninterrupted; collective.

        Returns:
            `steps`; `order`, the names of parameters in the order of the buckets; in `vectors` for each thing remembered a
            tensor for each name; and `decisions`. Each rank has its own, and needs it again.
        """
        order: list[str] = []
        if self._engine is not None:
            self._engine.conclude()
            order = [self._engine.members[position].name for position in self._engine.order]
        vectors, decisions = self._remembered(), self.decisions()
        return {"steps": self.stats().steps, "order": order, "vectors": vectors, "decisions": decisions}

    def _remembered(self) -> dict[str, dict[str, torch.Tensor]]:
        vectors: dict[str, dict[str, torch.Tensor]] = {}
        for bucket in () if self._engine is None else self._engine.buckets:
            for key, named in self.remembered(bucket).items():
                vectors.setdefault(key, {}).update(named)
        return vectors

    def load_algorithm_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restores what `algorithm_state_dict` gave; collective.

        Args:
            state: this rank's; or, if the number of ranks has changed, those of all ranks before: each rank then begins with
                the mean of what they remembered, so that nothing that is still to be sent gets lost.

        Raises:
            ValueError: a state has other keys, or a vector another shape.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if set(one) != _STATE:
                raise ValueError(
                    f"expected the state of {type(self).__name__} with the keys {sorted(_STATE)}, got {sorted(one)}"
                )
        if self._engine is None:
            self._steps_alone = int(states[0]["steps"])
            if any(named for one in states for named in one["vectors"].values()):
                warnings.warn(
                    "one rank alone exchanges nothing, so that what the ranks of the saved state remembered is dropped",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._engine.conclude()
        positions = {member.name: position for position, member in enumerate(self._engine.members)}
        if states[0]["order"] and set(states[0]["order"]) != set(positions):
            differ = sorted(set(states[0]["order"]) ^ set(positions))
            raise ValueError(f"the state is that of a module with other trainable parameters; {differ} are not in both")
        self._engine.counters.steps = int(states[0]["steps"])
        self.take_decisions(states[0]["decisions"])
        order = [positions[name] for name in states[0]["order"]] or self._engine.order
        self._lay_out(order, mean_of([one["vectors"] for one in states]))

    def _lay_out(self, order: list[int], vectors: Mapping[str, Named]) -> None:
        assert self._engine is not None
        self._engine.lay_out(order)
        self.forget()
        if self._steps is not None:
            self._steps.forget()
        for bucket in self._engine.buckets:
            self.remember(bucket, vectors)

    def _reorder(self, order: list[int]) -> None:
        assert self._engine is not None
        agreed = self._communicator.broadcast_object(order)
        if agreed != self._engine.order:
            self._lay_out(agreed, self._remembered())

    @classmethod
    def from_spec(cls, spec: str, module: torch.nn.Module, **arguments: Any) -> Algorithm:
        """As the function `from_spec`, for this class only."""
        from bagua_kernels.algorithms.registry import from_spec  # imports this file

        algorithm = from_spec(spec, module, **arguments)
        if not isinstance(algorithm, cls):
            raise ValueError(f"{spec!r} is a {type(algorithm).__name__}, expected a {cls.__name__}")
        return algorithm


def _world(module: torch.nn.Module) -> Communicator:
    """The ranks of this job, which it joins if nobody has: with the device of the module's first parameter."""
    if comm.is_initialized():
        return comm.world()
    first = next(module.parameters(), None)
    return comm.init(device=None if first is None else first.device)


def _may_differ(kind: type) -> frozenset[str]:
    return frozenset().union(*(vars(each).get("may_differ", ()) for each in kind.__mro__))
