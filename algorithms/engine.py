"""The engine: finds out when gradients are ready, and has them exchanged while backward goes on."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bagua_kernels.bucket import Bucket, partition

Exchange = Callable[[Bucket, int], None]


@dataclass
class Task:
    """One exchange of one bucket, handed to the communication thread.

    Attributes:
        bucket: what to exchange.
        step: number of the backward pass it belongs to.
        done: set when the exchange has ended, well or not.
        error: what went wrong.
        seconds: how long the exchange took on the communication thread.
        ready: on a GPU, recorded when the gradients are in the bucket.
        finished: on a GPU, recorded when the averages are.
    """

    bucket: Bucket
    step: int
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    seconds: float = 0.0
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None


class CommunicationThread:
    """Runs exchanges one after the other, in the order they are given, beside the training thread.

    One thread and one order mean that all ranks start their collectives in the same order, without which collectives of
    different buckets would meet.
    """

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        """Starts the thread, which ends with this object.

        Args:
            exchange: what to do with each bucket: a method, of whose object the thread keeps no reference.
            device: of the buckets.
        """
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # A reference from the thread to the algorithm, or to `self`, would keep all of them alive for ever.
        thread = threading.Thread(
            target=_work,
            args=(self._tasks, weakref.WeakMethod(exchange), device),
            name="bagua_kernels communication",
            daemon=True,
        )
        thread.start()
        self.close = weakref.finalize(self, _end_thread, self._tasks, thread)

    def start(self, bucket: Bucket, step: int) -> Task:
        """Queues an exchange of a bucket whose gradients are in place on the current stream."""
        task = Task(bucket, step)
        if bucket.whole.is_cuda:
            task.ready = torch.cuda.Event()
            task.ready.record(torch.cuda.current_stream(bucket.whole.device))
        self._tasks.put(task)
        return task


def _end_thread(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    """Ends the thread and waits for it: a thread that outlives the interpreter ends the process with an abort."""
    tasks.put(None)
    if thread is not threading.current_thread():
        # An exchange that hangs is released by its communicator, at the latest when that is shut down.
        thread.join(timeout=10.0)


def _work(tasks: queue.SimpleQueue[Task | None], exchange: weakref.WeakMethod[Exchange], device: torch.device) -> None:
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    failure: BaseException | None = None
    while (task := tasks.get()) is not None:
        begin = time.perf_counter()
        try:
            # After one failure the ranks no longer agree on what comes next.
            if failure is not None:
                raise failure
            _run(task, exchange(), stream)
        except BaseException as error:
            task.error = failure = error
        finally:
            task.seconds = time.perf_counter() - begin
            task.done.set()
        # Waiting for the next task must not keep this one's tensors alive.
        del task


def _run(task: Task, exchange: Exchange | None, stream: torch.cuda.Stream | None) -> None:
    if exchange is None:
        raise RuntimeError(
            "the algorithm was deleted while its gradients were exchanged; keep it until backward has ended"
        )
    if stream is None or task.ready is None:
        exchange(task.bucket, task.step)
        return
    with torch.cuda.stream(stream):
        stream.wait_event(task.ready)
        exchange(task.bucket, task.step)
        task.finished = torch.cuda.Event()
        task.finished.record(stream)


@dataclass
class Counters:
    """What the engine has counted since it was made.

    Attributes:
        steps: backward passes whose gradients were exchanged.
        wait_seconds: time that backward passes had to wait at their end for exchanges.
        exchange_seconds: time the communication thread was busy.
    """

    steps: int = 0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0


class Engine:
    """Averages the gradients of a set of parameters in each backward pass.

    1. When a parameter's gradient is complete, its hook copies it into its bucket.
    2. When all gradients of a bucket are there, and all buckets before it have been started, its exchange is started on the
       communication thread, while backward goes on.
    3. At the end of backward, buckets with parameters that took no part are completed with zeros and started, all are waited
       for, and each `grad` becomes the view of its bucket. A parameter without a gradient on any rank keeps `grad` None.

    The last bucket carries, uncompressed, one flag a parameter: whether this rank has a gradient for it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        exchange: Exchange,
        *,
        align: int,
        bucket_bytes: int,
    ) -> None:
        """Lays out buckets and installs hooks.

        Args:
            parameters: in the order in which a model registers them; buckets follow the reverse, in which backward
                tends to finish them.
            exchange: given a bucket and the number of the backward pass, replaces `flat` and `exact` by their means over
                all ranks; runs on the communication thread.
            align: elements to whose multiples tensors are aligned in a bucket.
            bucket_bytes: size from which a bucket takes no more tensors.
        """
        self.parameters = list(reversed(parameters))
        groups = partition(self.parameters, bucket_bytes)
        self.buckets = [
            Bucket(
                [self.parameters[p] for p in group],
                align=align,
                exact=len(self.parameters) if index == len(groups) - 1 else 0,
                index=index,
            )
            for index, group in enumerate(groups)
        ]
        self.members = groups
        # Position of a parameter -> its bucket and its place in there.
        self.slots = {position: (bucket, slot) for bucket, group in zip(self.buckets, groups, strict=True)
                      for slot, position in enumerate(group)}  # fmt: skip
        self.enabled = True
        self.counters = Counters()
        self._thread = CommunicationThread(exchange, self.buckets[0].whole.device)
        self._running = False
        self._arrived: set[int] = set()
        self._present: set[int] = set()
        self._missing: list[int] = []
        self._tasks: list[Task] = []
        engine = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(engine, position))
            for position, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Removes the hooks and ends the communication thread."""
        for hook in self._hooks:
            hook.remove()
        self._thread.close()

    def gradient_ready(self, position: int) -> None:
        """Takes one parameter's gradient, which backward has just completed."""
        if not self.enabled:
            return
        if not self._running:
            self._begin()
        if position in self._arrived:
            shape = tuple(self.parameters[position].shape)
            raise RuntimeError(
                f"a parameter of shape {shape} got a second gradient in one backward pass; if the model is checkpointed, use "
                "use_reentrant=False"
            )
        self._fill(position)
        self._arrived.add(position)
        self._missing[self.slots[position][0].index] -= 1
        self._start_complete()

    def check_idle(self) -> None:
        """Raises if the last backward pass ended in an exception while exchanges were under way.

        Raises:
            RuntimeError: other ranks may be waiting for this one, and their next collective would meet another of ours.
        """
        if self._running and self._tasks:
            raise RuntimeError(
                "the last backward pass was interrupted while gradients were exchanged; ranks no longer agree: restart "
                "from a checkpoint"
            )
        self._running = False

    def _begin(self) -> None:
        self._running = True
        self._arrived = set()
        self._present = set()
        self._missing = [len(group) for group in self.members]
        self._tasks = []
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _fill(self, position: int) -> None:
        gradient = self.parameters[position].grad
        if gradient is not None:
            if gradient.is_sparse:
                raise TypeError(
                    f"gradients must be dense, got a sparse one for a parameter of shape {tuple(gradient.shape)}; "
                    "make the embedding with sparse=False"
                )
            self._present.add(position)
        bucket, slot = self.slots[position]
        bucket.fill(slot, gradient)

    def _start_complete(self) -> None:
        while (index := len(self._tasks)) < len(self.buckets) and self._missing[index] == 0:
            if index == len(self.buckets) - 1:
                self._write_flags()
            self._tasks.append(self._thread.start(self.buckets[index], self.counters.steps))

    def _write_flags(self) -> None:
        flags = self.buckets[-1].exact
        if len(self._present) == len(self.parameters):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor([float(p in self._present) for p in range(len(self.parameters))]))

    def _end(self) -> None:
        """Runs when backward has ended; exceptions leave `backward()`."""
        try:
            for position in range(len(self.parameters)):
                if position not in self._arrived:
                    self._fill(position)
            self._missing = [0] * len(self.buckets)
            self._start_complete()
            self._wait()
            self._publish()
        finally:
            self._running = False
        self.counters.steps += 1

    def _wait(self) -> None:
        begin = time.perf_counter()
        for task in self._tasks:
            # The exchange itself is bounded by its communicator's timeout.
            task.done.wait()
            self.counters.exchange_seconds += task.seconds
        self.counters.wait_seconds += time.perf_counter() - begin
        for task in self._tasks:
            if task.error is not None:
                raise task.error
            if task.finished is not None:
                torch.cuda.current_stream(task.bucket.whole.device).wait_event(task.finished)

    def _publish(self) -> None:
        unused: set[int] = set()
        if len(self._present) < len(self.parameters):
            # Reading the flags waits for the device, so do it only where a flag can be 0.
            unused = {position for position, flag in enumerate(self.buckets[-1].exact.tolist()) if flag == 0}
        for position, parameter in enumerate(self.parameters):
            if position not in unused:
                bucket, slot = self.slots[position]
                parameter.grad = bucket.views[slot]


def _hook(engine: weakref.ref[Engine], position: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.gradient_ready(position)

    return hook
