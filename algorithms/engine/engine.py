"""The engine: finds out when gradients are ready, and has them exchanged while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bagua_kernels.algorithms.engine.accumulation import Accumulation, Watched
from bagua_kernels.algorithms.engine.backward_steps import BucketSteps
from bagua_kernels.algorithms.engine.buckets import Buckets, Taken, exchanged, fill, show
from bagua_kernels.algorithms.engine.gradient_hook import gradient_hook
from bagua_kernels.algorithms.engine.interruption import Ending, Interruption
from bagua_kernels.algorithms.engine.listener import Listener, PassTimer
from bagua_kernels.algorithms.engine.loss_scale import LossScale
from bagua_kernels.algorithms.engine.member import EngineCounters, Member, Place
from bagua_kernels.algorithms.engine.options import EngineOptions, Manner
from bagua_kernels.algorithms.engine.participation import Participation, frozen_elsewhere
from bagua_kernels.algorithms.engine.reentrant import refuse_reentrant
from bagua_kernels.algorithms.engine.rows import Rows
from bagua_kernels.algorithms.engine.runtime import Run, Runtime, Task, covered, nothing
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.communicator import gather_json
from bagua_kernels.errors import CommunicationError
from bagua_kernels.jit import compiling
from bagua_kernels.streams import keep_memory
from bagua_kernels.upload import Numbers

# Steps between two looks at whether gradients came in another order, where a look waits for the device.
_LOOK_EVERY = 64


class Engine:
    """Averages the gradients of a set of parameters in each backward pass.

    1. When a parameter's gradient is complete, its hook stores it. Changes that later hooks make to `grad` are not exchanged.
    2. A bucket starts when all of its gradients are there and all buckets before it have been started. A communication
       thread copies them into the bucket, if its exchange does not read them in place, and runs the exchange. Backward goes
       on meanwhile. On a GPU backward's stream makes the copy, of all gradients of a bucket at once.
    3. At the end of backward, buckets with parameters that took no part are completed with zeros and started. All are waited
       for. Each `grad` becomes the view of its bucket, unless the optimizer's step was taken meanwhile. A parameter
       without a gradient on any rank keeps `grad` None, unless error feedback still had something for it. So does a frozen
       one (`requires_grad` is False), which all ranks have to freeze between the same passes.
    4. After the first pass in which all gradients came, buckets are laid out once in the order in which they came on rank 0.

    The last bucket carries, uncompressed, the flags of `Participation`, and one more that asks for the other order.

    Where nobody has zeroed a gradient, only what backward adds to it is exchanged, and then added to it (`Accumulation`). Exact
    means need no such care. A bucket in which a gradient of before is kept gets other memory.

    Attributes:
        members: the parameters with dense gradients, in the reverse order of registration; positions count in this list.
        buckets: where each of them lies, and the exchanges.
        communicators: one, or one for each bucket that is exchanged at a time; the first is the one that was given.
        enabled: True if backward passes exchange gradients.
        weight: what the next gradients are multiplied by before they are averaged.
        counters: what happened so far.
        participation: which parameters take part in a pass.
        order_is_known: True if buckets follow the order in which gradients come, or will from the next step on.
        interruption: `happened` is True once an exchange failed or a pass broke off; nothing goes on then.
        in_flight: exchanges at a time.
        timer: measures backward passes for the listener.
    """

    def __init__(
        self,
        members: Sequence[Member],
        make_exchange: Callable[[Bucket, Communicator], Exchange],
        communicator: Communicator,
        duplicate: Callable[[], Communicator],
        policy: Policy,
        options: EngineOptions,
        listener: Listener | None = None,
    ) -> None:
        """Lays out buckets and installs hooks; collective.

        Args:
            members: in the order in which a model registers them; at first buckets follow the reverse, in which backward
                tends to finish them.
            make_exchange: makes the exchange of a bucket over a communicator.
            communicator: of all ranks.
            duplicate: makes another one of the same ranks, for exchanges that take place beside those of the first.
            policy: its `end_step` is called after each step.
            options: see there.
            listener: its `pass_ended` is called after each backward pass.
        """
        self.members = [member for member in reversed(members) if not member.sparse]
        sparse = [member for member in members if member.sparse]
        self._sparse = [member.parameter for member in sparse]
        self._rows = [Rows(member.name, member.parameter, -1 - i) for i, member in enumerate(sparse)]
        self._make_exchange, self._policy, self._options = make_exchange, policy, options
        self._listener = listener
        self._healing = options.healing
        self._in_backward = True
        self._device = members[0].parameter.device
        self._on_gpu = self._device.type == "cuda"
        self.timer = PassTimer(listener, self._device)
        self._flags = Numbers(self._device)
        self.communicators, self.in_flight = [communicator], 1
        self.enabled = True
        self.weight = 1.0
        self.counters = EngineCounters()
        self.participation = Participation(self.members, communicator.size)
        self.interruption = Interruption([member.parameter for member in members])
        self._bucket_options = options.buckets
        self._accumulation = Accumulation(options.title, strict=False)
        self._watched = Watched(self)
        # After a loss ranks must not differ in what they have laid out.
        given = None if self._healing is None else list(range(len(self.members)))
        self.lay_out(given, {})
        # The attributes of exchanges decide how they are connected.
        exchanges, on_cpu = self.buckets.exchanges, self._device.type == "cpu"
        most = min(options.in_flight or (2 if on_cpu else 1), len(self.buckets.all) + len(self._rows))
        # Two streams of bytes on one link hinder each other. Sparse gradients take several collectives, one after the other.
        shared = on_cpu and not self._rows and all(not self._is_several(each) for each in exchanges)
        self.in_flight = self._most = most
        if most > 1 and not shared:
            self.communicators += [duplicate() for _ in range(most - 1)]
            self.lay_out(given, {}, self.buckets)
        self._runtime = Runtime(self._device, most, len(self.communicators))
        self._running = False
        self._step = 0
        self._passes = 0
        self._flag_ranks = communicator.size
        self._arrived: dict[int, None] = {}
        self._takes_part = True
        self._missing: list[int] = []
        self._taken: list[list[Taken]] = []
        self._streams: list[dict[torch.cuda.Stream, None]] = []
        self._loss_scale: LossScale | None = None
        self._tasks: list[Task] = []
        self._later: Callable[[], None] | None = None
        self._sparse_given: Sequence[torch.Tensor | None] = []
        engine = weakref.ref(self)
        self._hooks = [
            member.parameter.register_post_accumulate_grad_hook(gradient_hook(engine, position))
            for position, member in enumerate(self.members)
        ]
        self._hooks += [p.register_post_accumulate_grad_hook(gradient_hook(engine, None)) for p in self._sparse]

    def lay_out(
        self,
        order: list[int] | None,
        state: Mapping[str, Named],
        before: Buckets | None = None,
        *,
        moves: bool = False,
    ) -> None:
        """Makes buckets, and exchanges that remember a state.

        Args:
            order: positions of members, as buckets follow; None if it is not known.
            state: of the exchanges.
            before: see `Buckets`.
            moves: see `Buckets`.
        """
        self.order_is_known = order is not None
        order = order or list(range(len(self.members)))
        self.buckets = Buckets(self.members, order, self._bucket_options, before, moves=moves)
        self.buckets.connect(lambda bucket: self._make_exchange(bucket, self.communicator_of(bucket)))
        self._bucket_steps: list[BucketSteps] = []
        if self._options.steps is not None and self._in_backward:
            self._bucket_steps = self._options.steps.lay_out(self.buckets.all)
        for place, exchange in enumerate(self.buckets.exchanges):
            # A mean that may have to be made again is not used before all ranks have it.
            is_used_early = self._bucket_steps and self._healing is None
            exchange.updates = self._bucket_steps[place] if is_used_early else None
        if state:
            self.buckets.load(state)
        self._accumulation.strict = any(exchange.needs_increments for exchange in self.buckets.exchanges)
        if not self._watched and not all(exchange.keeps_means for exchange in self.buckets.exchanges):
            self._watched.add((m.name, m.parameter) for m in self.members if m.parameter.requires_grad)

    def _is_several(self, exchange: Exchange) -> bool:
        """Returns True if several collectives follow one another for a bucket."""
        return not exchange.one_collective or (self._healing is not None and self._healing.commits)

    def exchange_otherwise(self, place: Place, manner: Manner) -> None:
        """Goes on with other exchanges, which `make_exchange` makes from now on; between backward passes, on all ranks."""
        self.check_idle()
        self._take_manner(place, manner)
        self.lay_out(self.buckets.order if self.order_is_known else None, {}, self.buckets)

    def begin_otherwise(self, place: Place, manner: Manner, state: Mapping[str, Named]) -> None:
        """Begins with other exchanges, where ranks are others; not collective.

        Args:
            place: as for `exchange_otherwise`.
            manner: as for `exchange_otherwise`.
            state: that the exchanges remember, in place of what the ones before do.
        """
        self._take_manner(place, manner)
        self.lay_out(self.buckets.order, state, self.buckets)

    def _take_manner(self, place: Place, manner: Manner) -> None:
        self.members[:] = [member.placed(place) for member in self.members]
        self._bucket_options = manner.buckets
        self.in_flight = self._runtime.limit(manner.in_flight)
        self._in_backward = manner.in_backward

    def communicator_of(self, bucket: Bucket | Rows) -> Communicator:
        """The communicator on which a bucket is exchanged."""
        return self.communicators[bucket.index % min(self.in_flight, len(self.communicators))]

    def close(self) -> None:
        """Removes the hooks and ends the communication threads."""
        for hook in self._hooks:
            hook.remove()
        self._watched.remove()
        self._runtime.close()
        self.interruption.remove()

    def shut_down(self, communicators: Sequence[Communicator]) -> None:
        """Closes; after a backward pass that broke off, exchanges under way may wait for ranks that will not answer.

        Args:
            communicators: of the algorithm, which are aborted then.
        """
        if self.interruption.happened:
            for each in communicators:
                each.abort("it was closed after a backward pass that was interrupted")
        self.close()

    def gradient_ready(self, position: int | None) -> None:
        """Takes one parameter's gradient, which backward has just completed; None stands for a sparse one, taken later."""
        if not self.enabled:
            if position is not None and self._accumulation.aside:
                self._accumulation.end_local(self.members[position].parameter)
            return
        if not self._running:
            refuse_reentrant()
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(Ending(self, self._passes))
        if position is None:
            return
        if position in self._arrived:
            member = self.members[position]
            raise RuntimeError(
                f"parameter {member.name!r} of shape {tuple(member.parameter.shape)} got a second gradient in one backward pass"
            )
        self._take(position)
        self._arrived[position] = None
        index = self.buckets.slots[position][0].index
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start_complete()

    def gradient_coming(self, parameter: torch.Tensor, name: str) -> None:
        """Prepares for what backward is about to add to a gradient."""
        if not self._running and self._accumulation.aside:
            # A pass broke off before its first gradient.
            self._accumulation.put_back()
        self._accumulation.set_aside(parameter, name)

    def take_part(self) -> None:
        """Exchanges zeros, as a backward pass without any gradient would; gradients of before are lost."""
        self._begin()
        self._takes_part = False
        try:
            for index, bucket in enumerate(self.buckets.all):
                self._leave(index)
                bucket.fill_together(dict.fromkeys(range(len(bucket.views))))
            self._start_rest([None] * len(self._rows))
            self._finish()
            self._read_flags()
            with torch.inference_mode(False), torch.no_grad():
                self._go_on_later()
            self._conclude()
        except BaseException as error:
            self._interrupt(error)
            raise
        finally:
            self._takes_part = True

    def check_idle(self) -> None:
        """Raises if the last backward pass ended in an exception while exchanges were under way.

        Raises:
            RuntimeError: other ranks may be waiting for this one, and their next collective would meet another of ours.
        """
        self.interrupted(self._passes)
        self.interruption.check()

    def interrupted(self, number: int) -> None:
        """Ends a backward pass that ended in an exception; nothing follows if no exchange had been started by then.

        Args:
            number: of the pass; PyTorch may forget one when the next has begun.
        """
        if number != self._passes:
            return
        if self._running and self._tasks:
            self._interrupt(None)
        elif self._running:
            self._accumulation.put_back()
        self._running = False

    def _interrupt(self, error: BaseException | None) -> None:
        steps = self._options.steps
        self.interruption.happen(error, () if steps is None else sorted(steps.taken))
        self._accumulation.forget()
        self._running = False

    def _begin(self) -> None:
        self.check_idle()
        self.timer.begin()
        self._step = self.counters.steps
        self._running = True
        self._passes += 1
        if self._options.steps is not None:
            self._options.steps.start()
        self._arrived = {}
        if self._healing is not None:
            self._healing.begin()
        self._missing = [len(group) for group in self.buckets.groups]
        self._taken = [[] for _ in self.buckets.groups]
        self._streams = [{} for _ in self.buckets.groups]
        scaler = self._options.scaler
        self._loss_scale = None if scaler is None else LossScale(scaler)
        self._tasks = []
        self.participation.ranks = self.communicators[0].size
        if self._healing is not None and len(self.buckets.all) - 1 in self._healing.committed:
            # The flags are there, of the ranks that had this pass before this one came.
            self.participation.ranks = self._flag_ranks
        for position in self.participation.begin():
            # What stays frozen is not waited for.
            self._take_absent(position)
            self._missing[self.buckets.slots[position][0].index] -= 1

    def _take_absent(self, position: int) -> None:
        """Takes what a parameter has accumulated for which backward completed no gradient."""
        parameter = self.members[position].parameter
        if not parameter.requires_grad:
            # What was accumulated before it was frozen would move it.
            parameter.grad = None
            self.participation.frozen.add(position)
        elif self._watched:
            self._accumulation.set_aside(parameter, self.members[position].name)
        self._take(position)

    def _take(self, position: int) -> None:
        member, steps = self.members[position], self._options.steps
        gradient = member.parameter.grad
        if gradient is not None:
            if gradient.is_sparse:
                raise TypeError(
                    f"gradients must be dense, got a sparse one for parameter {member.name!r} of shape "
                    f"{tuple(gradient.shape)}; make the embedding with sparse=False"
                )
            self.participation.present.add(position)
        bucket, slot = self.buckets.slots[position]
        # What hooks after this one make of a gradient is not exchanged, however long that takes.
        now, on_gpu = len(member.parameter._post_accumulate_grad_hooks or ()) > 1, self._on_gpu
        shows = gradient is not None and not (now or on_gpu or (steps is not None and steps.updates(member.name)))
        taken = (slot, gradient, member.parameter if shows else None)
        if self._healing is not None:
            self._healing.keep(position, gradient, copies=now)
        if on_gpu:
            self._streams[bucket.index][torch.cuda.current_stream(self._device)] = None
        if self._healing is not None and bucket.index in self._healing.committed:
            return
        if now:
            self._leave(bucket.index)
            fill(bucket, [taken], self.weight)
        else:
            self._taken[bucket.index].append(taken)

    def _leave(self, index: int) -> None:
        """Leaves a bucket's memory to those who keep gradients of before in it."""
        self.buckets.all[index].leave(self.members[p].parameter.grad for p in self.buckets.groups[index])

    def _fill_on_stream(self, index: int) -> None:
        """Copies the gradients of a bucket on the current stream, on which the exchange waits for them."""
        current = torch.cuda.current_stream(self._device)
        others = [stream for stream in self._streams[index] if stream != current]
        for stream in others:
            current.wait_stream(stream)
        taken, self._taken[index] = self._taken[index], []
        if others:
            keep_memory(gradient for _, gradient, _ in taken if gradient is not None)
        self.buckets.all[index].fill_together({slot: gradient for slot, gradient, _ in taken}, self.weight)

    def _start_complete(self) -> None:
        if self._healing is not None and self._healing.is_over:
            return
        steps = self._options.steps
        while (index := len(self._tasks)) < len(self.buckets.all) and self._missing[index] == 0:
            bucket, positions = self.buckets.all[index], self.buckets.groups[index]
            if self._healing is not None and index in self._healing.committed:
                # Its mean has been used, or will be with what other ranks alone have gradients for.
                self._taken[index] = []
                for position in positions:
                    self.members[position].parameter.grad = None
                self._start(bucket, nothing, several=False)
                continue
            self._leave(index)
            if index == len(self.buckets.all) - 1:
                flags = [*self.participation.flags(self._takes_part), float(self._asks_for_order())]
                bucket.flags.copy_(self._flags.of(flags))
            if self._on_gpu:
                self._fill_on_stream(index)
            if steps is not None:
                for position in positions:
                    self.members[position].parameter.grad = None
            frozen, present = self.participation.frozen, self.participation.present
            bucket.frozen = [slot for slot, p in enumerate(positions) if p in frozen] if frozen else []
            exchange = self.buckets.exchanges[index]
            load = partial(fill, bucket, self._taken[index], self.weight, exchange, self.interruption)
            updates = (self._bucket_steps[index], [p in present for p in positions]) if self._bucket_steps else None
            run = partial(exchanged, exchange, self._step, load, self._loss_scale, updates, self._healing)
            self._start(bucket, run, several=self._is_several(exchange))

    def _start(self, bucket: Bucket | Rows, run: Run, several: bool) -> None:
        label = f"bagua_kernels {self._options.name}, bucket {bucket.index}"
        self._tasks.append(self._runtime.start(bucket.index, run, label, several))

    def _asks_for_order(self) -> bool:
        """Returns True if buckets are to be laid out in the order of this pass, which is asked for once."""
        looks = self._device.type != "cuda" or self._step % _LOOK_EVERY == 0
        if self.order_is_known or not looks or len(self._arrived) < len(self.members):
            return False
        self.order_is_known = True
        return list(self._arrived) != self.buckets.order

    def end(self) -> None:
        """Runs when backward has ended; exceptions leave `backward()`."""
        try:
            for position in range(len(self.members)):
                if position not in self._arrived and position not in self.participation.frozen:
                    self._take_absent(position)
            for parameter in self._sparse:
                if not parameter.requires_grad:
                    parameter.grad = None
            self._start_rest([parameter.grad for parameter in self._sparse])
            self._finish()
            # States that are made here are for training, whatever mode backward was called in.
            with torch.inference_mode(False), torch.no_grad():
                self._publish()
                self._go_on_later()
            self._conclude()
        except BaseException as error:
            self._interrupt(error)
            raise

    def _go_on_later(self) -> None:
        """Makes the exchanges with which training goes on after a change of ranks in this pass."""
        if (later := self._later) is not None:
            self._later = None
            later()

    def _start_rest(self, sparse: Sequence[torch.Tensor | None]) -> None:
        self._sparse_given = sparse
        if self._healing is not None and self._healing.is_over:
            return
        self._missing = [0] * len(self.buckets.all)
        self._start_complete()
        for rows, gradient in zip(self._rows, sparse, strict=True):
            if gradient is not None and not gradient.is_sparse:
                raise TypeError(
                    f"expected a sparse gradient for parameter {rows.name!r}, whose embedding has sparse=True, got a dense "
                    "one; make the embedding with sparse=False if it is used otherwise too"
                )
            rows.gradient = gradient if gradient is None or self.weight == 1.0 else gradient * self.weight
            self._start(rows, partial(rows.run, self.communicator_of(rows)), several=True)

    def _finish(self) -> None:
        """Waits for all exchanges. With `healing` all ranks have all means afterwards, or those that are left have repeated them.

        Raises:
            CommunicationError: an exchange failed, and training cannot go on.
        """
        healing = self._healing
        if healing is None:
            self._wait()
            return
        # Another model's exchange may have changed ranks in the middle of this pass.
        while not healing.is_complete:
            try:
                if healing.is_undone:
                    self._repeat()
                self._wait()
                # Over NCCL only streams have waited, and an exchange that was given up shows here first.
                for each in self.communicators[1:]:
                    each.drain()
                self.communicators[0].barrier_on_host()
                break
            except CommunicationError as error:
                healing.members.change(error)
        healing.end()

    def _repeat(self) -> None:
        """Starts the exchanges of this pass again, of the gradients that it has kept."""
        assert self._healing is not None
        self._healing.is_undone = False
        if not self.buckets.all or len(self.buckets.all) - 1 not in self._healing.committed:
            # Flags of this many follow.
            self.participation.ranks = self.communicators[0].size
        self._tasks = []
        self._taken = [[] for _ in self.buckets.groups]
        for index, group in enumerate(self.buckets.groups):
            self.buckets.all[index].lent.clear()
            self._taken[index] = [(slot, self._healing.gradient(p), None) for slot, p in enumerate(group)]
        self._start_rest(self._sparse_given)

    def complete(self, passes: int, old: Communicator) -> None:
        """Uses means that all ranks have of the pass under way, as others may have used them; collective, after a loss.

        Args:
            passes: to whose end some rank has come.
            old: a communicator of the ranks that are not new.
        """
        healing, own = self._healing, self.counters.steps
        assert healing is not None
        # A rank that is not within this pass has come to its end, or has not begun it.
        healing.is_complete = self._running and passes > own
        if not healing.commits:
            return
        for task in self._tasks:
            # It may be about to use a mean, or to fail.
            task.done.wait()
        everyone = gather_json(old, [own, sorted(healing.committed)])
        found = {index for steps, committed in everyone if steps == own for index in committed}
        if healing.is_complete:
            found = set(range(len(self.buckets.all)))
        with torch.inference_mode(False), torch.no_grad():
            for index in sorted(found - healing.committed):
                # Its exchange has ended here: others have come through the barrier behind it.
                self._bucket_steps[index].finish()
                healing.committed.add(index)

    def go_on_with(
        self,
        communicator: Communicator,
        duplicate: Callable[[], Communicator],
        old: Communicator,
        otherwise: tuple[Place, Manner] | None = None,
    ) -> Mapping[str, Named]:
        """Goes on among other ranks, after a loss; collective.

        Args:
            communicator: of all ranks.
            duplicate: as for the constructor.
            old: a communicator of the ranks that are not new.
            otherwise: for other exchanges; None for those of before.

        Returns:
            What the exchanges remember.
        """
        healing = self._healing
        assert healing is not None
        undo = self._running and not healing.is_complete
        with torch.inference_mode(False), torch.no_grad():
            state = healing.states(self.buckets.exchanges, old, undo=undo)
            self.communicators = [communicator, *(duplicate() for _ in self.communicators[1:])]
            self._runtime.close()
            self._runtime = Runtime(self._device, self._most, len(self.communicators))
            self.in_flight = self._runtime.limit(self.in_flight)
            if otherwise is None:
                self.lay_out(self.buckets.order, state, self.buckets)
            elif self._running and healing.is_complete:
                # The means of this pass lie in buckets of before.
                self._later = lambda: self.begin_otherwise(*otherwise, state)
            else:
                self.begin_otherwise(*otherwise, state)
            healing.forget()
        healing.is_undone = undo
        return state

    def share_committed(self, pair: Communicator) -> None:
        """Gives new members the means of buckets that are committed, and the names of what has been updated; collective.

        Args:
            pair: of a member, which has rank 0, and new ones.
        """
        healing, steps = self._healing, self._options.steps
        if healing is None or steps is None:
            return
        own = [sorted(healing.committed), sorted(steps.taken), self.participation.ranks]
        committed, taken, self._flag_ranks = pair.broadcast_object(own)
        for index in committed:
            pair.broadcast(self.buckets.all[index].whole, 0).wait()
        pair.drain()
        healing.committed, steps.taken = set(committed), set(taken)

    def _wait(self) -> None:
        begin = compiling.clock()
        # What profilers see of the wait for communication.
        enabled = torch._C._autograd._profiler_enabled()
        with torch.profiler.record_function(f"{self._options.title}.wait") if enabled else nullcontext():
            for task in self._tasks:
                # The exchange itself is bounded by its communicator's timeout.
                task.done.wait()
        self.counters.wait_seconds += compiling.clock() - begin
        # Raises the first error, not those that it caused.
        for task in sorted(self._tasks, key=lambda each: each.follows):
            task.check()
        self.counters.exchange_seconds += covered([(task.began, task.ended) for task in self._tasks])

    def _read_flags(self) -> None:
        if self.buckets.all:
            self.participation.read(self.buckets.all[-1].flags[:-1], self._takes_part)

    def _publish(self) -> None:
        for rows, parameter in zip(self._rows, self._sparse, strict=True):
            if rows.gradient is not None and not parameter.requires_grad:
                raise RuntimeError(frozen_elsewhere(rows.name))
            parameter.grad = rows.gradient
        self._read_flags()
        steps, late = self._options.steps, dict[str, torch.Tensor]()
        places = (
            [StorageWeakRef(bucket.whole.untyped_storage()) for bucket in self.buckets.all] if self._watched else []
        )
        for position, member in enumerate(self.members):
            if position in self.participation.frozen or (steps is not None and member.name in steps.taken):
                continue
            bucket, slot = self.buckets.slots[position]
            remembers = self.buckets.exchanges[bucket.index].has_memory
            # waits: only for parameters that no rank has used.
            given = position not in self.participation.unused or (remembers and bool(bucket.views[slot].any()))
            if given and steps is not None and steps.updates(member.name):
                late[member.name] = bucket.views[slot]
            elif self._accumulation.aside and self._accumulation.gives_back(
                member.parameter, bucket.views[slot] if given else None
            ):
                continue
            elif given:
                show(bucket, slot, member.parameter)
                if places:
                    self._accumulation.note(member.parameter, places[bucket.index])
        if steps is not None:
            steps.finish(late)

    def _conclude(self) -> None:
        """Decides what follows from the pass; collective."""
        self.counters.steps += 1
        unused: list[list[int]] = [[] for _ in self.buckets.all]
        # What is frozen was withheld.
        for position in sorted(self.participation.unused - self.participation.frozen):
            bucket, slot = self.buckets.slots[position]
            unused[bucket.index].append(slot)
        for exchange, slots in zip(self.buckets.exchanges, unused, strict=True):
            exchange.end_step(slots)
        seconds = self.timer.taken()
        self._policy.end_step(self._step, self.communicators[0])
        self._follow_order()
        self._running = False
        self._tasks = []
        for rows in self._rows:
            rows.gradient = None
        self.weight = 1.0
        if self._listener is not None:
            self._report(self._listener, seconds)
        if self._healing is not None:
            self._healing.concluded(self.counters.steps)

    def _report(self, listener: Listener, seconds: float) -> None:
        """Has a listener compare this pass; where ranks were lost meanwhile, no rank does."""
        healing = self._healing
        if healing is not None and healing.was_complete:
            return
        try:
            listener.pass_ended(self._step, seconds, self.communicators[0])
        except CommunicationError as error:
            if healing is None:
                raise
            # The step of this pass is still to be taken: a new member would get parameters without it.
            with healing.members.admitting_none():
                healing.members.change(error)

    def _follow_order(self) -> None:
        """Lays buckets out again if gradients came in another order than theirs on any rank."""
        if not self.buckets.all:
            return
        flag = self.buckets.all[-1].flags[-1]
        # waits: once in 64 steps until the order is known.
        if (not flag.is_cuda or self._step % _LOOK_EVERY == 0) and float(flag) > 0:
            own = list(self._arrived) if len(self._arrived) == len(self.members) else self.buckets.order
            order = self.communicators[0].broadcast_object(own)
            if order != self.buckets.order:
                state = self.buckets.state()
                # Exchanges, which know the state, go first, and then one bucket after the other.
                self.buckets.exchanges.clear()
                self._bucket_steps.clear()
                self.lay_out(order, state, self.buckets, moves=True)
                for position, (bucket, _) in self.buckets.slots.items():
                    self._accumulation.move(self.members[position].parameter, bucket.whole)
