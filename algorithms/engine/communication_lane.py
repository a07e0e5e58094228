"""Threads that exchange buckets beside training."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from bagua_kernels.algorithms.engine.interruption import Interruption
from bagua_kernels.algorithms.engine.rows import Rows
from bagua_kernels.bucket import Bucket
from bagua_kernels.errors import follow_up

Exchange = Callable[[Bucket | Rows, int], Callable[[], None] | None]
Agree = Callable[[Bucket | Rows], int]
_T = TypeVar("_T")
# A slot of a bucket, the gradient that belongs there, and the parameter if its `grad` is to be the slot's view from then on.
Taken = tuple[int, torch.Tensor | None, torch.nn.Parameter | None]


@dataclass
class Task:
    """One exchange of one bucket, handed to a lane.

    Attributes:
        bucket: what to exchange.
        step: number of the backward pass it belongs to.
        done: set when the exchange has ended, well or not.
        error: what went wrong.
        began: when the exchange began, as `time.perf_counter` tells.
        ended: when it ended.
        ready: on a GPU, recorded when the gradients are in the bucket.
        finished: on a GPU, recorded when the averages are.
        label: what profilers call it.
        before: to be done on its thread before the exchange.
        follows: True if `error` only tells that an exchange before this one failed.
    """

    bucket: Bucket | Rows
    step: int
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    began: float = 0.0
    ended: float = 0.0
    ready: torch.cuda.Event | None = None
    finished: torch.cuda.Event | None = None
    label: str = "bagua_kernels exchange"
    before: Callable[[], None] | None = None
    follows: bool = False

    def check(self) -> None:
        """To be called when it is done: raises what went wrong, and has the current stream wait for the averages."""
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            torch.cuda.current_stream(self.bucket.whole.device).wait_event(self.finished)


@dataclass
class _Queue:
    """What a lane's threads share.

    Attributes:
        tasks: that no thread has taken note of; None tells all threads to end.
        waiting: that one has.
        turn: held by the thread that takes a task and starts its exchange.
        failure: of the first thing that went wrong, kind, ranks and text: after it the ranks no longer agree on what comes
            next.
    """

    tasks: queue.SimpleQueue[Task | None] = field(default_factory=queue.SimpleQueue)
    waiting: list[Task] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    failure: RuntimeError | None = None


class CommunicationLane:
    """Starts exchanges one after the other beside the training thread: in the order they are given, or the last first.

    One lane and one order for each communicator mean that all ranks start its collectives in the same order, without which
    collectives of different buckets would meet. The next is started when an exchange has ended, or where it says what waits
    for its end, at once: the wire is busy while one thread waits and another copies gradients. All ranks give the same tasks
    in the same order, but not at the same time: so the last that one of them has may not be there yet on another, and which
    is to be next is the lowest of what they say. It is there on all ranks, for what is done is the same on all.
    """

    def __init__(
        self, exchange: Exchange, device: torch.device, name: str, agree: Agree | None = None, depth: int = 1
    ) -> None:
        """Starts the threads, which end with this object.

        Args:
            exchange: what to do with each bucket: a method, of whose object the threads keep no reference. It may return
                what waits for its end, so that the next one is started meanwhile.
            device: of the buckets.
            name: of the algorithm, for profilers.
            agree: the lowest of the indices of the buckets that ranks give, a method too. If given, the last bucket is the
                first to be exchanged.
            depth: number of threads, and so of exchanges that are under way at a time.
        """
        self._name = name
        self._queue = _Queue()
        # A reference from a thread to the algorithm, or to `self`, would keep all of them alive for ever.
        arguments = (self._queue, weakref.WeakMethod(exchange), agree and weakref.WeakMethod(agree), device)
        threads = [
            threading.Thread(target=_work, args=arguments, name="bagua_kernels communication", daemon=True)
            for _ in range(depth)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _end_threads, self._queue, threads)

    def start(self, bucket: Bucket | Rows, step: int, before: Callable[[], None] | None = None) -> Task:
        """Queues an exchange of a bucket whose gradients are in place, on the current stream, once `before` is done."""
        task = Task(bucket, step, label=f"bagua_kernels {self._name}, bucket {bucket.index}", before=before)
        if bucket.whole.is_cuda:
            task.ready = torch.cuda.Event()
            task.ready.record(torch.cuda.current_stream(bucket.whole.device))
        self._queue.tasks.put(task)
        return task


def _end_threads(shared: _Queue, threads: list[threading.Thread]) -> None:
    """Ends threads and waits for them: a thread that outlives the interpreter ends the process with an abort."""
    shared.tasks.put(None)
    # Where the last reference goes on one of them, the others may wait for its turn.
    if threading.current_thread() not in threads:
        # An exchange that hangs is released by its communicator, at the latest when that is shut down.
        limit = time.monotonic() + 10.0
        for thread in threads:
            thread.join(timeout=max(0.0, limit - time.monotonic()))


def _work(
    shared: _Queue,
    exchange: weakref.WeakMethod[Exchange],
    agree: weakref.WeakMethod[Agree] | None,
    device: torch.device,
) -> None:
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    while True:
        with contextlib.ExitStack() as turn:
            turn.enter_context(shared.turn)
            if not _collect(shared):
                return
            task = shared.waiting.pop(0 if agree is None else -1)
            task.began = time.perf_counter()
            try:
                if shared.failure is not None:
                    task.follows = True
                    raise follow_up(shared.failure, f"an exchange before this one failed: {shared.failure}")
                if agree is not None:
                    task = _agreed(task, shared.waiting, _alive(agree())(task.bucket))
                _run(task, _alive(exchange()), stream, started=turn.close)
            except BaseException as error:
                # The error itself is not kept: its traceback holds the algorithm.
                task.error, shared.failure = error, shared.failure or follow_up(error, f"{error!r}")
            finally:
                task.ended = time.perf_counter()
                task.done.set()
        # Waiting for the next task must not keep this one's tensors alive.
        del task


def _collect(shared: _Queue) -> bool:
    """Takes note of all tasks that are there, at least one; returns whether any waits, or else the thread is to end."""
    while not shared.waiting or not shared.tasks.empty():
        task = shared.tasks.get()
        if task is None:
            shared.tasks.put(None)
            break
        shared.waiting.append(task)
    return bool(shared.waiting)


def _agreed(own: Task, waiting: list[Task], index: int) -> Task:
    """The task that all ranks take next; if that is not this rank's own choice, that one waits again."""
    if own.bucket.index == index:
        return own
    (task,) = (task for task in waiting if task.bucket.index == index)
    waiting.remove(task)
    waiting.append(own)
    task.began = own.began
    return task


