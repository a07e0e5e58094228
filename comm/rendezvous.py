"""Where this process stands among its fellows: `init` once, then `world`, `rank`, `size`, `device` from anywhere."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua_kernels import knobs
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.mailboxes import leave_mailboxes
from bagua_kernels.comm.backends.selection import over_torch
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.torch_distributed.gloo_end import await_freed, cut_group, free, keep
from bagua_kernels.comm.backends.torch_distributed.group import Service
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.faults.injector import Injector, planned
from bagua_kernels.comm.joining.address import check_interfaces, doors_of, own_address, place_of
from bagua_kernels.comm.joining.bounded import KeptStore, PatientStore, bounded
from bagua_kernels.comm.joining.descriptors import make_room
from bagua_kernels.comm.joining.interfaces import interface_of
from bagua_kernels.comm.joining.introduction import starts_anew
from bagua_kernels.comm.joining.launch import Launch, Refusal, gloo_on, loopback_of
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.joining.start import HOST, Start, begin, tell_refusal
from bagua_kernels.comm.membership.agreement import Quota
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.draft import Drafting
from bagua_kernels.comm.membership.membership import Membership
from bagua_kernels.comm.membership.transports import EpochTransport, LineTransport, NcclTransport
from bagua_kernels.errors import BackendUnavailableError, CommunicationError, MismatchError

_FREEING = 2.0  # seconds that `shutdown` waits for connections to be closed after a failure
_CPU = torch.device("cpu")
_ON_GLOO = frozenset(("cpu", "cuda", "gloo"))  # in the configuration of a group that has no other backend
_LATER = 2  # descriptors for each other rank that a mailbox takes
_LONGEST_GOODBYE = 30.0  # seconds that a process which exits waits for the others

_log = logging.getLogger(__name__)


@dataclass
class _World:
    made: Communicator
    made_group: bool
    members: Membership | None = None
    injector: Injector | None = None

    @property
    def communicator(self) -> Communicator:
        """Of the ranks that are left."""
        return self.made if self.members is None else self.members.communicator


_current: _World | None = None


def init(
    *,
    timeout: float | None = None,
    device: str | torch.device | None = None,
    elastic: bool = False,
    minimum: int = 1,
    majority: bool = False,
    listen: str | None = None,
    join: str | None = None,
    draft: Drafting | None = None,
) -> Communicator:
    """Joins the other processes of the job; every rank calls it, as often as it likes.

    Where torch.distributed is initialised already it uses its default group. Else it initialises it, with NCCL and Gloo on the
    GPU of this rank, or Gloo on a CPU, as one of the processes that a launcher has started: torchrun, or whatever sets RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT; then MPI's launchers, Slurm's `srun`, `jsrun`, `horovodrun`, submitit.
    `BAGUA_KERNELS_LAUNCHER` chooses one of them, or "alone". In a plain single process it opens no socket. Rank 0 logs what
    was found, at the level INFO.

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
        elastic: True for a job that goes on when ranks are lost, where algorithms have `on_failure="heal"`. `members` of the
            communicator is then the `Membership`, whose communicator is another one after each change. `world`, `rank` and
            `size` follow it. On GPUs it needs `BAGUA_KERNELS_NCCL=cupy`.
        minimum: the least number of ranks that go on, in an elastic job.
        majority: True if those that go on have to be more than half, even where the others are known to be lost.
        listen: "port" or "host:port", at which each rank lets processes join an elastic job; by default
            `BAGUA_KERNELS_LISTEN`. Ranks of one host take the ports from there on. It needs `BAGUA_KERNELS_SECRET`.
        join: "host:port", or several with commas between them: addresses of members of an elastic job that runs, which this
            process joins; by default `BAGUA_KERNELS_JOIN`. What a launcher has set is not read then.
        draft: a `bagua_kernels.algorithms.Draft` of the model, with which a process joins that gets the rest while it trains:
            nobody waits for the model to be sent. Where no job is joined it is left as it is.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: if the environment is incomplete or holds impossible values, or the arguments contradict an earlier
            call.
        CollectiveTimeoutError: if not all ranks arrived in time; it names those that are missing.
        RankLostError: if a rank died on the way.
        MismatchError: if WORLD_SIZE or the version of this package differs between ranks.
        BackendUnavailableError: on every rank, if NCCL is to be driven through CuPy, and is missing on one.
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
        if elastic and _current.members is None:
            raise ValueError(
                "init was called before without elastic=True: pass it in the first call, or call shutdown first"
            )
        return made
    with _refusals_told() as told:
        seconds = knobs.TIMEOUT.get() if timeout is None else float(timeout)
        if not knobs.LEAST_TIMEOUT <= seconds <= knobs.LONGEST_TIMEOUT:
            raise ValueError(
                f"expected a number of seconds from {knobs.LEAST_TIMEOUT:g} to {knobs.LONGEST_TIMEOUT:.7g}, got {timeout=}: pass "
                "a limit that an operation can reach"
            )
        # Only some ranks read these later, when the others wait for them.
        for knob in (knobs.HEARTBEAT, knobs.SECRET):
            knob.get()
        planned()
        doors = doors_of(join if join is not None else knobs.JOIN.get())
        elastic = elastic or bool(doors)
        place_to_listen = place_of(listen if listen is not None else knobs.LISTEN.get()) if elastic else None
        if doors:
            return _arrived(doors, seconds, wanted or _indexed(_default_device()), place_to_listen, draft)
        launch = None if dist.is_initialized() else Launch.read()
        # A single process that nobody may join has no need of NCCL.
        elastic_alone = elastic and launch is None and place_to_listen is None and not dist.is_initialized()
        if elastic and not elastic_alone:
            _transport(wanted or _default_device())
        if launch is not None:
            told.launch = launch = launch.located()
            check_interfaces()
        _make_room(
            dist.get_world_size() if dist.is_initialized() else 1 if launch is None else launch.world_size, launch
        )
        # Without a number on this host ranks are counted once all are there.
        place = None if launch is None or launch.local_rank is None else _place(launch, launch.local_rank, wanted)
    if dist.is_initialized():
        place = wanted or _default_device() if elastic else None
        try:
            made = over_torch(seconds, _CPU if elastic else wanted, "", watch=not elastic)
            _current = _World(made, made_group=False)
        except (CommunicationError, BackendUnavailableError):
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"the ranks of torch.distributed's default group could not join: {error}; see that all of them called init "
                "and still run"
            ) from error
    elif launch is None:
        place = wanted or _indexed(_default_device())
        beneath = _CPU if elastic and not elastic_alone else place
        _current = _World(LocalCommunicator.alone(seconds, beneath), made_group=False)
    else:
        made, place = _join(launch, seconds, wanted, place, elastic=elastic)
        _current = _World(made, made_group=True)
    atexit.register(_shutdown_at_exit)
    if elastic:
        assert place is not None
        transport = LineTransport() if elastic_alone else _transport(place)
        _current.members = _membership(_current.made, Quota(minimum, majority), transport)
        _current.members.notice.listen()
        if place_to_listen is not None:
            _listen(_current.members, place_to_listen)
    _current.injector = Injector.of_environment(_current.communicator.rank)
    return _current.communicator


