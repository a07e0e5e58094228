"""The connections beneath a `TorchCommunicator`: a Gloo or NCCL backend of its own, or the group of the user."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from bagua_kernels import knobs
from bagua_kernels.comm.backends.nccl.binding import await_ranks
from bagua_kernels.comm.backends.torch_distributed.gloo_end import free, keep, nearest
from bagua_kernels.comm.backends.torch_distributed.gloo_message import GlooMessages
from bagua_kernels.comm.failures.forked import Sockets, forget_after_fork
from bagua_kernels.comm.joining.bounded import PatientStore
from bagua_kernels.comm.reduction import BITWISE, ReduceOp

_PATIENCE = 10.0  # seconds for NCCL to free a backend
# Timeouts that Gloo gives a whole message. Who waits for it ends the wait earlier, when nothing has moved for one of them.
_SLOWEST = 100

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TorchGroup:
    """Connections among some ranks.

    Attributes:
        backend: torch's backend (or process group), whose methods start the operations.
        kind: "gloo", "nccl" or the name of another backend.
        store: where members of new groups find one another.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds.
        device: where tensors are.
        host: the address whose interface Gloo uses; empty for torch's choice.
        key: the name under which its members find one another, which no other group of the job ever had.
        sockets: those of Gloo.
        messages: sends and receives of Gloo under way; None for other backends.
    """

    backend: Any
    kind: str
    store: Store
    rank: int
    size: int
    timeout: float
    device: torch.device
    host: str
    key: str = ""
    sockets: Sockets = field(default_factory=Sockets)
    messages: GlooMessages | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Prepares for messages and forks."""
        self._rendezvous = self.store
        forget_after_fork(self)
        self._listen()

    def _listen(self) -> None:
        if self.kind == "gloo" and self.size > 1 and self.backend is not None:
            self.messages = GlooMessages(self.backend, nearest(self.rank, self.size))

    def child(self, key: str, ranks: tuple[int, ...]) -> TorchGroup:
        """Returns a group of some of the ranks, which `open` connects.

        torch's `new_group` does not work here. Either all processes of the job must call it, or the group's name contains
        this process's number of groups, which differs between members.

        Args:
            key: a name that no other group of the job ever had.
            ranks: the members, ascending; this rank is one.
        """
        if self.kind not in ("gloo", "nccl"):
            raise ValueError(f"a group over torch's backend {self.kind!r} cannot be split; use gloo or nccl")
        rank, size = ranks.index(self.rank), len(ranks)
        return TorchGroup(None, self.kind, self.store, rank, size, self.timeout, self.device, self.host, key)

    def open(self, given_up: threading.Event) -> TorchGroup:
        """Connects the ranks, unless it uses connections of others; returns itself.

        It may wait for ever, see `connect` in `bagua_kernels.comm.failures.opening`.

        Args:
            given_up: set when nobody waits any more.
        """
        if self.backend is not None or self.size == 1:
            return self
        # Kept, for Gloo may ask it later.
        self._rendezvous = self.store if self.kind == "nccl" else PatientStore(self.store, given_up)
        with self.sockets.gather():
            self.backend = _open(
                self.kind, self._rendezvous, self.key, self.rank, self.size, self.timeout, self.device, self.host
            )
        self._listen()
        return self

    def send(self, data: torch.Tensor, dst: int, tag: int) -> Any:
        """Starts to send bytes; returns torch's work, or what has its methods."""
        return self._message(self.backend.send([data], dst, tag), data, dst)

    def recv(self, data: torch.Tensor, src: int, tag: int) -> Any:
        """Starts to receive bytes; returns torch's work, or what has its methods."""
        return self._message(self.backend.recv([data], src, tag), data, src)

    def _message(self, handle: Any, data: torch.Tensor, peer: int) -> Any:
        return handle if self.messages is None else self.messages.start(handle, data, peer)

    def exchange(self, outputs: Mapping[int, torch.Tensor], inputs: Mapping[int, torch.Tensor], tag: int) -> Any:
        """Sends bytes to some ranks and receives some, as one operation of NCCL; returns torch's work.

        NCCL puts messages that are not grouped on one stream for each peer, one behind the other: two ranks that both
        receive first would wait for one another for ever.
        """
        backend = self.backend
        backend._start_coalescing()
        try:
            for peer, tensor in outputs.items():
                backend.recv([tensor], peer, tag)
            for peer, tensor in inputs.items():
                backend.send([tensor], peer, tag)
        finally:
            work = backend._end_coalescing()
        return work

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        """Returns True if the backend has this reduction."""
        if self.kind == "gloo":
            return dtype is not torch.int16
        return op not in BITWISE and dtype is not torch.int16

    def broadcast_copies(self, src: int) -> int:
        """Returns to how many ranks this rank passes on a broadcast."""
        position = (self.rank - src) % self.size
        if self.kind != "gloo":
            return int(position < self.size - 1)
        # Gloo's binomial tree: position p sends to p + 2^i for every 2^i below its lowest set bit.
        lowest = position & -position if position else 1 << (self.size - 1).bit_length()
        steps = (1 << i for i in range(lowest.bit_length() - 1))
        return sum(position + step < self.size for step in steps)

    def set_timeout(self, seconds: float) -> None:
        """Changes the time that operations may take from now on, and that new groups have to connect."""
        self.timeout = seconds
        # One rank has no connections of its own, and waits for nobody.
        if self.kind in ("gloo", "nccl") and self.size > 1 and not isinstance(self.backend, _GivenUp | None):
            patience = _SLOWEST if self.kind == "gloo" else 1
            self.backend._set_default_timeout(timedelta(seconds=patience * seconds))

    def close(self) -> None:
        """Frees the connections, once all ranks are done with them."""
        self._sever()
        if self._owns_nccl():
            self._shut_down()
        self.backend = self.messages = None

    def abandon(self) -> None:
        """Gives the connections up while operations may be under way, without waiting for those.

        Gloo's destructor waits for its operations, so they are ended first, and it runs on another thread.
        """
        if self.messages is not None:
            # No other name may hold the backend, or its destructor would run here.
            held: list[Any] = [self.store, self._rendezvous, self.messages, self.backend]
            self.messages, self.backend = None, _GivenUp()
            # Errors and graphs of autograd may keep this object, which would keep rank 0's server.
            self.store = self._rendezvous = HashStore()
            held[2].cut()
            free(held)
        elif self._owns_nccl():
            self.backend.abort()
            keep([self.backend])

    def forget(self) -> None:
        """Closes the sockets of a forked child, and keeps Gloo's destructor from waiting for threads that it lacks."""
        self.sockets.drop()
        if self.backend is not None:
            keep([self.backend])

    def _owns_nccl(self) -> bool:
        # One rank uses the group of the user.
        return self.kind == "nccl" and self.size > 1 and self.backend is not None

    def _shut_down(self) -> None:
        """Waits for NCCL's operations and frees the communicators; the destructor alone would abort the operations.

        A receive that no rank serves never ends, so the call has a thread and a limit.
        """
        backend, problems = self.backend, []

        def run() -> None:
            try:
                backend.shutdown()
            except RuntimeError as error:
                problems.append(f"{error}")

        thread = threading.Thread(target=run, name="bagua_kernels nccl shutdown", daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if thread.is_alive():
            problems.append(f"operations are still under way after {_PATIENCE:g} s")
        for problem in problems:
            _log.warning("NCCL did not shut down: %s", problem)

    def _sever(self) -> None:
        if self.messages is not None:
            self.messages.sever()


class _GivenUp:
    """Stands for a backend that is being freed; no operation can start."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the connections were given up after a failure")


@dataclass(frozen=True)
class Service:
    """What a process group offers to tensors of one device.

    Attributes:
        group: the user's group.
        kind: the name of the backend.
        device: where tensors will be.
    """

    group: dist.ProcessGroup
    kind: str
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device | None) -> Service:
        """Finds the backend that serves a device; by default the device that the group serves.

        Raises:
            ValueError: if the group serves no tensors on `device`.
        """
        served = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        if device is None:
            on_cuda = torch.cuda.is_available() and served.get("cuda", "gloo") != "gloo"
            device = torch.device("cuda" if on_cuda else "cpu")
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        kind = served.get(device.type)
        if kind is None or (kind == "gloo" and device.type != "cpu"):
            raise ValueError(
                f"expected a group that serves {device=}, got one with the backends {served}: initialise torch.distributed "
                "with backend='cpu:gloo,cuda:nccl'"
            )
        return cls(group, kind, device)


def group_beside(
    service: Service,
    store: Store,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    host: str,
) -> TorchGroup:
    """Returns the group of a new communicator beside a process group; `TorchGroup.open` connects it.

    Args:
        service: what the user's group offers.
        store: the job's store.
        name: a name that no other group of the job ever had.
        rank: this rank in the group.
        size: the group's size.
        timeout: seconds.
        host: the address whose interface Gloo uses; empty for torch's choice.
    """
    own = service.kind in ("gloo", "nccl") and size > 1
    backend = None if own else service.group
    return TorchGroup(backend, service.kind, store, rank, size, timeout, service.device, host, name)


def _open(
    kind: str, store: Store, key: str, rank: int, size: int, timeout: float, device: torch.device, host: str
) -> Any:
    prefixed = PrefixStore(f"bagua_kernels/{key}", store)
    limit = timedelta(seconds=timeout)
    if size == 1:
        return None
    if kind == "nccl":
        # NCCL itself waits for ranks without a limit.
        await_ranks(PrefixStore("rendezvous", prefixed), rank, size, timeout)
        # The thread is not the one that chose the device.
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        backend: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        # The first operation connects all ranks and waits for them, so an exchange among a few ranks must not be the first.
        # `eager_connect_single_device` connects, too, but afterwards all sends and receives run one after the other.
        backend.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
        return backend
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [_device(host)]
    backend = gloo(prefixed, rank, size, options)
    backend._set_default_timeout(_SLOWEST * limit)
    return backend


def _device(host: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    if host:
        return gloo.create_device(hostname=host)
    # Torch reads the variable for its own groups only.
    interface = knobs.GLOO_SOCKET_IFNAME.get().split(",")[0]
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()
