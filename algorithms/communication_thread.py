"""A thread that exchanges buckets beside training."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from bagua_kernels.algorithms.rows import Rows
from bagua_kernels.bucket import Bucket

Exchange = Callable[[Bucket | Rows, int], None]
Agree = Callable[[Bucket | Rows], int]
_T = TypeVar("_T")
# A slot of a bucket, the gradient that belongs there, and the parameter if its `grad` is to be the slot's view from then on.
Taken = tuple[int, torch.Tensor | None, torch.nn.Parameter | None]


@dataclass
class Task:
    """One exchange of one bucket, handed to a communication thread.

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
        before: to be done on the thread before the exchange.
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

    def check(self) -> None:
        """To be called when it is done: raises what went wrong, and has the current stream wait for the averages."""
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            torch.cuda.current_stream(self.bucket.whole.device).wait_event(self.finished)


class CommunicationThread:
    """Runs exchanges one after the other beside the training thread: in the order they are given, or the last first.

    One thread and one order for each communicator mean that all ranks start its collectives in the same order, without which
    collectives of different buckets would meet. All ranks give the same tasks in the same order, but not at the same time: so
    the last that one of them has may not be there yet on another, and which is to be next is the lowest of what they say. It
    is there on all ranks, for what is done is the same on all.
    """

    def __init__(self, exchange: Exchange, device: torch.device, name: str, agree: Agree | None = None) -> None:
        """Starts the thread, which ends with this object.

        Args:
            exchange: what to do with each bucket: a method, of whose object the thread keeps no reference.
            device: of the buckets.
            name: of the algorithm, for profilers.
            agree: the lowest of the indices of the buckets that ranks give, a method too. If given, the last bucket is the
                first to be exchanged.
        """
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # A reference from the thread to the algorithm, or to `self`, would keep all of them alive for ever.
        thread = threading.Thread(
            target=_work,
            args=(self._tasks, weakref.WeakMethod(exchange), agree and weakref.WeakMethod(agree), device),
            name="bagua_kernels communication",
            daemon=True,
        )
        thread.start()
        self.close = weakref.finalize(self, _end_thread, self._tasks, thread)

    def start(self, bucket: Bucket | Rows, step: int, before: Callable[[], None] | None = None) -> Task:
        """Queues an exchange of a bucket whose gradients are in place, on the current stream, once `before` is done."""
        task = Task(bucket, step, label=f"bagua_kernels {self._name}, bucket {bucket.index}", before=before)
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


def _work(
    tasks: queue.SimpleQueue[Task | None],
    exchange: weakref.WeakMethod[Exchange],
    agree: weakref.WeakMethod[Agree] | None,
    device: torch.device,
) -> None:
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    failure = ""
    waiting: list[Task] = []
    while _collect(tasks, waiting):
        task = waiting[0] if agree is None else waiting[-1]
        task.began = time.perf_counter()
        try:
            # After one failure the ranks no longer agree on what comes next.
            if failure:
                raise RuntimeError(f"an exchange before this one failed: {failure}")
            if agree is not None:
                task = _agreed(waiting, _alive(agree())(task.bucket), task.began)
            _run(task, _alive(exchange()), stream)
        except BaseException as error:
            # Only its text is kept: its traceback holds the algorithm.
            task.error, failure = error, failure or f"{error!r}"
        finally:
            task.ended = time.perf_counter()
            waiting.remove(task)
            task.done.set()
        # Waiting for the next task must not keep this one's tensors alive.
        del task


def _collect(tasks: queue.SimpleQueue[Task | None], waiting: list[Task]) -> bool:
    """Takes all tasks that are there, at least one if none is waiting; returns whether any is, or else the thread is to end."""
    while not waiting or not tasks.empty():
        task = tasks.get()
        if task is None:
            tasks.put(None)
            break
        waiting.append(task)
    return bool(waiting)


def _agreed(waiting: list[Task], index: int, began: float) -> Task:
    """The task that all ranks take next."""
    (task,) = (task for task in waiting if task.bucket.index == index)
    task.began = began
    return task


def _alive(found: _T | None) -> _T:
    if found is None:
        raise RuntimeError(
            "the algorithm was deleted while its gradients were exchanged; keep it until backward has ended"
        )
    return found


def _run(task: Task, exchange: Exchange, stream: torch.cuda.Stream | None) -> None:
    if stream is None or task.ready is None:
        with torch.profiler.record_function(task.label):
            if task.before is not None:
                task.before()
            exchange(task.bucket, task.step)
        return
    with torch.cuda.stream(stream), torch.profiler.record_function(task.label), torch.cuda.nvtx.range(task.label):
        stream.wait_event(task.ready)
        exchange(task.bucket, task.step)
        task.finished = torch.cuda.Event()
        task.finished.record(stream)


def load(bucket: Bucket, gradients: list[Taken], weight: float, lend: bool = False, adopt: bool = False) -> None:
    """Brings gradients to their slots of a bucket, multiplied by a weight.

    Args:
        bucket: where to.
        gradients: for each slot its own; None stands for zeros. It is emptied, so that backward can use the memory of what was
            copied again; what is lent stays until it is exchanged, what is adopted until the next is.
        weight: by which they are multiplied.
        lend: whether those that are to be compressed, and not multiplied, are lent where they can be.
        adopt: whether a gradient's memory becomes the bucket's where it can.
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


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what spans cover together."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
