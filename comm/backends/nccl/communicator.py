"""A communicator over NCCL, called through CuPy, on a stream of its own."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from bagua_kernels import knobs
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.backends.nccl.collectives import NcclCollectives
from bagua_kernels.comm.backends.nccl.queue import OperationQueue
from bagua_kernels.comm.backends.nccl.unique_ids import LetterIds, StoreIds, UniqueIds
from bagua_kernels.comm.communicator import Communicator, checked_timeout
from bagua_kernels.comm.failures import liveness_store
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.opening import connect as connect_ranks
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining.bounded import bounded
from bagua_kernels.comm.joining.introduction import Introduction, job_secret
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import BackendUnavailableError, CommunicationError

_PATIENCE = 10.0  # seconds for NCCL to free a communicator
_LONGEST_GOODBYE = 30.0  # seconds that a process which exits waits for the others

_SHARE = 0.9  # of the timeout, in which ranks find one another
_PAUSES = (5e-5, 1e-3)  # seconds between two looks at a stream for which the host waits: the first, and the longest
_log = logging.getLogger(__name__)


class NcclCommunicator(NcclCollectives):
    """The ranks of a torch process group, one GPU each, over NCCL without torch's process group in between.

    Operations run on a CUDA stream of high priority that belongs to this communicator. An operation waits there for the
    work that the current stream had at the call. `Work.wait` makes the current stream wait for the operation. The host
    waits for neither. Tensors are not copied, except in some reductions. A thread watches the
    operations: when an operation takes longer than the timeout, or NCCL or another rank reports a failure, it aborts
    NCCL's communicator. The GPU then continues with undefined outputs, and later calls raise the error.

    All ranks must issue their operations in one order. `send` and `recv` start when one of them is waited for or another
    operation is called. Those of one tag start as one group, so that ranks which all send first do not block each other.
    Within a tag, what one rank sends to another is received in order; the ranks concerned must wait for several tags in the
    same order.

    Operations can be captured in a CUDA graph, including `wait`, which must come before the capture ends. Call them once
    before, because NCCL connects ranks at their first message. Operations called before the capture must be waited for
    before it. Replays are not watched. A communicator that is forgotten stays open until the process ends: close it.

    AVG divides half-precision floats before the sum and other floats after it; see `ReduceOp`. NCCL has no reductions of
    int16 and no bitwise ones, hence none of bool. Ranks that need the result receive the inputs and reduce them in rank
    order.

    `bytes_sent` counts the bytes of NCCL's ring algorithms, for n ranks and b bytes per rank. all_reduce: 2(n-1)/n b.
    all_gather: (n-1) b. reduce_scatter: (n-1)/n b of the input. all_to_all: the bytes for other ranks. reduce: (n-1)/n b,
    and b/n more except at the destination. gather: b except at the destination. scatter: (n-1)/n b at the source.
    broadcast: b except at the end of the chain. Of the reductions that NCCL lacks, all_reduce sends (n-1) b and reduce b
    except at the destination.

    Args:
        group: a torch process group of any backend, through which the ranks find one another; None for the default
            group. Making a communicator is collective over it.
        timeout: seconds after which an operation that does not finish is aborted; by default `BAGUA_KERNELS_TIMEOUT`.
        watch: True if the ranks send heartbeats, so that an error names the rank at fault: a thread and a connection to rank 0.
        device: the GPU of this rank; by default the current one. NCCL wants a GPU for each rank.

    Raises:
        BackendUnavailableError: on every rank, if CuPy's NCCL is missing on one.
        CollectiveTimeoutError: if not all ranks arrive in time.
        ValueError: if torch.distributed is not initialised, or `device` is no GPU.
    """

    blocks = False
    _owned_liveness: Liveness | None
    _abort_seconds = _PATIENCE  # for which `abort` waits for NCCL

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        watch: bool = True,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("NcclCommunicator needs torch.distributed: call its init_process_group first")
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("NcclCommunicator expects a group of which this process is a member")
        if device is not None and device.type != "cuda":
            raise ValueError(f"NcclCommunicator expects a CUDA device, got {device=}: use TorchCommunicator on a CPU")
        timeout = knobs.TIMEOUT.get() if timeout is None else checked_timeout(timeout)
        deadline = time.monotonic() + timeout
        exchange = Introduction(group, job_secret(_get_default_store(), timeout), deadline)
        reasons = exchange(nccl_binding.unavailable())
        if told := "; ".join(f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason):
            raise BackendUnavailableError(f"NcclCommunicator needs a GPU and NCCL through CuPy on every rank: {told}")
        runtime = nccl_binding.load()
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        liveness = None
        if watch and size > 1:
            liveness = liveness_store.connect(rank, size, exchange, exchange.secret, timeout=min(20.0, timeout / 2))
        session = Session("world", timeout, rank, tuple(range(size)), liveness)
        try:
            self._assemble(session, StoreIds(_get_default_store(), exchange.name), device, runtime, exchange.secret)
        except BaseException as error:
            if liveness is not None:
                liveness.stop(f"it could not make its communicator: {error}")
            raise
        self._owned_liveness = liveness

    @classmethod
    def over(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        key: str,
        device: torch.device,
        timeout: float | None = None,
        liveness: Liveness | None = None,
        runtime: Runtime | None = None,
    ) -> NcclCommunicator:
        """Makes a communicator of ranks that share nothing but a store; every rank calls it.

        Args:
            store: where the ranks find one another.
            rank: this rank, of `size`.
            size: their number.
            key: a name that no other communicator over this store ever had.
            device: the GPU of this rank.
            timeout: as of the class.
            liveness: heartbeats that the caller keeps and stops; None for errors without names.
            runtime: the GPU's libraries; by default those of this process.
        """
        self = cls.__new__(cls)
        timeout = knobs.TIMEOUT.get() if timeout is None else float(timeout)
        session = Session("world", timeout, rank, tuple(range(size)), liveness)
        secret = job_secret(store, timeout).derive("over", key)
        self._assemble(session, StoreIds(store, key), device, runtime or nccl_binding.load(), secret)
        return self

    @classmethod
    def beside(
        cls,
        letters: Communicator,
        *,
        device: torch.device,
        runtime: Runtime | None = None,
        look: Callable[[], object] | None = None,
    ) -> NcclCommunicator:
        """Makes a communicator of the ranks of another one on their CPUs, without a store; every rank calls it.

        Ranks send no heartbeats. `abort` does not wait for NCCL; `await_idle` does.

        Args:
            letters: which the new communicator owns from now on, with its timeout.
            device: the GPU of this rank.
            runtime: the GPU's libraries; by default those of this process.
            look: called again and again while it waits for other ranks; what it raises ends the wait.

        Raises:
            BackendUnavailableError: on every rank, if CuPy's NCCL is missing on one.
            CommunicationError: or one of its kinds: a rank is lost or did not come in time, or NCCL failed.
        """
        self = cls.__new__(cls)
        problem = "" if runtime is not None else nccl_binding.unavailable()
        session = Session("world", letters.timeout, letters.rank, tuple(range(letters.size)), None)
        self._abort_seconds = 0.0
        try:
            if problem:
                # The others get the reason, too.
                LetterIds(letters, problem).share(letters.rank, letters.size, letters.timeout, bytes)
            secret = letters._sealed().secret.derive("nccl")
            self._assemble(session, LetterIds(letters), device, runtime or nccl_binding.load(), secret, look)
        except BaseException as error:
            letters.abort(f"it could not make a communicator over NCCL: {error}")
            raise
        return self

    def _assemble(
        self,
        session: Session,
        ids: UniqueIds,
        device: torch.device,
        runtime: Runtime,
        secret: Secret,
        look: Callable[[], object] | None = None,
        streams: list[Any] | None = None,
    ) -> None:
        """Connects the ranks.

        Args:
            session: of this communicator.
            ids: by which they connect.
            device: the GPU.
            runtime: its libraries.
            secret: which these ranks share.
            look: called again and again meanwhile; what it raises ends the wait.
            streams: of the communicators from which this one is split, to which its own is added.
        """
        self._assign(session.rank, len(session.members), device, session.timeout, secret)
        self.session = session
        self._ids = ids
        self._secret = secret
        self._runtime = runtime
        self._owned_liveness = None
        self._order = next(_order)
        self._family: object = session.liveness or self
        self._streams = [] if streams is None else streams
        if self.size > 1:
            self._queue = OperationQueue(session, runtime, self._connect(look), device)
            self._streams.append(self._queue.endpoint.stream)
            self._token = torch.zeros(1, dtype=torch.uint8, device=device)
        session.abandon = self._abandon
        _made[self._order] = self
        # What is registered last runs first: before the heartbeats, the store and whatever else it needs are gone.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def _connect(self, look: Callable[[], object] | None) -> Endpoint:
        runtime, limit = self._runtime, _SHARE * self.timeout
        # Shorter than the limit of all, so that the ranks that did not come are named.
        share = lambda _: self._ids.share(self.rank, self.size, limit, runtime.unique_id)  # noqa: E731
        unique_id = connect_ranks(self.session, share, look)

        def connect() -> Endpoint:
            def call(_: object) -> Any:
                runtime.cuda.set_device(self.device)
                return runtime.connect(self.size, unique_id, self.rank)

            try:
                # A rank that is lost within this call leaves it hanging on the others, without a handle to abort.
                native = bounded(call, self.timeout, look, lambda late: late.abort())
            except TimeoutError:
                raise RuntimeError(f"NCCL timed out: it did not connect the ranks within {self.timeout:g} s") from None
            return Endpoint(runtime, native, runtime.open_stream(self.device))

        return self.session.guard("init", connect)

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Communicator.abort`."""
        self.session.abort(reason)
        self._abandon()
        self._release(reason)

    def close(self, limit: float | None = None) -> None:
        """See `Communicator.close`; at the end of the process it runs by itself, unless an exception ended it."""
        if self.session.ended:
            self._release(self.session.ended)
            return
        self.session.hurry(limit)
        if self.size > 1:
            self.session.leaving = True
            self._barrier().wait_on_host()
        self.session.close()
        if self.size > 1 and not self._runtime.bounded(self._queue.endpoint.destroy, self.device, _PATIENCE):
            _log.warning("NCCL did not free communicator %r within %g s", self.session.name, _PATIENCE)
        self._release("it closed its communicator")

    def drain(self) -> None:
        """See `Communicator.drain`; the watch ends what takes longer than the timeout."""
        if self.size == 1 or self.session.ended:
            self._check_usable()
            return
        done = self._event(self._queue.endpoint.stream)
        pause, longest = _PAUSES
        while not (done.query() or self.session.ended):
            time.sleep(pause)
            pause = min(2 * pause, longest)
        self._check_usable()

    def await_idle(self, seconds: float) -> bool:
        """Waits until the GPU runs nothing any more of this communicator, and of all that were split from it.

        After `abort` their memory may be used again only then.

        Args:
            seconds: the longest wait.

        Returns:
            True if the GPU has come to the end of all of it.

        Raises:
            RuntimeError: the GPU has failed.
        """
        events, deadline = [self._event(stream) for stream in self._streams], time.monotonic() + seconds
        while not all(event.query() for event in events):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSES[1])
        return True

    def _event(self, stream: Any) -> Any:
        event = self._runtime.cuda.Event()
        event.record(stream)
        return event

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`."""
        self.timeout = self.session.timeout = checked_timeout(seconds)

    def close_relatives(self) -> None:
        """See `Communicator.close_relatives`."""
        for each in list(_made.values()):
            if each._family is self._family and not each.session.ended:
                each.session.close()
                each._abandon()
                each._release("its relatives were closed")

    def _release(self, reason: str) -> None:
        _made.pop(self._order, None)
        if self.size > 1:
            self._queue.watchdog.stop()
        self._ids.end(reason)
        if self._owned_liveness is not None:
            self._owned_liveness.stop(reason)

    def _abandon(self) -> None:
        try:
            limit = self._abort_seconds
            if self.size > 1 and not self._runtime.bounded(self._queue.abort, self.device, limit) and limit:
                _log.warning("NCCL did not abort communicator %r within %g s", self.session.name, limit)
        except RuntimeError as error:
            _log.warning("NCCL did not abort communicator %r: %s", self.session.name, error)

    def _check_usable(self) -> None:
        # A failure mostly shows only here, after its work was waited for: it keeps its kind and its ranks.
        if self.session.failed is not None:
            raise self.session.failure("this call", None, None, None, timed_out=False)
        super()._check_usable()

    def _unusable(self) -> str:
        return self.session.ended

    def _split(self, ranks: tuple[int, ...]) -> NcclCommunicator:
        # NCCL's own split must be called by all ranks of the parent with nothing under way; this one by its members.
        label = self._next_split(ranks)
        child = NcclCommunicator.__new__(NcclCommunicator)
        child._abort_seconds = self._abort_seconds
        ids = self._ids.split(label, ranks)
        try:
            child._assemble(
                self.session.child(label, ranks),
                ids,
                self.device,
                self._runtime,
                self._secret.derive("split", label),
                self._look,
                self._streams,
            )
        except BaseException as error:
            ids.end(f"it could not be made: {error}")
            raise
        child._family = self._family
        return child

    def _look(self) -> None:
        """Ends, once this communicator has ended, the wait for the ranks of one that is being split from it."""
        if self.session.ended and not self.is_closed():
            raise CommunicationError(f"split was given up: {self.session.ended}")


_order = itertools.count()
# Garbage is collected on one rank and not on another, and on any thread: open communicators stay, and can be closed in order.
_made: dict[int, NcclCommunicator] = {}


# A forked child has no connection to close.
os.register_at_fork(after_in_child=_made.clear)


def _close_all() -> None:
    """Closes what is still open, in the order in which it was made, the same on all ranks; aborts it after a failure."""
    error, deadline = getattr(sys, "last_value", None), time.monotonic() + _LONGEST_GOODBYE
    reason = "" if error is None else f"its process exited after {type(error).__name__}: {error}"
    for communicator in list(_made.values()):
        try:
            if reason and not communicator.session.ended:
                communicator.abort(reason)
            else:
                communicator.close(max(0.0, deadline - time.monotonic()))
        except RuntimeError as failure:
            _log.warning("the other ranks did not close communicator %r: %s", communicator.session.name, failure)
            reason = "its process exited"
            communicator.abort(reason)
