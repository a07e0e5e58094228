"""Where this process stands among its fellows: `init` once, then `world`, `rank`, `size`, `device` from anywhere."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua_kernels import knobs
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.mailboxes import leave_mailboxes
from bagua_kernels.comm.backends.selection import over_torch
from bagua_kernels.comm.backends.torch_distributed.gloo_end import await_freed, cut_group, free, keep
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.joining.address import address_of
from bagua_kernels.comm.joining.bounded import KeptStore, PatientStore, bounded
from bagua_kernels.comm.joining.descriptors import make_room
from bagua_kernels.comm.joining.launch import Launch, Refusal, gloo_on, loopback_of
from bagua_kernels.comm.joining.start import HOST, Start, begin, tell_refusal
from bagua_kernels.errors import BackendUnavailableError, CommunicationError

_FREEING = 2.0  # seconds that `shutdown` waits for connections to be closed after a failure
_ON_GLOO = frozenset(("cpu", "cuda", "gloo"))  # in the configuration of a group that has no other backend
_LATER = 2  # descriptors for each other rank that a mailbox takes
_LONGEST_GOODBYE = 30.0  # seconds that a process which exits waits for the others

_log = logging.getLogger(__name__)


@dataclass
class _World:
    communicator: Communicator
    made_group: bool


_current: _World | None = None


def init(*, timeout: float | None = None, device: str | torch.device | None = None) -> Communicator:
    """Joins the other processes of the job; every rank calls it, as often as it likes.

    Under torchrun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it initialises torch.distributed:
    NCCL and Gloo on cuda:LOCAL_RANK, Gloo on a CPU. Where torch.distributed is initialised already it uses its
    default group. In a plain single process it opens no socket. Where srun or mpirun has started several processes
    without these variables, it raises an error, unless `BAGUA_KERNELS_LAUNCHER` is "alone".

    Gloo takes the network interface that the hostname resolves to, or that GLOO_SOCKET_IFNAME names. Where
    MASTER_ADDR is a loopback address and GLOO_SOCKET_IFNAME is not set, loopback is used instead: for torch's default
    group by setting that variable while the group is made, because there is no other way. This package's own sockets need
    no variable.

    Ranks on CPUs are joined by sockets of their own (`StripedCommunicator`), unless `BAGUA_KERNELS_SOCKETS` is 0. Gloo
    then connects two ranks only when they first meet in an operation of torch's. On GPUs NCCL is driven through torch, or
    through CuPy (`NcclCommunicator`) if `BAGUA_KERNELS_NCCL=cupy`. What `tune` has measured can be given in
    `BAGUA_KERNELS_TUNING`.

    Args:
        timeout: seconds after which an operation that does not finish raises an error, and within which all ranks
            have to join; by default `BAGUA_KERNELS_TIMEOUT`.
        device: where tensors will be; by default the GPU of this rank if there is one, else the CPU.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: if the environment is incomplete or holds impossible values, or the arguments contradict an earlier
            call.
        CollectiveTimeoutError: if not all ranks arrived in time; it names those that are missing.
        RankLostError: if a rank died on the way.
        MismatchError: if WORLD_SIZE or the version of this package differs between ranks.
        CommunicationError: if the store at MASTER_ADDR cannot be reached, or the ranks cannot reach one another. Also if
            the process may not open enough files for so many connections, even at the hard limit.
    """
    global _current
    wanted = None if device is None else _indexed(torch.device(device))
    if _current is not None:
        made = _current.communicator
        if timeout is not None and timeout != made.timeout:
            raise ValueError(
                f"init was called before with timeout={made.timeout}, now with {timeout=}: call shutdown first"
            )
        if wanted is not None and wanted != made.device:
            raise ValueError(
                f"init was called before with device={made.device}, now with {device=}: call shutdown first"
            )
        return made
    with _refusals_told():
        seconds = knobs.TIMEOUT.get() if timeout is None else float(timeout)
        if not knobs.LEAST_TIMEOUT <= seconds <= knobs.LONGEST_TIMEOUT:
            raise ValueError(
                f"expected a number of seconds from {knobs.LEAST_TIMEOUT:g} to {knobs.LONGEST_TIMEOUT:.7g}, got {timeout=}: pass "
                "a limit that an operation can reach"
            )
        # Only some ranks read these later, when the others wait for them.
        for knob in (knobs.HEARTBEAT, knobs.SECRET):
            knob.get()
        launch = None if dist.is_initialized() else Launch.read()
        _make_room(
            dist.get_world_size() if dist.is_initialized() else 1 if launch is None else launch.world_size, launch
        )
        at = None if launch is None else _place(launch, wanted)
    if dist.is_initialized():
        try:
            _current = _World(over_torch(seconds, wanted, ""), made_group=False)
        except (CommunicationError, BackendUnavailableError):
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"the ranks of torch.distributed's default group could not join: {error}; see that all of them called init "
                "and still run"
            ) from error
    elif launch is None or at is None:
        place = wanted or _indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        _current = _World(LocalCommunicator.alone(seconds, place), made_group=False)
    else:
        _current = _World(_join(launch, seconds, *at), made_group=True)
    atexit.register(_shutdown_at_exit)
    return _current.communicator


def world() -> Communicator:
    """Returns the communicator of all ranks.

    Raises:
        RuntimeError: if `init` has not been called.
    """
    if _current is None:
        raise RuntimeError("there is no communicator yet: call bagua_kernels.comm.init() first")
    return _current.communicator


def device() -> torch.device:
    """Returns the device of this rank's tensors."""
    return world().device


