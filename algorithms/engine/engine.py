"""The engine: finds out when gradients are ready, and has them exchanged while backward goes on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from bagua_kernels.algorithms.engine.backward_steps import BackwardSteps
from bagua_kernels.algorithms.engine.communication_lane import (
    Agree,
    CommunicationLane,
    Exchange,
    Taken,
    Task,
    covered,
    load,
)
from bagua_kernels.algorithms.engine.gates import Gates
from bagua_kernels.algorithms.engine.interruption import Ending, Interruption
from bagua_kernels.algorithms.engine.member import Counters, Member
from bagua_kernels.algorithms.engine.reentrant import refuse_reentrant
from bagua_kernels.algorithms.engine.rows import Rows
from bagua_kernels.bucket import Bucket, partition
from bagua_kernels.jit import compiling

_FIRST_BYTES = 1 << 20  # of the first bucket: the wire is idle until it is full
# From this size on it costs less to exchange a gradient by itself than to copy it. ResNet-18 has 7 of 10 elements in such ones.
_ALONE_BYTES = 4 << 20
# Steps between two looks at whether buckets should be laid out anew, where a look waits for the device.
_LOOK_EVERY = 64


class Engine:
    """Averages the gradients of a set of parameters in each backward pass.

    1. When a parameter's gradient is complete, its hook takes note of it. What later hooks make of it is not exchanged.
    2. When all gradients of a bucket are there, and all buckets before it have been started, a communication thread copies
       them into the bucket, unless they are there already or it works where they are (`lend`, `adopt`), and exchanges it,
       while backward goes on. Lanes take buckets in turn. On a GPU backward's stream makes the copy.
    3. At the end of backward, buckets with parameters that took no part are completed with zeros and started, all are waited
       for, and each `grad` becomes the view of its bucket, unless the optimizer's step was taken meanwhile. A parameter
       without a gradient on any rank keeps `grad` None, unless error feedback still had something for it; so does a frozen
       one (`requires_grad` is False), which all ranks have to freeze between the same passes. With `gates`,
       nothing is waited for but where a parameter is used, and at the next backward pass's first gradient; and each
       lane takes first, of the buckets that are there on all ranks, the one that forward needs first.
    4. After the first pass, and when gradients come in another order twice running, buckets are laid out in the order in
       which they came on rank 0.

    The last bucket carries, uncompressed, one flag a parameter: 1 if this rank has a gradient for it, 0 if it is frozen
    here, else a small number. One more says whether gradients came in another order.

    Attributes:
        members: the parameters with dense gradients, in the reverse order of registration; positions count in this list.
        rows: the others' gradients.
        buckets: in the order in which they are exchanged.
        groups: the positions of each bucket's parameters.
        order: the positions in the order that buckets follow.
        enabled: whether backward passes exchange gradients.
        weight: what the next gradients are multiplied by before they are averaged.
        counters: what happened so far.
        interruption: `happened` is True once an exchange failed or a pass broke off; nothing goes on then.
    """

    def __init__(
        self,
        members: Sequence[Member],
        exchange: Exchange,
        *,
        align: int,
        bucket_bytes: int,
        small_first: bool = True,
        reorder: Callable[[list[int]], None],
        settle: Callable[[int, float], None],
        late: bool = True,
        name: str = "",
        steps: BackwardSteps | None = None,
        lanes: int = 1,
        depth: int = 1,
        lend: bool = False,
        adopt: bool = False,
        gates: Gates | None = None,
        agree: Agree | None = None,
        ranks: int = 1,
        untrained: Sequence[tuple[str, torch.nn.Parameter]] = (),
        title: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Lays out buckets and installs hooks.

        Args:
            members: in the order in which a model registers them; at first buckets follow the reverse, in which backward
                tends to finish them.
            exchange: given a bucket and the number of the backward pass, replaces `flat` and `exact` by their means over
                all ranks; runs on a communication thread. It may return what does the rest, which is waiting for the most
                part.
            align: elements to whose multiples tensors are aligned in a bucket.
            bucket_bytes: size from which a bucket takes no more tensors.
            small_first: whether the first buckets take less.
            reorder: told the positions in the order in which gradients came, on all ranks at once when they come in another
                order than that of the buckets on any; expected to call `lay_out`.
            settle: told after each pass, before that and when no exchange is under way, the pass's number, and the seconds
                from its first gradient to the end of its last exchange; with `gates` to the next pass's first gradient.
            late: whether a mean may be other than zero though no rank has a gradient; `grad` is set then.
            name: of the algorithm, for profilers.
            steps: what updates parameters on the communication threads, if anything does.
            lanes: exchanges that are started at a time, if there are as many buckets.
            depth: exchanges that each lane has under way at a time, each on a thread, where they say what waits for them.
            lend: whether `exchange` reads what is to be compressed where backward has left it (`Bucket.lent`), so that it need
                not be copied.
            adopt: whether `exchange` looks for a bucket's memory anew each time, so that a gradient that has a bucket to itself
                need not be copied either: its memory becomes the bucket's (`Bucket.adopt`). The last bucket holds flags too.
            gates: if given, with `steps` that update all members, what waits for these where they are used.
            agree: the lowest of the numbers of a bucket that ranks give, with `gates`; runs on a communication thread.
            ranks: the number of ranks.
            untrained: names and parameters that are frozen now, see `check_untrained`.
            title: begins the name of the range in which backward waits, for profilers.
            clock: by which passes are timed.
        """
        self._late = late
        self._steps = steps
        self.members = [member for member in reversed(members) if not member.sparse]
        self.rows = [Rows(m.name, m.parameter, -1 - i) for i, m in enumerate(m for m in members if m.sparse)]
        self._sparse = [m.parameter for m in members if m.sparse]
        self.enabled = True
        self.weight = 1.0
        self.counters = Counters()
        self._align = align
        self._bucket_bytes, self._first_bytes = bucket_bytes, _FIRST_BYTES if small_first else None
        self._reorder = reorder
        self._settle = settle
        self._lend = lend
        self._adopt = adopt
        self._gates = gates
        self._clock = clock
        # The flag of a parameter without a gradient that is not frozen: the mean of such flags is below a half of 1 / ranks.
        self._absent, self._least = 0.25 / ranks, 0.5 / ranks
        self._waiting = f"{title}.wait"
        self._untrained = list(untrained)
        self.interruption = Interruption([member.parameter for member in members])
        self.lay_out(list(range(len(self.members))))
        lanes = min(lanes, len(self.buckets) + len(self.rows))
        device = members[0].parameter.device
        self._lanes = [CommunicationLane(exchange, device, name, agree, depth) for _ in range(lanes)]
        self._running = False
        self._pending = False
        self._unconcluded = False
        self._step = 0
        self._passes = 0
        self._begun = 0.0
        self._arrived: dict[int, None] = {}
        self._present: set[int] = set()
        self._frozen: set[int] = set()
        self._unused: set[int] = set()
        self._only_takes_part = False
        self._missing: list[int] = []
        self._taken: list[list[Taken]] = []
        self._tasks: list[Task] = []
        self._last_order: list[int] = []
        self._asked: list[int] = []
        engine = weakref.ref(self)
        self._hooks = [
            member.parameter.register_post_accumulate_grad_hook(_hook(engine, position))
            for position, member in enumerate(self.members)
        ]
        self._hooks += [p.register_post_accumulate_grad_hook(_hook(engine, None)) for p in self._sparse]

    def lay_out(self, order: list[int]) -> None:
        """Makes new buckets, whose parameters follow an order of positions."""
        members = [self.members[position] for position in order]
        kinds = [m.kind for m in members]
        alone = min(_ALONE_BYTES, self._bucket_bytes) if self._adopt else None
        groups = partition([m.parameter for m in members], self._bucket_bytes, kinds, self._first_bytes, alone)
        self.order = order
        self.groups = [[order[place] for place in group] for group in groups]
        self.buckets = [
            Bucket(
                [self.members[p].parameter for p in group],
                align=self._align,
                exact=[self.members[p].exact for p in group],
                flags=len(self.members) + 1 if index == len(groups) - 1 else 0,
                index=index,
                kind=self.members[group[0]].kind,
                names=[self.members[p].name for p in group],
            )
            for index, group in enumerate(self.groups)
        ]
        # Position of a parameter -> its bucket and its place in there.
        self.slots = {position: (bucket, slot) for bucket, group in zip(self.buckets, self.groups, strict=True)
                      for slot, position in enumerate(group)}  # fmt: skip

    @property
    def lanes(self) -> int:
        """The number of lanes; that of a bucket is its index modulo this."""
        return len(self._lanes)

    def close(self) -> None:
        """Removes the hooks and ends the communication threads."""
        if self._gates is not None:
            self._gates.remove()
        for hook in self._hooks:
            hook.remove()
        for lane in self._lanes:
            lane.close()
        self.interruption.remove()

    def gradient_ready(self, position: int | None) -> None:
        """Takes one parameter's gradient, which backward has just completed; None stands for a sparse one, taken later."""
        if not self.enabled:
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
        index = self.slots[position][0].index
        self._missing[index] -= 1
        if not self._missing[index]:
            self._start_complete()

    def unused(self) -> set[int]:
        """The positions of parameters for which no rank had a gradient in the pass whose exchanges have ended."""
        return self._unused

    def frozen(self, bucket: Bucket) -> list[int]:
        """The slots of a bucket whose parameters are frozen in the backward pass that is, or was last, under way."""
        if not self._frozen:
            return []
        return [slot for slot, position in enumerate(self.groups[bucket.index]) if position in self._frozen]

    def is_frozen(self, position: int) -> bool:
        """True if a parameter is frozen in the backward pass that is, or was last, under way."""
        return position in self._frozen

    def _read_flags(self) -> None:
        """Finds out for which parameters no rank had a gradient.

        Raises:
            RuntimeError: a parameter is frozen here and not on another rank.
        """
        self._unused = set()
        if not self.buckets or len(self._present) == len(self.members):
            return
        # Reading the flags waits for the device, so it is done only where a flag can be below 1.
        flags = self.buckets[-1].flags[:-1].tolist()
        self._unused = {position for position, flag in enumerate(flags) if flag < self._least}
        for position in () if self._only_takes_part else sorted(self._frozen):
            if flags[position]:
                raise RuntimeError(_differs(self.members[position].name))

    def take_part(self) -> None:
        """Exchanges zeros, as a backward pass without any gradient would; gradients of before are lost."""
        self.conclude()
        self._begin()
        self._only_takes_part = True
        try:
            for position in range(len(self.members)):
                bucket, slot = self.slots[position]
                bucket.fill(slot, None)
            self._start_rest([None] * len(self.rows))
            self._wait()
            self._read_flags()
            self.counters.steps += 1
            self._conclude()
        except BaseException as error:
            self._interrupt(error)
            raise
        finally:
            self._only_takes_part = False

    def present(self, bucket: Bucket) -> list[bool]:
        """Which of a bucket's tensors have a gradient on this rank."""
        return [position in self._present for position in self.groups[bucket.index]]

    def arrive(self, positions: Sequence[int]) -> None:
        """Waits until these parameters have been updated; see `Gates`.

        Raises:
            Exception: what went wrong in their exchange.
        """
        positions = [position for position in positions if position not in self._frozen]
        if not self._present.issuperset(positions):
            # Whether other ranks have a gradient for one is known when all has arrived.
            self.complete()
            return
        begin = compiling.clock()
        with self._range():
            for task in [self._tasks[index] for index in {self.slots[position][0].index for position in positions}]:
                task.done.wait()
                try:
                    self._check(task)
                except Exception as error:
                    self._interrupt(error)
                    raise
        self.counters.wait_seconds += compiling.clock() - begin
        if all(task.done.is_set() for task in self._tasks):
            self.complete()

    def complete(self) -> None:
        """Waits for what is under way after backward has ended; says nothing to other ranks.

        Raises:
            Exception: what went wrong in an exchange.
        """
        if self._pending:
            # With gates an interrupt from the keyboard is no failure: it is waited for once more.
            self._pending = self._gates is not None
            try:
                self._wait()
                self._pending, running, self._running = False, self._running, True
                # Whoever waits may be in an evaluation; states that are made here are for training.
                with torch.inference_mode(False), torch.no_grad():
                    self._publish()
            except Exception as error:
                self._interrupt(error)
                raise
            self.counters.steps += 1
            self._running = running
        else:
            # On a GPU it is streams that wait, and this one may be another.
            for task in self._tasks if self._gates is not None and not self.interruption.happened else ():
                task.check()
        if self._gates is not None and self._tasks and not self._tasks[0].bucket.whole.is_cuda:
            self._gates.pending = None

    def conclude(self) -> None:
        """Completes the last backward pass, and decides what follows from it; collective.

        Raises:
            RuntimeError: see `check_idle`.
        """
        self.check_idle()
        self.complete()
        if self._gates is not None:
            self._gates.pending = None
        if self._unconcluded:
            self._conclude()

    def check_idle(self) -> None:
        """Raises if the last backward pass ended in an exception while exchanges were under way.

        Raises:
            RuntimeError: other ranks may be waiting for this one, and their next collective would meet another of ours.
        """
        self.interrupted(self._passes)
        self.interruption.check()

    def check_untrained(self) -> None:
        """Raises if a parameter is trained that was frozen when the module was wrapped.

        Raises:
            RuntimeError: its gradients are not exchanged, so that replicas would drift apart.
        """
        for name, parameter in self._untrained:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the module was wrapped, so that its gradients are not exchanged: "
                    "wrap the module again after requires_grad_(True), or wrap it before you freeze parameters"
                )

    def interrupted(self, number: int) -> None:
        """Ends a backward pass that ended in an exception; nothing follows if no exchange had been started by then.

        Args:
            number: of the pass; PyTorch may forget one when the next has begun.
        """
        if number != self._passes:
            return
        if self._running and self._tasks:
            self._interrupt(None)
        self._running = False

    def _interrupt(self, error: BaseException | None) -> None:
        self.interruption.happen(error, () if self._steps is None else self._steps.updated())
        self._pending = self._unconcluded = self._running = False
        if self._gates is not None:
            self._gates.pending = None

    def _begin(self) -> None:
        self.conclude()
        self._begun = self._clock()
        self._step = self.counters.steps
        self._running = True
        self._passes += 1
        if self._steps is not None:
            self._steps.start()
        self._arrived = {}
        self._present = set()
        before, self._frozen = self._frozen, set()
        self._missing = [len(group) for group in self.groups]
        self._taken = [[] for _ in self.groups]
        self._tasks = []
        for position in sorted(before):
            # What stays frozen is not waited for.
            if not self.members[position].parameter.requires_grad:
                self._take_absent(position)
                self._missing[self.slots[position][0].index] -= 1

    def _take_absent(self, position: int) -> None:
        """Takes what a parameter has accumulated for which backward completed no gradient."""
        parameter = self.members[position].parameter
        if not parameter.requires_grad:
            # What was accumulated before it was frozen would move it.
            parameter.grad = None
            self._frozen.add(position)
        self._take(position)

    def _take(self, position: int) -> None:
        member = self.members[position]
        gradient = member.parameter.grad
        if gradient is not None:
            if gradient.is_sparse:
                raise TypeError(
                    f"gradients must be dense, got a sparse one for parameter {member.name!r} of shape "
                    f"{tuple(gradient.shape)}; make the embedding with sparse=False"
                )
            self._present.add(position)
        bucket, slot = self.slots[position]
        # On a GPU on backward's stream, of which the allocator knows that it reads the gradient. And what hooks after this
        # one make of a gradient is not exchanged, however long that takes.
        now = bucket.whole.is_cuda or len(member.parameter._post_accumulate_grad_hooks or ()) > 1
        adopts = gradient is not None and not now and not (self._steps is not None and self._steps.updates(member.name))
        self._taken[bucket.index].append((slot, gradient, member.parameter if adopts else None))
        if now:
            load(bucket, self._taken[bucket.index], self.weight)

    def _start_complete(self) -> None:
        while (index := len(self._tasks)) < len(self.buckets) and self._missing[index] == 0:
            if index == len(self.buckets) - 1:
                self._write_flags()
            bucket = self.buckets[index]
            if self._steps is not None:
                for position in self.groups[index]:
                    self.members[position].parameter.grad = None
            self._start(
                bucket,
                partial(load, bucket, self._taken[index], self.weight, self._lend, self._adopt, self.interruption),
            )

    def _start(self, bucket: Bucket | Rows, before: Callable[[], None] | None = None) -> None:
        self._tasks.append(self._lanes[bucket.index % self.lanes].start(bucket, self._step, before))

    def _write_flags(self) -> None:
        absent = 0.0 if self._only_takes_part else self._absent
        present = [1.0 if p in self._present else absent for p in range(len(self.members))]
        for position in self._frozen:
            present[position] = 0.0
        self.buckets[-1].flags.copy_(torch.tensor([*present, float(self._another_order())], dtype=torch.float32))

    def _another_order(self) -> bool:
        if len(self._arrived) < len(self.members):
            return False
        order = list(self._arrived)
        lasting = order == self._last_order or self._step == 0
        self._last_order = order
        # Asked once: where ranks differ for good, rank 0's order stays.
        asks = lasting and order not in (self.order, self._asked)
        if asks:
            self._asked = order
        return asks

    def end(self) -> None:
        """Runs when backward has ended; exceptions leave `backward()`."""
        try:
            for position in range(len(self.members)):
                if position not in self._arrived and position not in self._frozen:
                    self._take_absent(position)
            for parameter in self._sparse:
                if not parameter.requires_grad:
                    parameter.grad = None
            self._start_rest([parameter.grad for parameter in self._sparse])
            self._pending = self._unconcluded = True
            if self._gates is None:
                self.complete()
                self._conclude()
                return
        except BaseException as error:
            self._interrupt(error)
            raise
        self._running = False
        self._gates.pending = self

    def _start_rest(self, sparse: Sequence[torch.Tensor | None]) -> None:
        self._missing = [0] * len(self.buckets)
        self._start_complete()
        for rows, gradient in zip(self.rows, sparse, strict=True):
            if gradient is not None and not gradient.is_sparse:
                raise TypeError(
                    f"expected a sparse gradient for parameter {rows.name!r}, whose embedding has sparse=True, got a dense "
                    "one; make the embedding with sparse=False if it is used otherwise too"
                )
            rows.gradient = gradient if gradient is None or self.weight == 1.0 else gradient * self.weight
            self._start(rows)

    def _wait(self) -> None:
        begin = compiling.clock()
        with self._range():
            for task in self._tasks:
                # The exchange itself is bounded by its communicator's timeout.
                task.done.wait()
        self.counters.wait_seconds += compiling.clock() - begin
        for task in self._tasks:
            self._check(task)
        self.counters.exchange_seconds += covered([(task.began, task.ended) for task in self._tasks])

    def _check(self, task: Task) -> None:
        """As `Task.check`, but raises what went wrong first."""
        if task.error is not None and task.follows:
            for other in self._tasks:
                if other.done.is_set() and not other.follows:
                    other.check()
        task.check()

    def _range(self) -> AbstractContextManager[object]:
        """What profilers see of the wait for communication."""
        enabled = torch._C._autograd._profiler_enabled()
        return torch.profiler.record_function(self._waiting) if enabled else nullcontext()

    def _publish(self) -> None:
        for rows, parameter in zip(self.rows, self._sparse, strict=True):
            if rows.gradient is not None and not parameter.requires_grad:
                raise RuntimeError(_differs(rows.name))
            parameter.grad = rows.gradient
        self._read_flags()
        unused, frozen, late = self._unused, self._frozen, dict[str, torch.Tensor]()
        for position, member in enumerate(self.members):
            if position in frozen or (self._steps is not None and self._steps.taken(member.name)):
                continue
            bucket, slot = self.slots[position]
            if position not in unused or (self._late and bool(bucket.views[slot].any())):
                if self._steps is not None and self._steps.updates(member.name):
                    late[member.name] = bucket.views[slot]
                else:
                    member.parameter.grad = bucket.views[slot]
        if self._steps is not None:
            self._steps.finish_late(late)

    def _conclude(self) -> None:
        self._settle(self._step, self._clock() - self._begun)
        self._consider_order()
        self._unconcluded = self._running = False
        self._tasks = []
        for rows in self.rows:
            rows.gradient = None
        self.weight = 1.0

    def _consider_order(self) -> None:
        if not self.buckets:
            return
        flag = self.buckets[-1].flags[-1]
        if (not flag.is_cuda or self._step % _LOOK_EVERY == 0) and float(flag) > 0:
            self._reorder(list(self._arrived) if len(self._arrived) == len(self.members) else self.order)


def _differs(name: str) -> str:
    return (
        f"parameter {name!r} is frozen on this rank (requires_grad=False), and not on another: replicas would drift apart; "
        "freeze it on all ranks before the same step"
    )


def _hook(engine: weakref.ref[Engine], position: int | None) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.gradient_ready(position)

    return hook
