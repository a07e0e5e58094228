"""A communication hook of `DistributedDataParallel` that has an algorithm's exchanges average gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from bagua_kernels import comm
from bagua_kernels.algorithms.algorithm import Algorithm, check_keys, fitting
from bagua_kernels.algorithms.ddp.shares import BucketShares, Share
from bagua_kernels.algorithms.engine.accumulation import Accumulation, Watched
from bagua_kernels.algorithms.engine.buckets import fill
from bagua_kernels.algorithms.engine.interruption import Ending
from bagua_kernels.algorithms.engine.listener import PassTimer
from bagua_kernels.algorithms.engine.loss_scale import LossScale
from bagua_kernels.algorithms.engine.reentrant import refuse_reentrant
from bagua_kernels.algorithms.engine.runtime import Runtime, Task, covered
from bagua_kernels.algorithms.exchanges.vectors import mean_of
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.recorded import own_names
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.errors import CommunicationError, follow_up
from bagua_kernels.jit import compiling

_STATE = {"steps", "vectors", "decisions"}
# Of the engine, which the hook does without.
_UNUSED = ("bucket_bytes", "apply_in_backward", "broadcast_buffers", "average_buffers", "communicator")


def hook(
    spec: str,
    module: torch.nn.Module | None = None,
    *,
    communicator: Communicator | None = None,
    in_flight: int | None = None,
    **options: Any,
) -> Hook:
    """Makes a communication hook, to be registered: `model.register_comm_hook(None, ddp.hook("bytegrad", model))`.

    Args:
        spec: of an algorithm that averages gradients ("bytegrad:block=128"), or of a codec for `CompressedAllReduce`
            ("absmax_int8:block=256").
        module: the `DistributedDataParallel`, or the module in it: its parameters' names are those of patterns, and of the
            hook's state. The ranks are those of its process group. Without it parameters have numbers.
        communicator: the ranks, the same as DDP's; if None, those of the module's process group, or of `comm.init()`.
        in_flight: buckets that are exchanged at a time; by default 2 on CPUs, 1 on GPUs.
        **options: further arguments of the algorithm.

    Raises:
        TypeError: the spec is not a text, or the module is not a module.
        ValueError: the spec names neither, or an algorithm that does not average gradients, or an option is one of the engine.
    """
    kind, parsed = Algorithm.named(spec)
    with fitting(spec):
        arguments = {**parsed, **own_names(kind, options)}
    if not isinstance(module, torch.nn.Module | None):
        raise TypeError(
            f"the second argument of a hook is the DistributedDataParallel, or None, got {module!r} of {type(module).__name__}"
        )
    if not issubclass(kind, GradientAlgorithm) or not kind.has_hook:
        raise ValueError(
            f"{spec!r} is a {kind.__name__}, of which there is no hook, for it does more than average gradients: wrap the module "
            "in it instead of DistributedDataParallel"
        )
    for unused in _UNUSED:
        if unused in arguments:
            raise ValueError(f"{unused} means nothing to a hook of DistributedDataParallel: leave it out")
    if in_flight is not None:
        arguments["in_flight"] = in_flight
    # Errors about what does not fit come on one rank alone, before others wait for it.
    with fitting(spec):
        recipe = kind.recipe(**arguments)
    if not recipe.weighable:
        raise ValueError(
            f"{spec!r} counts one vote per rank, also of those that mirror the passes of others in join(): wrap the module "
            f"in a {kind.__name__} instead of DistributedDataParallel"
        )
    return Hook(spec, kind, arguments, module, communicator)


class Hook:
    """Averages DDP's buckets by an algorithm's exchanges.

    1. Parameters of a bucket that are encoded alike form a bucket of this package. Its gradients are encoded where they lie
       in DDP's, and no block of a quantizer spans two of them.
    2. Exchanges run on threads of their own, in the order of DDP's buckets, which is the same on all ranks.
    3. The mean is copied back, and DDP's future is complete.
    4. At the end of backward an error is raised there, if there was one.
    5. Where nobody has zeroed a gradient, only what backward adds to it is exchanged, and then added to it (`Accumulation`).

    Ranks connect in the first backward pass. Copies and pickles of a hook, as DDP's own copies make them, have its options,
    not its connections and its state.

    Attributes:
        communicators: one, or one for each bucket that is exchanged at a time; none before the first pass.
    """

    def __init__(
        self,
        spec: str,
        kind: type[GradientAlgorithm],
        arguments: Mapping[str, Any],
        module: torch.nn.Module | None,
        communicator: Communicator | None,
    ) -> None:
        """Made by `hook`."""
        self._spec, self._kind, self._arguments = spec, kind, dict(arguments)
        self._module, self._communicator = module, communicator
        self._finds_unused = bool(getattr(module, "find_unused_parameters", False))
        # What DDP asks of a function.
        self.__name__ = self.__qualname__ = f"bagua_kernels {spec}"
        self._algorithm: GradientAlgorithm | None = None
        self.communicators: list[Communicator] = []
        self._layout: BucketShares | None = None
        self._runtime: Runtime | None = None
        self._tasks: list[Task] = []
        self._error: BaseException | None = None
        self._steps = 0
        self._passes = 0
        self._wait_seconds = self._exchange_seconds = 0.0
        self._timer: PassTimer | None = None
        self._loss_scale: LossScale | None = None
        self._states: list[Mapping[str, Any]] = []
        # DDP moves gradients that are views of its buckets when it lays these out anew.
        self._accumulation = Accumulation(f"the hook {spec!r}", strict=False, in_views=True)
        self._watched = Watched(self)
        self._come: set[torch.Tensor] = set()
        self._graph_task = -1
        self._return = _Return(self._accumulation)

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies are made of: options."""
        return Hook, (self._spec, self._kind, self._arguments, None, None)

    # Without annotations: DDP compares them with classes, not with texts.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Starts the exchange of a bucket; called by DDP in the order of buckets."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise TypeError(
                f"the hook {self._spec!r} got a sparse gradient: make the embedding with sparse=False, or wrap the module in an "
                "algorithm, which exchanges sparse gradients, instead of DistributedDataParallel"
            )
        refuse_reentrant()
        algorithm = self._connect(buffer.device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] * buffer.is_cuda)
        if self.communicators[0].size == 1:
            self._steps += bucket.is_last()
            future.set_result(buffer)
            return future
        index, parameters = bucket.index(), bucket.parameters()
        inside = torch._C._current_graph_task_id() >= 0
        if not index:
            self._begin(inside)
        assert self._layout is not None
        communicator = self.communicators[index % len(self.communicators)]
        if not self._layout.knows(index, parameters):
            self._wait()
            self._layout.lay_out(index, parameters, communicator)
            self._watch(parameters)
        parts, gradients = self._layout.parts(index), bucket.gradients()
        if self._watched and inside:
            self._keep_increments(parameters, gradients)
        if self._runtime is None:
            self._runtime = self._start_threads(buffer.device, parts)
        load = partial(_load, parts, gradients)
        if buffer.is_cuda:
            # On backward's stream, of which the allocator knows that it reads the gradients.
            load()
            load = partial(_load, (), gradients)
        several = len(parts) > 1 or self._finds_unused or not parts[0].exchange.one_collective
        run = partial(self._run, parts, gradients, load, self._steps, partial(future.set_result, buffer))
        label = f"bagua_kernels {algorithm.name}, bucket {index}"
        self._tasks.append(self._runtime.start(index, run, label, several))
        if bucket.is_last() and not inside:
            # A rank that has joined early mirrors the passes of the others, without a backward pass of its own.
            self.end()
        return future

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Has earlier results in the gradients of new parameters looked for, unless exchanges keep them."""
        assert self._layout is not None
        exchanges = self._layout.exchanges
        self._accumulation.strict = any(each.needs_increments for each in exchanges)
        if not all(each.keeps_means for each in exchanges):
            self._watched.add((self._layout.name(p), p) for p in parameters)

    def gradient_coming(self, parameter: torch.Tensor, name: str) -> None:
        """Prepares for what backward is about to add to a gradient."""
        if (task := torch._C._current_graph_task_id()) != self._graph_task:
            self._graph_task, self._come = task, set()
            self._return.begin()
        self._come.add(parameter)
        # DDP may write to the memory of a result, if that lies in its buckets.
        self._accumulation.set_aside(parameter, name, copy=True)
        if self._accumulation.aside:
            self._return.await_end()

    @torch.no_grad()
    def _keep_increments(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Takes results out of gradients to which backward adds nothing, and notes where the next results will lie."""
        assert self._layout is not None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if torch._C._current_graph_task_id() != self._graph_task or parameter not in self._come:
                self.gradient_coming(parameter, self._layout.name(parameter))
                if parameter in self._accumulation.aside:
                    gradient.zero_() if parameter.grad is None else gradient.copy_(parameter.grad)
            own = parameter.grad
            self._accumulation.note(parameter, None if own is None else StorageWeakRef(own.untyped_storage()))
        self._return.exchanged = True

    def _connect(self, device: torch.device) -> GradientAlgorithm:
        """Finds the other ranks and compares options with them, once; collective."""
        if self._algorithm is None:
            found = self._communicator
            group = getattr(self._module, "process_group", None)
            if found is None and group is not None and group is not dist.group.WORLD:
                found = comm.TorchCommunicator(group, device=device)
            elif found is None:
                found = comm.world() if comm.is_initialized() else comm.init(device=device)
            self._algorithm = self._kind.recipe(found, **self._arguments)
            self.communicators = [self._algorithm.tiered(found.duplicate())]
            self._timer = PassTimer(self._algorithm.listener, self.communicators[0].device)
            self._layout = BucketShares(self._algorithm, getattr(self._module, "module", self._module))
            if self._states:
                self._take(self._states)
        return self._algorithm

    def _start_threads(self, device: torch.device, parts: Sequence[Share]) -> Runtime:
        on_cpu = device.type == "cpu"
        in_flight = (self._algorithm and self._algorithm.in_flight) or (2 if on_cpu else 1)
        if in_flight > 1 and not (on_cpu and all(part.exchange.one_collective for part in parts)):
            self.communicators += [self.communicators[0].duplicate() for _ in range(in_flight - 1)]
        return Runtime(device, in_flight, len(self.communicators))

    def _begin(self, inside: bool) -> None:
        assert self._algorithm is not None
        self._check()
        self._passes += 1
        scaler = self._algorithm.scaler
        self._loss_scale = None if scaler is None else LossScale(scaler)
        assert self._timer is not None
        self._timer.begin()
        if inside:
            torch.autograd.Variable._execution_engine.queue_callback(Ending(self, self._passes))

    def _run(
        self,
        parts: Sequence[Share],
        gradients: Sequence[torch.Tensor],
        load: Callable[[], None],
        step: int,
        finish: Callable[[], None],
    ) -> Iterator[Work]:
        """What a communication thread does with one of DDP's buckets. It always completes DDP's future."""
        try:
            if self._error is None:
                load()
                yield from self._exchanges(parts, gradients, step)
        except Exception as error:
            self._fail(error)
        finish()

    def _exchanges(self, parts: Sequence[Share], gradients: Sequence[torch.Tensor], step: int) -> Iterator[Work]:
        loss_scale = self._loss_scale
        if self._finds_unused:
            yield from self._withhold_unused(parts, gradients)
        for part in parts:
            exchange = part.exchange
            if self._failed():
                return
            if loss_scale is not None:
                exchange.scale_to(loss_scale.get())
            for work in exchange.run(step):
                yield _Caught(work, self._fail)
                if self._failed():
                    return
            exchange.bucket.lent.clear()
            with torch.no_grad():
                torch._foreach_copy_([gradients[position] for position in part.positions], exchange.bucket.views)

    def _withhold_unused(self, parts: Sequence[Share], gradients: Sequence[torch.Tensor]) -> Iterator[Work]:
        """Keeps what is remembered of parameters without a gradient on any rank: DDP drops their means."""
        used = torch.stack([gradient.any() for gradient in gradients]).float()
        yield _Caught(parts[0].exchange.communicator.all_reduce(used), self._fail)
        # waits: only with DDP's find_unused_parameters.
        unused = {position for position, count in enumerate(used.tolist()) if not count}
        for part in parts:
            part.exchange.bucket.frozen = [slot for slot, position in enumerate(part.positions) if position in unused]

    def _failed(self) -> bool:
        return self._error is not None

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _wait(self) -> None:
        begin = compiling.clock()
        # What profilers see of the wait for communication.
        enabled = torch._C._autograd._profiler_enabled()
        with torch.profiler.record_function(f"{self._kind.__name__}.wait") if enabled else nullcontext():
            for task in self._tasks:
                # The exchange itself is bounded by its communicator's timeout.
                task.done.wait()
        self._wait_seconds += compiling.clock() - begin
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise follow_up(
                self._error,
                f"an exchange of the hook {self._spec!r} failed, and ranks no longer agree: {self._error}; restart from a "
                "checkpoint",
            ) from self._error

    def end(self) -> None:
        """Ends a backward pass; called by PyTorch when all gradients have come."""
        self._wait()
        assert self._algorithm is not None
        assert self._layout is not None
        self._exchange_seconds += covered([(task.began, task.ended) for task in self._tasks])
        self._tasks, step = [], self._steps
        self._steps += 1
        for exchange in self._layout.exchanges:
            exchange.end_step([])
        assert self._timer is not None
        seconds, listener = self._timer.taken(), self._algorithm.listener
        self._algorithm.policy.end_step(step, self.communicators[0])
        if listener is not None:
            listener.pass_ended(step, seconds, self.communicators[0])

    def interrupted(self, number: int) -> None:
        """Called when a backward pass has ended in an exception."""
        if number == self._passes and self._tasks:
            self._fail(RuntimeError("backward ended in an exception while gradients were exchanged"))

    @property
    def steps(self) -> int:
        """Backward passes whose gradients were averaged."""
        return self._steps

    def stats(self) -> Stats:
        """What the hook has done so far on this rank, as an algorithm's `stats` has it. A rank alone counts steps, too."""
        found = Stats(self._steps, self.bytes_sent, self._wait_seconds, self._exchange_seconds, 0.0, {})
        if self._algorithm is None or self._layout is None:
            return found
        policy = self._algorithm.policy
        squares = (exchange.residual_norm() ** 2 for exchange in self._layout.exchanges)
        return replace(
            found,
            residual_norm=math.sqrt(math.fsum(squares)),
            errors=policy.errors(),
            guards=policy.guards(),
            trial=policy.outcome,
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has put on the wire."""
        return sum(each.bytes_sent for each in self.communicators)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on; collective, between backward passes. Each rank saves its own.

        DDP begins each run with buckets in another order, and lays them out anew after the first pass. What a
        codec does to a whole bucket, as `topk` chooses its elements, differs in that pass. Other runs go on bit for bit.

        Returns:
            `steps`; in `vectors`, for each key of the exchanges' states, a tensor for each parameter's name; `decisions`.
        """
        if self._algorithm is None or self._layout is None:
            vectors = mean_of([one["vectors"] for one in self._states]) if self._states else {}
            decisions = self._states[0]["decisions"] if self._states else []
            return {"steps": self._steps, "vectors": vectors, "decisions": decisions}
        self._check()
        return {"steps": self._steps, "vectors": self._layout.state(), "decisions": self._algorithm.policy.state()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restores what `state_dict` returned.

        Args:
            state: this rank's; or, if the number of ranks has changed, those of all earlier ranks. Each rank then begins with
                the mean of what they remembered.

        Raises:
            ValueError: a state has other keys, or a vector another shape.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        check_keys("a hook", states, _STATE)
        self._states = states
        self._steps = int(states[0]["steps"])
        if self._layout is not None:
            self._take(states)

    def _take(self, states: Sequence[Mapping[str, Any]]) -> None:
        assert self._algorithm is not None
        assert self._layout is not None
        self._algorithm.policy.load(states[0]["decisions"])
        self._layout.load(mean_of([one["vectors"] for one in states]))

    def abort(self, reason: str) -> None:
        """Ends it at once, for other ranks may not come to `close`; they get an error.

        Args:
            reason: text of that error.
        """
        # First, for threads may be waiting for other ranks.
        opened = list(self.communicators)
        if self._algorithm is not None:
            opened += self._algorithm._communicators()
        for each in opened:
            each.abort(reason)
        with contextlib.suppress(CommunicationError):  # of what waited
            self.close()

    def close(self) -> None:
        """Ends its threads and frees its connections; collective. DDP must not be trained with it any more."""
        if self._runtime is not None:
            self._runtime.close()
        self._watched.remove()
        for each in self.communicators:
            each.close()
        if self._algorithm is not None:
            self._algorithm.close()


class _Return:
    """Puts results back at the very end of a backward pass, when DDP has written the means.

    Attributes:
        exchanged: True if gradients were exchanged in the pass.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        """Waits for nothing yet."""
        self._accumulation = accumulation
        self.begin()

    def begin(self) -> None:
        """Begins a pass, and ends one that has broken off."""
        self._accumulation.put_back()
        self.exchanged = self._awaited = self._last = False

    def await_end(self) -> None:
        """Has `end` called."""
        if not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(Ending(self, 0))

    @torch.no_grad()
    def end(self) -> None:
        """Puts results back, behind what DDP does at the end."""
        if not self._last:
            # DDP has asked to be called after this.
            self._last, self._awaited = True, False
            self.await_end()
        elif self.exchanged:
            for parameter in list(self._accumulation.aside):
                own = parameter.grad
                self._accumulation.gives_back(parameter, None if own is None else own.detach())
        else:
            self._accumulation.put_back()

    def interrupted(self, number: int) -> None:
        """Called when the pass has ended in an exception."""
        self._accumulation.put_back()


class _Caught(Work):
    """A collective whose error goes to a hook instead of being raised, so that its bucket comes to an end."""

    def __init__(self, work: Work, fail: Callable[[BaseException], None]) -> None:
        self._work, self._fail = work, fail

    def wait(self) -> None:
        """See `Work.wait`."""
        try:
            self._work.wait()
        except Exception as error:
            self._fail(error)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


def _load(parts: Sequence[Share], gradients: Sequence[torch.Tensor]) -> None:
    for part in parts:
        taken = [(slot, gradients[position], None) for slot, position in enumerate(part.positions)]
        fill(part.exchange.bucket, list(taken), 1.0, part.exchange)
