"""Where this process stands among its fellows: `init` once, then `world`, `rank`, `size`, `device` from anywhere."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ipaddress
import logging
import math
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua_kernels import knobs
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.meeting import LocalWorld
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.joining.start import Start, open_store
from bagua_kernels.errors import BackendUnavailableError, CommunicationError

_LONGEST_GOODBYE = 30.0  # seconds that a process which exits waits for the others

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What a launcher such as torchrun tells a process through its environment.

    Attributes:
        rank: RANK, the number of this process.
        world_size: WORLD_SIZE, the number of processes.
        local_rank: LOCAL_RANK, the number of this process on its host; RANK where it is not set.
        master_addr: MASTER_ADDR, the host of the key-value store.
        master_port: MASTER_PORT, its port.
        agent_store: True if the launcher holds that store, and not rank 0 (TORCHELASTIC_USE_AGENT_STORE).
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    agent_store: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """Returns what the environment says, or None where no launcher has set anything.

        Raises:
            ValueError: if some of the variables are missing, or hold no sensible number.
        """
        if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
            return None
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise ValueError(
                f"the environment lacks {', '.join(missing)}: start the script with torchrun, set all of RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them for a single process"
            )

        def number(name: str) -> int:
            try:
                return int(environment[name])
            except ValueError:
                raise ValueError(f"{name}={environment[name]!r} in the environment is no integer") from None

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(f"expected RANK from 0 to WORLD_SIZE - 1, got RANK={rank} and WORLD_SIZE={world_size}")
        local_rank = number("LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, local_rank, environment["MASTER_ADDR"], number("MASTER_PORT"), agent_store)


@dataclass
class _World:
    communicator: Communicator
    made_group: bool


_current: _World | None = None


def init(*, timeout: float | None = None, device: str | torch.device | None = None) -> Communicator:
    """Joins the other processes of the job; every rank calls it, as often as it likes.

    Under torchrun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it initialises torch.distributed:
    NCCL and Gloo on cuda:LOCAL_RANK, Gloo on a CPU. Where torch.distributed is initialised already it uses its
    default group. In a plain single process it opens no socket.

    Gloo takes the network interface that the hostname resolves to, or that GLOO_SOCKET_IFNAME names. Where
    MASTER_ADDR is a loopback address and GLOO_SOCKET_IFNAME is not set, loopback is used instead: for torch's default
    group by setting that variable while the group is made (there is no other way) and restoring it, for this
    package's own without.

    Ranks on CPUs are joined by sockets of their own beside Gloo's (`StripedCommunicator`), unless
    `BAGUA_KERNELS_SOCKETS` is 0. On GPUs NCCL is driven through torch, or through CuPy (`NcclCommunicator`) where
    `BAGUA_KERNELS_NCCL` says cupy. What `tune` has measured can be given in `BAGUA_KERNELS_TUNING`.

    Args:
        timeout: seconds after which an operation that does not finish raises an error, and within which all ranks
            have to join; by default `BAGUA_KERNELS_TIMEOUT`.
        device: where tensors will be; by default the GPU of this rank if there is one, else the CPU.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: if the environment is incomplete, or the arguments contradict an earlier call.
        CollectiveTimeoutError: if not all ranks arrived in time; it names those that are missing.
        RankLostError: if a rank died on the way.
        CommunicationError: if the store at MASTER_ADDR cannot be reached, or the ranks cannot reach one another.
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
    seconds = knobs.TIMEOUT.get() if timeout is None else float(timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected a finite number of seconds above zero, got {timeout=}")
    if dist.is_initialized():
        try:
            _current = _World(_over_torch(seconds, wanted, ""), made_group=False)
        except (CommunicationError, BackendUnavailableError):
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"the ranks of torch.distributed's default group could not join: {error}; see that all of them called init "
                "and still run"
            ) from error
    else:
        launch = Launch.read()
        if launch is None:
            place = wanted or _indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            alone = LocalWorld(1, seconds, place)
            _current = _World(LocalCommunicator(alone, alone.group("world", (0,)), 0), made_group=False)
        else:
            _current = _World(_join(launch, seconds, wanted), made_group=True)
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
    """Returns whether `init` has been called, and `shutdown` not since."""
    return _current is not None


def shutdown() -> None:
    """Waits for the other ranks, and undoes `init`; harmless without it.

    A rank that has gone is logged, not raised: there is nothing left to do with it. It runs by itself when the process
    exits, where it waits for at most 30 seconds, and not at all after an uncaught exception.
    """
    _shutdown(None, "")