def rank() -> int:
    """Returns this process's number, from 0."""
    return world().rank


def size() -> int:
    """Returns the number of processes."""
    return world().size


def is_initialized() -> bool:
    """Returns True if `init` has been called, and `shutdown` not since."""
    return _current is not None


def shutdown() -> None:
    """Waits for the other ranks, and undoes `init`; harmless without it.

    A rank that has gone is logged, not raised: there is nothing left to do with it. It runs by itself when the process
    exits, where it waits for at most 30 seconds, and not at all after an uncaught exception.
    """
    _shutdown(None, "")


@contextlib.contextmanager
def _refusals_told() -> Iterator[None]:
    """Reports to the other ranks, which would wait for this one, that it refuses what it was given."""
    try:
        yield
    except (ValueError, CommunicationError) as error:
        refusal = None if dist.is_initialized() else Refusal.read()
        if refusal is not None:
            tell_refusal(refusal, error)
        raise


def _make_room(size: int, launch: Launch | None) -> None:
    """Raises the limit on open files, if it is too low for so many ranks.

    Raises:
        CommunicationError: if it cannot be raised as far as is needed.
    """
    if size == 1:
        return
    # Torch's store has a connection to each rank, in the process that holds it.
    store = size if launch is not None and launch.rank == HOST and not launch.agent_store else 0
    sockets = 1
    with contextlib.suppress(ValueError):  # all ranks learn of it later, when they compare what they ask for
        sockets = max(sockets, knobs.SOCKETS.get())
    make_room(store + sockets * (size - 1), size, useful=_LATER * (size - 1))


