"""The thread that moves bytes between this rank's operations and its sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from bagua_kernels.comm.backends.sockets.channel import FRAME, Channel
from bagua_kernels.comm.backends.sockets.context import Context
from bagua_kernels.comm.backends.sockets.inbox import Inbox, different
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfer
from bagua_kernels.comm.failures.forked import FORKED, forget_after_fork

_TURN = 4 << 20  # bytes that one socket may deliver before the others get their turn
# Bytes of a message that are to be there before the thread is woken, unless less is missing: on a slow link each segment
# would wake it, and each time it would take the interpreter from a computing thread.
_GATHER = 1 << 17


class Loop:
    """Moves the messages of operations; everything but `submit` and `stop` happens on its thread.

    A brief operation takes its first steps on the thread that submits it, if the loop has nothing else in hand: waking
    a thread takes about as long as a small message.

    Several communicators may share the sockets, each with a `Context`, whose number goes with each frame. None of them can keep
    another one waiting for ever:

    - Who sends: contexts take turns, frame by frame (`Channel`). A message of any size delays those of others by one frame, and
      by what the kernel has already taken.
    - Who receives: the thread reads whatever the receivers of single contexts do. What has not been asked for is kept, without a
      limit where something of that rank is awaited (`Inbox`). So the bytes in front of an awaited message always move on.
    - Operations: each has its own lanes, and a lane that waits holds nothing that a lane of another operation needs.

    A rank that leaves a context, since it closes or aborts its communicator, sends a farewell on each socket. What other
    ranks wait for from it in this context fails when the farewell has come through all of them, behind the messages before it.
    The sockets close with the last context. A connection that breaks ends all operations with that rank, of all contexts.

    Args:
        name: of the thread.
        links: the connected sockets to each other rank; the loop owns them from now on.
        sent: called with the bytes of every message that this rank sends outside of the contexts of `open`.
        beside: a further channel to each other rank, which messages of operations do not use.

    Attributes:
        heard: for each rank the time at which something last came from it.
    """

    _inbox_type: ClassVar[type[Inbox]] = Inbox
    _frame: ClassVar[int] = FRAME

    def __init__(
        self,
        name: str,
        links: Mapping[int, Sequence[socket.socket]],
        sent: Callable[[int], None],
        beside: Mapping[int, Channel] | None = None,
    ) -> None:
        self._links = {peer: [Channel(peer, sock, self._frame) for sock in socks] for peer, socks in links.items()}
        for peer, channel in (beside or {}).items():
            self._links[peer].append(channel)
        self._channels = {channel.fd: channel for channels in self._links.values() for channel in channels}
        self.heard = dict.fromkeys(links, time.monotonic())
        self._inbox = self._inbox_type(self._links, self._done, self._fail, self._compare, self._departs)
        self._plain = self._inbox.contexts[0] = Context(0, range(max(links, default=0) + 1), sent)
        self._opened = 0  # contexts in use beside that one
        # By context and rank: farewells that have come, through how many sockets.
        self._farewells: dict[tuple[int, int], int] = {}
        self._departed: dict[tuple[int, int], str] = {}
        self._running: dict[Operation, set[Transfer]] = {}
        self._ready: deque[Lane] = deque()
        self._lost: dict[int, str] = {}
        # What other threads have asked for, in the order of their calls, and the operations in it.
        self._called: deque[Callable[[], None]] = deque()
        self._submitted: dict[Operation, None] = {}
        self._stopping = ""
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        # A signal handler may call `stop` while its own thread is in `submit`.
        self._lock = threading.RLock()
        # Held by a thread that reads or writes channels, transfers and lanes. It knows its owner, but is not taken twice.
        self._moving: Any = threading.RLock()
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        for channel in self._channels.values():
            channel.sock.setblocking(False)
            self._epoll.register(channel.fd, select.EPOLLIN)
        forget_after_fork(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def use(self, stripes: int, split: int) -> None:
        """See `Context.use`; for operations without a context."""
        self._plain.use(stripes, split)

    def open(self, number: int, members: Sequence[int], sent: Callable[[int], None]) -> Context:
        """Returns a context for a communicator of some of the ranks; sends nothing, from any thread.

        Args:
            number: see `Context`; no other context of this loop had it.
            members: see `Context`.
            sent: see `Context`.

        Raises:
            ConnectionAbortedError: if the loop has ended.
        """
        made = Context(number, members, sent)
        with self._lock:
            if self._stopping:
                raise ConnectionAbortedError(self._stopping)
            self._opened += 1
            self._inbox.contexts[number] = made
        self.call(partial(self._recall, made), "open")
        return made

    def leave(self, context: Context, reason: str, *, wait: bool = True) -> None:
        """Ends what is under way in a context, and sends a farewell to its other ranks; from any thread, more than once.

        Args:
            context: of `open`.
            reason: for operations here, and for the other ranks.
            wait: False to return before that is done. Else memory of operations is not used any more afterwards.
        """
        with self._lock:
            if self._inbox.contexts.pop(context.number, None) is None:
                return
            self._opened -= 1
            last, stopping = not self._opened, self._stopping
        if not stopping:
            done = threading.Event()
            self.call(partial(self._leave, context, reason, done), "leaving")
            if wait and threading.current_thread() is not self._thread and not self._moving._is_owned():
                # Not for ever, for the loop may end meanwhile, and then everything of it.
                while not done.wait(0.05) and self._thread.is_alive():
                    pass
        if last:
            self.stop(reason)

    def submit(self, operation: Operation) -> None:
        """Starts an operation; from any thread."""
        operation.context = operation.context or self._plain
        operation.missing = partial(self._missing, operation)
        if operation.brief and self._do_here(partial(self._start, operation), operation.name):
            return
        with self._lock:
            if not self._stopping:
                self._submitted[operation] = None
                self._called.append(partial(self._start, operation))
                self._nudge()
            if not self._stopping:
                return
        operation.end(ConnectionAbortedError(self._stopping))

    def call(self, function: Callable[[], None], name: str) -> None:
        """Runs a function on this thread if the loop is idle, else soon on the loop's; not at all once it is stopping.

        Functions run, and operations start, in the order of the calls. Functions must not block, or raise.

        Args:
            function: reads or writes channels, transfers and lanes.
            name: for the error if it is interrupted.
        """
        if self._do_here(function, name):
            return
        with self._lock:
            if not self._stopping:
                self._called.append(function)
                self._nudge()

    def stop(self, reason: str) -> None:
        """Ends what is under way, closes the sockets and ends the thread; from any thread, more than once."""
        with self._lock:
            if not self._stopping:
                self._stopping = reason
                self._nudge()
        # A signal handler may interrupt `_do_here`, for whose end the thread waits.
        if threading.current_thread() is not self._thread and not self._moving._is_owned():
            self._thread.join(5.0)

    def forget(self) -> None:
        """Closes the copies of everything that a forked child has; the parent's connections stay."""
        # Threads that no longer exist may have held the locks.
        self._lock, self._moving = threading.RLock(), threading.RLock()
        if self._woken < 0:
            return
        self._stopping = self._stopping or FORKED
        # Not unregistered before: the parent's epoll is the same one.
        self._epoll.close()
        for channels in self._links.values():
            for channel in channels:
                channel.sock.close()
        os.close(self._wake)
        os.close(self._woken)
        self._woken = -1

    def send(self, lane: Lane, peer: int, tag: int, data: memoryview) -> Transfer:
        """See `Lane.send`."""
        operation, context, total = lane.operation, self._context_of(lane.operation), len(data)
        peer = context.members[peer]
        if (error := self._gone(context, peer)) is not None:
            raise error
        channels = self._links[peer][: context.stripes]
        if total < context.split or len(channels) == 1:
            channels = [min(channels, key=lambda channel: channel.queued)]
        # Parts begin at multiples of a page, so that no element is cut.
        step = max(1, -(-total // (len(channels) * 4096)) * 4096)
        starts = range(0, max(1, total), step)
        transfer = Transfer(lane, peer, data, len(starts))
        self._running[operation].add(transfer)
        context.sent(total)
        for offset, channel in zip(starts, channels, strict=False):
            channel.append(operation.number, lane.code, tag, offset, data[offset : offset + step], total, transfer)
            if not channel.writing:
                self._guarded(channel, self._write)
        return transfer

    def receive(self, lane: Lane, peer: int, tag: int, data: memoryview | int) -> Transfer:
        """See `Lane.receive`, and `Lane.receive_anywhere` if a number of bytes is given."""
        operation, context = lane.operation, self._context_of(lane.operation)
        peer = context.members[peer]
        to, total = (None, data) if isinstance(data, int) else (data, len(data))
        transfer = Transfer(lane, peer, to, total)
        self._running[operation].add(transfer)
        self._inbox.ask((peer, operation.number, tag), transfer, self._gone(context, peer))
        self._unpark(peer)
        return transfer

    def _missing(self, operation: Operation) -> list[int]:
        if self._moving._is_owned() or not self._moving.acquire(timeout=0.1):
            return []
        try:
            return sorted({transfer.rank for transfer in self._running.get(operation, ()) if not transfer.done})
        finally:
            self._moving.release()

    def moved(self) -> int:
        """Returns the bytes of messages that have left or arrived so far; from any thread."""
        return sum(channel.moved for channels in list(self._links.values()) for channel in channels)

    def free(self, own: torch.Tensor) -> None:
        """See `Lane.free`."""
        self._inbox.scratch.give(own)

    def _context_of(self, operation: Operation) -> Context:
        return operation.context or self._plain

    def _gone(self, context: Context, peer: int) -> BaseException | None:
        """Returns the error of a rank of which nothing comes any more in a context; None if something may."""
        if peer in self._lost:
            return context.broken(peer, self._lost[peer])
        return context.left(peer) if peer in context.departed else None

    def _departs(self, peer: int, number: int, reason: str) -> None:
        """Takes a farewell from one of the sockets of a rank; of a context that this rank may not have yet, or any more."""
        if number in self._inbox.closed:
            return
        count = self._farewells[number, peer] = self._farewells.get((number, peer), 0) + 1
        if count == len(self._links[peer]):
            del self._farewells[number, peer]
            self._departed[number, peer] = reason
            # Not from here, in the middle of what has arrived.
            self._called.append(partial(self._notice, number))
            self._nudge()

    def _notice(self, number: int) -> None:
        context = self._inbox.contexts.get(number)
        if context is not None:
            self._recall(context)

    def _recall(self, context: Context) -> None:
        """Takes the farewells that have come of a context, and ends the operations that they concern."""
        for number, peer in [key for key in self._departed if key[0] == context.number]:
            context.departed[peer] = self._departed.pop((number, peer))
            for operation, transfers in list(self._running.items()):
                if operation.context is context and any(transfer.peer == peer for transfer in transfers):
                    self._fail(operation, context.left(peer))

    def _leave(self, context: Context, reason: str, done: threading.Event) -> None:
        try:
            for operation in [each for each in (*self._running, *self._submitted) if each.context is context]:
                self._inbox.withdraw(self._running.pop(operation, set()))
                operation.end(ConnectionAbortedError(reason))
            for key in [
                key for table in (self._farewells, self._departed) for key in table if key[0] == context.number
            ]:
                self._farewells.pop(key, None)
                self._departed.pop(key, None)
            said = reason.encode()
            for channel in [channel for peer in context.members for channel in self._links.get(peer, ())]:
                channel.forsake(context.number)
                if channel.fd in self._channels:
                    channel.leave(context.number, said)
            self._inbox.leave(context.number)
            for channel in list(self._channels.values()):
                if channel.out and not channel.writing:
                    self._guarded(channel, self._write)
                if channel.parked is not None and channel.parked[1] >> 64 == context.number:
                    self._guarded(channel, self._resume)
        finally:
            done.set()

    def _do_here(self, function: Callable[[], None], name: str) -> bool:
        """Does on this thread what is the loop's; returns True if it did, which it must not while something else waits."""
        if self._moving._is_owned():  # in a signal handler
            return False
        try:
            if not self._moving.acquire(blocking=False) or self._stopping or self._called:
                return False
            with torch.inference_mode():
                function()
                self._advance()
        except BaseException as error:
            # For example raised by a signal's handler before sent bytes were counted: the stream of bytes cannot be
            # continued.
            with self._lock:
                self._stopping = self._stopping or f"{name} was interrupted: {error!r}"
                self._nudge()
            raise
        finally:
            if self._moving._is_owned():
                self._moving.release()
        return True

    @torch.inference_mode()  # without it, tensors that were made in that mode could not be written
    def _run(self) -> None:
        try:
            while not self._stopping:
                events = self._epoll.poll()
                with self._moving:
                    self._move(events)
        except BaseException as error:  # whatever it is, those who wait have to hear of it
            self._stopping = self._stopping or f"its thread has ended: {error!r}"
        finally:
            self._end()

    def _move(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                continue
            channel = self._channels.get(fd)
            if channel is not None and channel.parked is not None:
                # Since `poll` returned, another thread may have parked it: that there is something to read is no error.
                if event & (select.EPOLLHUP | select.EPOLLERR):
                    self._lose(channel, ConnectionResetError("it broke while nothing was asked of it"))
            elif channel is not None and event & ~select.EPOLLOUT:
                self._guarded(channel, self._read)
            if fd in self._channels and event & select.EPOLLOUT:
                self._guarded(self._channels[fd], self._write)
            self._advance()
        while self._called:
            self._called.popleft()()
            self._advance()

    def _end(self) -> None:
        with self._lock:
            self._stopping = self._stopping or "its thread has ended"
        # Not for ever, for an exception may have come between taking and giving it back.
        owned = self._moving.acquire(timeout=5.0)
        self._drop(ConnectionAbortedError(self._stopping))
        if owned:
            self._moving.release()
        with self._lock:
            os.close(self._wake)
            os.close(self._woken)
            self._woken = -1

    def _drop(self, error: BaseException) -> None:
        for operation in [*self._running, *self._submitted]:
            operation.end(error)
        for channel in self._channels.values():
            channel.sock.close()
        kept = self._running, self._channels, self._links, self._ready, self._submitted, self._called, self._inbox
        for each in kept:
            each.clear()
        self._epoll.close()

    def _nudge(self) -> None:
        if self._woken >= 0:
            # A full pipe wakes it too.
            with contextlib.suppress(BlockingIOError):
                os.write(self._woken, b"x")

    def _start(self, operation: Operation) -> None:
        self._submitted.pop(operation, None)
        if self._stopping:
            operation.end(ConnectionAbortedError(self._stopping))
            return
        if operation.is_completed() or self._context_of(operation).number in self._inbox.closed:
            operation.end(ConnectionAbortedError("its communicator was left"))
            return
        self._running[operation] = set()
        for peer, code in self._inbox.calls(operation.number):
            self._compare(peer, operation.number, code)
        self._refill(operation)

    def _refill(self, operation: Operation) -> None:
        while operation.active < operation.window:
            steps = next(operation.lanes, None)
            if steps is None:
                break
            lane = Lane(operation, operation.started, self)
            operation.started += 1
            operation.active += 1
            lane.steps = steps(lane)
            self._ready.append(lane)
        if not operation.active and operation in self._running:
            del self._running[operation]
            operation.end()

    def _advance(self) -> None:
        while self._ready:
            lane = self._ready.popleft()
            operation = lane.operation
            if operation not in self._running:
                continue
            try:
                if not lane.advance():
                    continue
            except Exception as error:  # whatever a step may raise: the waiting thread gets it
                if any(channel.torn for channel in self._channels.values()):
                    raise
                self._fail(operation, error)
                continue
            operation.active -= 1
            self._refill(operation)

    def _done(self, transfer: Transfer) -> None:
        transfer.done = True
        lane = transfer.lane
        transfers = self._running.get(lane.operation)
        if transfers is None:
            return
        transfers.discard(transfer)
        if transfer.awaited:
            lane.pending -= 1
            if not lane.pending:
                self._ready.append(lane)

    def _guarded(self, channel: Channel, move: Callable[[Channel], None]) -> None:
        try:
            move(channel)
        except OSError as error:
            self._lose(channel, error)

    def _lose(self, channel: Channel, error: BaseException) -> None:
        """Gives a rank up: without one of its sockets nothing that it takes part in can finish."""
        peer = channel.peer
        self._lost.setdefault(peer, str(error))
        for other in self._links[peer]:
            if other.fd in self._channels:
                del self._channels[other.fd]
                self._epoll.unregister(other.fd)
                other.sock.close()
        for operation, transfers in list(self._running.items()):
            if any(transfer.peer == peer for transfer in transfers):
                self._fail(operation, self._context_of(operation).broken(peer, self._lost[peer]))

    def _fail(self, operation: Operation, error: BaseException) -> None:
        self._inbox.withdraw(self._running.pop(operation, set()))
        operation.end(error)

    def _write(self, channel: Channel) -> None:
        left = channel.flush(self._done)
        if left != channel.writing:
            channel.writing = left
            self._register(channel)

    def _register(self, channel: Channel) -> None:
        events = (0 if channel.parked else select.EPOLLIN) | (select.EPOLLOUT if channel.writing else 0)
        self._epoll.modify(channel.fd, events)

    def _read(self, channel: Channel) -> None:
        """Takes what has arrived."""
        self.heard[channel.peer] = time.monotonic()
        channel.read(self._inbox, _TURN)
        if channel.parked is not None:
            self._register(channel)
        channel.expect(min(len(channel.rest), _GATHER))

    def _compare(self, peer: int, number: int, code: int) -> None:
        """Ends an operation of this number that is another one than a rank's: its messages may never be asked for."""
        for operation in list(self._running):
            if operation.number == number and operation.code != code:
                rank = self._context_of(operation).rank_of(peer)
                self._fail(operation, different(rank, code, operation.code))

    def _unpark(self, peer: int) -> None:
        for channel in self._links[peer]:
            if channel.parked is not None and channel.fd in self._channels:
                self._guarded(channel, self._resume)

    def _resume(self, channel: Channel) -> None:
        channel.parked = None
        self._register(channel)
        if channel.parse(self._inbox):
            self._register(channel)