def _alive(found: _T | None) -> _T:
    if found is None:
        raise RuntimeError(
            "the algorithm was deleted while its gradients were exchanged; keep it until backward has ended"
        )
    return found


def _run(task: Task, exchange: Exchange, stream: torch.cuda.Stream | None, started: Callable[[], None]) -> None:
    if stream is None or task.ready is None:
        with torch.profiler.record_function(task.label):
            if task.before is not None:
                task.before()
            finish = exchange(task.bucket, task.step)
            started()
            if finish is not None:
                finish()
        return
    with torch.cuda.stream(stream), torch.profiler.record_function(task.label), torch.cuda.nvtx.range(task.label):
        stream.wait_event(task.ready)
        finish = exchange(task.bucket, task.step)
        if finish is not None:
            finish()  # has the stream wait
        task.finished = torch.cuda.Event()
        task.finished.record(stream)


def load(
    bucket: Bucket,
    gradients: list[Taken],
    weight: float,
    lend: bool = False,
    adopt: bool = False,
    interruption: Interruption | None = None,
) -> None:
    """Brings gradients to their slots of a bucket, multiplied by a weight.

    Args:
        bucket: where to.
        gradients: for each slot its own; None stands for zeros. It is emptied, so that backward can use the memory of what was
            copied again; what is lent stays until it is exchanged, what is adopted until the next is.
        weight: by which they are multiplied.
        lend: whether those that are to be compressed, and not multiplied, are lent where they can be.
        adopt: whether a gradient's memory becomes the bucket's where it can.
        interruption: by which gradients are dropped, if some are set after it happened.
    """
    while gradients:
        slot, gradient, parameter = gradients.pop()
        if adopt and gradient is not None:
            bucket.adopt(gradient)
        if parameter is not None:
            parameter.grad = bucket.views[slot]
        lendable = lend and weight == 1.0 and bucket.compressed(slot)
        if lendable and gradient is not None and bucket.lend(slot, gradient):
            continue
        bucket.fill(slot, gradient)
        if weight != 1.0:
            bucket.views[slot].mul_(weight)
    # Not before gradients were set: another thread may drop them meanwhile.
    if interruption is not None and interruption.happened:
        interruption.drop()


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what spans cover together."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