def _place(launch: Launch, wanted: torch.device | None) -> tuple[torch.device, str]:
    """Returns where this rank's tensors will be, and the address at which it listens; empty for the default.

    Raises:
        ValueError: if this host has no such GPU or network interface.
    """
    place = wanted or torch.device("cpu")
    if wanted is None and torch.cuda.is_available():
        if launch.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK={launch.local_rank} has no GPU of its own, there are {torch.cuda.device_count()}: start "
                "fewer processes on this host, or pass device='cpu'"
            )
        place = torch.device("cuda", launch.local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    for interface in filter(None, knobs.GLOO_SOCKET_IFNAME.get().split(",")):
        # Gloo's own error reaches all ranks, and does not name the one that has it.
        address_of(interface)
    return place, loopback_of(launch.master_addr)


def _join(launch: Launch, timeout: float, place: torch.device, host: str) -> Communicator:
    store, start = begin(launch, timeout)
    with start.told():
        try:
            store.set_timeout(timedelta(seconds=start.left()))
            with gloo_on(host):
                _init_group(launch, place, PrefixStore(f"bagua_kernels/{start.name}", store), start)
            made = over_torch(start.left(), place, host, start.look, start.tell)
        except BaseException:
            # Nothing of a failed start may be left for the next one to find.
            _give_up_group()
            raise
    store.set_timeout(timedelta(seconds=timeout))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    # The start may have had less time left.
    made.set_timeout(timeout)
    return made


def _init_group(launch: Launch, place: torch.device, store: PrefixStore, start: Start) -> None:
    """Makes torch's default group; torch waits for ever for a store whose host is stopped.

    Raises:
        RuntimeError: if it cannot be made in time.
    """
    seconds = start.left()

    def call(given_up: threading.Event) -> None:
        if place.type == "cuda":
            torch.cuda.set_device(place)
        # A thread that comes back from a wait in C++ while the interpreter ends would abort the process. So no wait may outlast
        # this start. NCCL asks its store from threads of its own, where no Python must run.
        patient = None if place.type == "cuda" else PatientStore(store, given_up)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            store=store if patient is None else patient,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=seconds),
        )
        if patient is not None:
            # From here on waits have the limits that torch gives them.
            group, groups = dist.distributed_c10d._get_default_group(), dist.distributed_c10d._world.pg_map
            groups[group] = groups[group][0], KeptStore(f"{group.group_name}/", store, patient)

    try:
        bounded(call, seconds, start.look, lambda _: _give_up_group())
    except TimeoutError:
        raise RuntimeError(f"torch.distributed did not connect the ranks within {seconds:.3g} s") from None


def _give_up_group() -> None:
    """Makes torch.distributed forget its groups, whose operations may never finish."""
    if not dist.is_initialized():
        return
    # The destructors would wait for those operations. No other name may hold a group, or they would run here.
    groups = list(dist.distributed_c10d._world.pg_map)
    if all(set(dist.get_backend_config(group).replace(":", ",").split(",")) <= _ON_GLOO for group in groups):
        for at in range(len(groups)):
            cut_group(groups[at])
    else:
        keep(groups)
    dist.destroy_process_group()
    free(groups)


def _indexed(place: torch.device) -> torch.device:
    if place == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _shutdown(limit: float | None, failure: str) -> None:
    global _current
    if _current is None:
        return
    communicator, made_group = _current.communicator, _current.made_group
    _current = None
    atexit.unregister(_shutdown_at_exit)
    closed = communicator.is_closed()
    healthy = not failure and (closed or not communicator.is_ended())
    if healthy:
        try:
            communicator.close(limit)
            leave_mailboxes(communicator, "comm.shutdown() was called")
            communicator.close_relatives()
        except CommunicationError as error:
            _log.warning("the other ranks did not shut down with this one: %s", error)
            healthy = False
    if not healthy:
        communicator.abort(failure or "its process exited")
        leave_mailboxes(communicator, failure or "its process exited")
    if not made_group or not dist.is_initialized():
        return
    if healthy:
        dist.destroy_process_group()
    else:
        _give_up_group()
        if not await_freed(_FREEING):
            _log.warning("connections of before the failure are still being closed after %g s", _FREEING)


def _forget() -> None:
    """Leaves the connections to the parent of a process that was forked."""
    global _current
    if dist.is_available() and dist.is_initialized():
        # The destructors of groups, and of the store that they hold, would wait for threads that the child lacks.
        keep(dist.distributed_c10d._world.pg_map)
    if _current is not None:
        _current = None
        atexit.unregister(_shutdown_at_exit)


os.register_at_fork(after_in_child=_forget)


def _shutdown_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    failure = f"its process exited after {type(error).__name__}: {error}" if error is not None else ""
    _shutdown(_LONGEST_GOODBYE, failure)
