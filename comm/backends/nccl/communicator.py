"""A communicator over NCCL, called through CuPy, on a stream of its own."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from bagua_kernels import knobs
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint, Runtime
from bagua_kernels.comm.backends.nccl.collectives import NcclCollectives
from bagua_kernels.comm.backends.nccl.queue import OperationQueue
from bagua_kernels.comm.communicator import checked_timeout
from bagua_kernels.comm.failures import liveness_store
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.opening import connect as connect_ranks
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining.introduction import Introduction, job_secret
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import BackendUnavailableError

_PATIENCE = 10.0  # seconds for NCCL to free a communicator
_LONGEST_GOODBYE = 30.0  # seconds that a process which exits waits for the others

_SHARE = 0.9  # of the timeout, in which ranks find one another
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

    _owned_liveness: Liveness | None

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
            self._assemble(session, exchange.name, _get_default_store(), device, runtime, exchange.secret)
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
        self._assemble(
            session, key, store, device, runtime or nccl_binding.load(), job_secret(store, timeout).derive("over", key)
        )
        return self

    def _assemble(
        self, session: Session, key: str, store: Store, device: torch.device, runtime: Runtime, secret: Secret
    ) -> None:
        self._assign(session.rank, len(session.members), device, session.timeout, secret)
        self.session = session
        self._key = key
        self._store = store
        self._secret = secret
        self._runtime = runtime
        self._owned_liveness = None
        self._order = next(_order)
        self._family: object = session.liveness or self
        if self.size > 1:
            self._queue = OperationQueue(session, runtime, self._connect(), device)
            self._token = torch.zeros(1, dtype=torch.uint8, device=device)
        session.abandon = self._abandon
        _made[self._order] = self
        # What is registered last runs first: before the heartbeats, the store and whatever else it needs are gone.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def _connect(self) -> Endpoint:
        store, runtime = PrefixStore(f"bagua_kernels/{self._key}", self._store), self._runtime
        # Shorter than the limit of all, so that the ranks that did not come are named.
        limit = _SHARE * self.timeout
        unique_id = connect_ranks(
            self.session,
            lambda _: nccl_binding.share_unique_id(store, self.rank, self.size, limit, runtime.unique_id),
        )
        made: list[Any] = []

        def connect() -> Endpoint:
            call = lambda: made.append(runtime.connect(self.size, unique_id, self.rank))  # noqa: E731
            if not runtime.bounded(call, self.device, self.timeout):
                raise RuntimeError(f"NCCL timed out: it did not connect the ranks within {self.timeout:g} s")
            return Endpoint(runtime, made[0], runtime.open_stream(self.device))

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
        if self._owned_liveness is not None:
            self._owned_liveness.stop(reason)

    def _abandon(self) -> None:
        try:
            if self.size > 1 and not self._runtime.bounded(self._queue.abort, self.device, _PATIENCE):
                _log.warning("NCCL did not abort communicator %r within %g s", self.session.name, _PATIENCE)
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
        session = self.session.child(label, ranks)
        child = NcclCommunicator.__new__(NcclCommunicator)
        secret = self._secret.derive("split", label)
        child._assemble(session, f"{self._key}/{label}", self._store, self.device, self._runtime, secret)
        child._family = self._family
        return child


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