def _arrived(
    doors: Sequence[tuple[str, int]],
    seconds: float,
    place: torch.device,
    place_to_listen: tuple[str, int] | None,
    draft: Drafting | None,
) -> Communicator:
    """Joins a job that runs, with tensors on a device.

    Raises:
        ValueError: there is no secret, or tensors are to be on a GPU and NCCL is driven through torch.
    """
    global _current
    if not (text := knobs.SECRET.get()):
        raise ValueError(f"to join a job that runs takes its secret: set {knobs.SECRET.variable} to that of the job")
    members = arrive(doors, Secret.from_text(text), seconds, draft, _transport(place))
    _current = _World(members.communicator, made_group=False, members=members)
    atexit.register(_shutdown_at_exit)
    members.notice.listen()
    if place_to_listen is not None:
        _listen(members, place_to_listen)
    _current.injector = Injector.of_environment(members.name)
    return members.communicator


def _listen(members: Membership, place: tuple[str, int]) -> None:
    members.listen(*place)
    assert members.address is not None
    _log.info("rank %d lets processes join at %s:%d", members.name, *members.address)


def _default_device() -> torch.device:
    """Returns where tensors are if `init` is given no device: a GPU if there is one that torch's group, if any, serves."""
    if dist.is_initialized():
        return Service.of(dist.distributed_c10d._get_default_group(), None).device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _transport(place: torch.device) -> EpochTransport:
    """Returns what makes the communicators of an elastic job, for tensors on a device.

    Raises:
        ValueError: it is a GPU, and NCCL is driven through torch, whose communicators do not survive a loss.
    """
    if place.type == "cpu":
        return LineTransport()
    if (driven := knobs.NCCL.get()) != "cupy":
        raise ValueError(
            f"an elastic job on GPUs drives NCCL through CuPy, got device={place} and {knobs.NCCL.variable}={driven}: set "
            f"{knobs.NCCL.variable}=cupy on all ranks, or pass device='cpu'"
        )
    return NcclTransport(place)


def _membership(anchor: Communicator, terms: Quota, transport: EpochTransport) -> Membership:
    """Returns the membership of all ranks.

    Args:
        anchor: of all ranks, on their CPUs.
        terms: what the members have to be.
        transport: what makes the communicators of epochs.

    Raises:
        ValueError: connections of this kind cannot go on without a rank, or a number does not fit; on all ranks.
    """
    if not isinstance(anchor, StripedCommunicator | LocalCommunicator) and anchor.size > 1:
        raise ValueError(
            f"elastic=True needs sockets of this package's own, got a {type(anchor).__name__}: leave {knobs.SOCKETS.variable} as "
            "it is, on Linux"
        )
    if not 1 <= terms.minimum <= anchor.size:
        raise ValueError(f"expected minimum from 1 to the {anchor.size} ranks, got {terms.minimum}")
    text = knobs.SECRET.get()
    return Membership(anchor, terms, secret=Secret.from_text(text) if text else None, transport=transport)


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