def _join(launch: Launch, timeout: float, wanted: torch.device | None) -> Communicator:
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
    host = _loopback(launch.master_addr)
    since = time.monotonic()
    store = open_store(launch.master_addr, launch.master_port, launch.rank, timeout, launch.agent_store)
    store.set_timeout(timedelta(seconds=timeout))
    # A launcher that restarts dead ranks hands out the same store again, with the dead ranks' addresses still in it.
    start = Start(store, launch.rank, launch.world_size, timeout, since, launch.agent_store)
    with start.told():
        try:
            store.set_timeout(timedelta(seconds=start.left()))
            with _interface(host):
                dist.init_process_group(
                    backend="cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
                    store=PrefixStore(f"bagua_kernels/{start.name}", store),
                    rank=launch.rank,
                    world_size=launch.world_size,
                    timeout=timedelta(seconds=start.left()),
                )
            made = _over_torch(start.left(), place, host)
        except BaseException:
            # Nothing of a failed start may be left for the next one to find.
            _give_up_group()
            raise
    store.set_timeout(timedelta(seconds=timeout))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    # The start may have had less time left.
    made.set_timeout(timeout)
    return made


def _give_up_group() -> None:
    """Makes torch.distributed forget its groups, whose operations may never finish."""
    if not dist.is_initialized():
        return
    # The destructor would wait for those operations.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()


def _over_torch(timeout: float, place: torch.device | None, host: str) -> Communicator:
    """Makes the communicator that suits the default group; all ranks have to agree on what the environment asks for."""
    base = TorchCommunicator(timeout=timeout, device=place, host=host)
    if base.size == 1:
        return base
    try:
        settings = _agreed(base)
        if base.device.type == "cuda" and settings.nccl == "cupy":
            made = NcclCommunicator(timeout=timeout, device=base.device)
            base.close()
            return made
        if base.device.type == "cuda" or not settings.sockets:
            return base
        tuning = Tuning.from_json(settings.tuning) if settings.tuning else Tuning()
        return StripedCommunicator(base, stripes=max(settings.sockets, tuning.stripes), tuning=tuning, host=host)
    except BaseException as error:
        base.abort(f"init failed: {error}")
        raise


@dataclass(frozen=True)
class _Settings:
    sockets: int
    tuning: str
    nccl: str
    problem: str = ""


def _agreed(base: TorchCommunicator) -> _Settings:
    """Returns what all ranks want.

    Raises:
        ValueError: on all ranks, if one cannot read its environment, or wants something else.
    """
    try:
        text = knobs.TUNING.get()
        try:
            Tuning.from_json(text or "{}")
        except ValueError as error:
            raise ValueError(f"{knobs.TUNING.variable}: {error}") from None
        mine = _Settings(knobs.SOCKETS.get() if hasattr(select, "epoll") else 0, text, knobs.NCCL.get())
    except ValueError as error:
        mine = _Settings(0, "", "", str(error))
    everyone: list[_Settings] = base.all_gather_object(mine)
    problems = {rank: one.problem for rank, one in enumerate(everyone) if one.problem}
    if problems:
        raise ValueError(f"some ranks cannot use their environment: {problems}")
    for name, knob in (("sockets", knobs.SOCKETS), ("tuning", knobs.TUNING), ("nccl", knobs.NCCL)):
        values = {rank: getattr(one, name) for rank, one in enumerate(everyone)}
        if len(set(values.values())) > 1:
            raise ValueError(f"{knob.variable} has to be the same on all ranks, got {values}: let the launcher set it")
    return mine


def _loopback(address: str) -> str:
    """Returns the address if it is a loopback address that Gloo should use, else an empty text."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    if address == "localhost":
        return "127.0.0.1"
    try:
        return address if ipaddress.ip_address(address).is_loopback else ""
    except ValueError:
        return ""


@contextlib.contextmanager
def _interface(host: str) -> Iterator[None]:
    """Makes Gloo use the loopback interface within the block, if `host` is given."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if not host or not name:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


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
            communicator.close_relatives()
        except CommunicationError as error:
            _log.warning("the other ranks did not shut down with this one: %s", error)
            healthy = False
    if not healthy:
        communicator.abort(failure or "its process exited")
    if not made_group or not dist.is_initialized():
        return
    if healthy:
        dist.destroy_process_group()
    else:
        _give_up_group()


def _forget() -> None:
    """Leaves the connections to the parent of a process that was forked."""
    global _current
    if _current is not None:
        _current = None
        atexit.unregister(_shutdown_at_exit)


os.register_at_fork(after_in_child=_forget)


def _shutdown_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    failure = f"its process exited after {type(error).__name__}: {error}" if error is not None else ""
    _shutdown(_LONGEST_GOODBYE, failure)