def reach(step: Callable[[], int]) -> None:
    """Lets faults of `BAGUA_KERNELS_FAULTS` happen that wait for a step, which is about to begin.

    Raises:
        InjectedError: such a fault is an error.
    """
    if _current is not None and _current.injector is not None:
        _current.injector.reach(step)


def shutdown() -> None:
    """Waits for the other ranks, and undoes `init`; harmless without it.

    A rank that has gone is logged, not raised: there is nothing left to do with it. It runs by itself when the process
    exits, where it waits for at most 30 seconds, and not at all after an uncaught exception. In a `finally` or `except` block,
    while an exception is handled, it does not wait either: other ranks may be anywhere, and get an error that names this one.
    """
    _shutdown(None, sys.exception(), "it shut down")


@dataclass
class _Told:
    launch: Launch | None = None


@contextlib.contextmanager
def _refusals_told() -> Iterator[_Told]:
    """Reports to the other ranks, which would wait for this one, that it refuses what it was given.

    The block notes where they are, as soon as it knows.
    """
    told = _Told()
    try:
        yield told
    except (ValueError, CommunicationError) as error:
        if not dist.is_initialized():
            refusal = Refusal.read() if told.launch is None else Refusal.of(told.launch)
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


def _place(launch: Launch, local_rank: int, wanted: torch.device | None) -> torch.device:
    """Returns where this rank's tensors will be.

    Raises:
        ValueError: if this host has no such GPU.
    """
    place = wanted or torch.device("cpu")
    if wanted is None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        # Slurm and MPI may show each process its own GPU alone, which torchrun does not.
        own = count == 1 and launch.by_step
        if local_rank >= count and not own:
            raise ValueError(
                f"LOCAL_RANK={local_rank} has no GPU of its own, there are {count}: start fewer processes on this host, or pass "
                "device='cpu'"
            )
        place = torch.device("cuda", 0 if own else local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return place


def _join(
    launch: Launch, timeout: float, wanted: torch.device | None, found: torch.device | None, *, elastic: bool
) -> tuple[Communicator, torch.device]:
    """Joins the other ranks of a launcher.

    Returns:
        Their communicator, and the device of this rank. In an elastic job the communicator is on their CPUs in any case.
    """
    host = loopback_of(launch.master_addr)
    store, start = begin(launch, timeout)
    with start.told():
        try:
            place = _place(launch, start.local_rank, wanted) if found is None else found
            # In an elastic job torch's own watchdog of NCCL must not end ranks whose store is lost.
            beneath = _CPU if elastic else place
            store.set_timeout(timedelta(seconds=start.left()))
            with gloo_on(host):
                _init_group(launch, beneath, PrefixStore(f"bagua_kernels/{start.name}", store), start)
                starts_anew(dist.distributed_c10d._get_default_group())
            # The address towards it is that at which this rank listens.
            with knobs.override(knobs.MASTER_ADDR, launch.master_addr):
                made = over_torch(start.left(), beneath, host, start.look, start.tell, watch=not elastic)
                if launch.rank == HOST:
                    _report(launch, start, place, host or own_address())
        except BaseException:
            # Nothing of a failed start may be left for the next one to find.
            _give_up_group()
            raise
    store.set_timeout(timedelta(seconds=timeout))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    # The start may have had less time left.
    made.set_timeout(timeout)
    return made, place


def _report(launch: Launch, start: Start, place: torch.device, address: str) -> None:
    _log.info(
        "started by %s: %d rank%s on %d host%s, rank %d on %s at %s (%s), store at %s:%d",
        launch.launcher,
        launch.world_size,
        "" if launch.world_size == 1 else "s",
        start.hosts,
        "" if start.hosts == 1 else "s",
        launch.rank,
        place,
        address,
        interface_of(address) or "no interface of this host",
        launch.master_addr,
        launch.master_port,
    )


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


def _shutdown(limit: float | None, cause: BaseException | None, what: str) -> None:
    global _current
    if _current is None:
        return
    failure = "" if cause is None else f"{what} after {type(cause).__name__}: {cause}"
    communicator, made_group, members = _current.communicator, _current.made_group, _current.members
    if _current.injector is not None:
        _current.injector.close()
    _current = None
    atexit.unregister(_shutdown_at_exit)
    closed = communicator.is_closed()
    healthy = not failure and (closed or not communicator.is_ended())
    if healthy:
        try:
            if members is not None:
                members.prepare_close()
            communicator.close(limit)
            leave_mailboxes(communicator, "comm.shutdown() was called")
            communicator.close_relatives()
        except CommunicationError as error:
            _log.warning("the other ranks did not shut down with this one: %s", error)
            healthy = False
    if not healthy:
        communicator.abort(failure or "its process exited")
        leave_mailboxes(communicator, failure or "its process exited")
    if members is not None:
        # What follows from a loss ends no other rank: those may be going on.
        is_loss = isinstance(cause, CommunicationError) and not isinstance(cause, MismatchError)
        members.close("" if is_loss else failure)
        # Torch's own connections to ranks that are lost would be waited for.
        healthy = healthy and not members.losses
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
    _shutdown(_LONGEST_GOODBYE, getattr(sys, "last_value", None), "its process exited")
