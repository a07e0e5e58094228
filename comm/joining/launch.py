"""Variables that a launcher sets for a process, and those that Gloo reads."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagua_kernels import knobs

# How many processes a launcher has started together, by the variable that it sets.
_STEPS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "PMI_SIZE": "an MPI's launcher",
    "JSM_NAMESPACE_SIZE": "jsrun",
}
_ALLOCATIONS = ("SLURM_NTASKS", "SLURM_NPROCS")  # a batch script has them too, which runs once
_NAMES = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
_OTHER_NAMES = {
    "srun": " (RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, LOCAL_RANK=$SLURM_LOCALID)",
    "Open MPI's mpirun": " (RANK=$OMPI_COMM_WORLD_RANK, WORLD_SIZE=$OMPI_COMM_WORLD_SIZE, "
    "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK)",
}
_LARGEST_PORT = 65535
_MOST_RANKS = 1_000_000  # more could not be awaited, nor listed where they are missing


@dataclass(frozen=True)
class Launch:
    """Values that a launcher such as torchrun passes to a process in its environment.

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
        """Returns the values of the environment, or None if no launcher has set any.

        Where only the variables of a Slurm allocation speak of several processes, it warns that this one is alone.

        Raises:
            ValueError: if some of the variables are missing, or hold no sensible value. Also if another launcher has
                started several processes, unless `BAGUA_KERNELS_LAUNCHER` is "alone".
        """
        if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
            _expect_alone(environment)
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
                raise ValueError(
                    f"{name}={environment[name][:60]!r} in the environment is no integer: set it to one, as torchrun does"
                ) from None

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"expected RANK from 0 to WORLD_SIZE - 1, got RANK={rank} and WORLD_SIZE={world_size}: start as many "
                "processes as WORLD_SIZE demands, and number them from 0"
            )
        if world_size > _MOST_RANKS:
            raise ValueError(
                f"expected WORLD_SIZE of at most {_MOST_RANKS}, got WORLD_SIZE={world_size}: set it to the number of processes"
            )
        local_rank = number("LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
        if local_rank < 0:
            raise ValueError(
                f"expected LOCAL_RANK of 0 or more, got LOCAL_RANK={local_rank}: number the processes of a host from 0"
            )
        port = number("MASTER_PORT")
        # The system chooses a port in place of 0, which only the process itself then knows.
        least = 0 if world_size == 1 else 1
        if not least <= port <= _LARGEST_PORT:
            raise ValueError(
                f"expected MASTER_PORT from {least} to {_LARGEST_PORT}, got MASTER_PORT={port}: set it to a free port of "
                "rank 0's host, the same on all ranks"
            )
        address = environment["MASTER_ADDR"]
        if not _can_be_a_host(address):
            raise ValueError(
                f"expected a hostname or an IP address in MASTER_ADDR, got MASTER_ADDR={address[:60]!r}: give rank 0's "
                "host alone, and the port in MASTER_PORT"
            )
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, local_rank, address, port, agent_store)


@dataclass(frozen=True)
class Refusal:
    """Where a process whose environment cannot be used finds the others, as far as the environment contains that.

    Attributes:
        rank: RANK, as it is.
        others: the number of other processes.
        master_addr: see `Launch`.
        master_port: see `Launch`.
        agent_store: see `Launch`.
    """

    rank: str
    others: int
    master_addr: str
    master_port: int
    agent_store: bool

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Refusal | None:
        """Returns the values of the environment; None if it does not lead to a store that others may use."""
        address, rank = environment.get("MASTER_ADDR", ""), environment.get("RANK", "").strip()
        port, size = (environment.get(name, "") for name in ("MASTER_PORT", "WORLD_SIZE"))
        if not _can_be_a_host(address) or not port.isdecimal() or not 1 <= int(port) <= _LARGEST_PORT:
            return None
        several = int(size) if size.isdecimal() and 1 < int(size) <= _MOST_RANKS else 2
        if not rank or not address or (rank, size) == ("0", "1"):
            return None
        return cls(
            rank[:60], several - 1, address, int(port), environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )


def _expect_alone(environment: Mapping[str, str]) -> None:
    """Refuses to be alone where another launcher has started several processes.

    Each of them would train a model of its own, on all samples, and report success.
    """
    if knobs.LAUNCHER.get() == "alone":
        return
    alone = f"or set {knobs.LAUNCHER.variable}=alone if each process shall stay by itself"
    for name, launcher in _STEPS.items():
        if _is_several(environment.get(name, "")):
            raise ValueError(
                f"{name}={environment[name]} means that {launcher} started several processes, but RANK and WORLD_SIZE are "
                f"not set: start one torchrun on each host, or set {_NAMES} for each process"
                f"{_OTHER_NAMES.get(launcher, '')}, {alone}"
            )
    for name in _ALLOCATIONS:
        if _is_several(environment.get(name, "")):
            warnings.warn(
                f"this process is alone, though {name}={environment[name]} speaks of several: RANK and WORLD_SIZE are not "
                f"set. Start it by srun with torchrun on each host, {alone}",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def _is_several(text: str) -> bool:
    return text.isdecimal() and int(text) > 1


def _can_be_a_host(text: str) -> bool:
    """Returns False for what no resolver can take, whatever it knows."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    # A colon outside of an IPv6 address is a port, a scheme or a bracket too many.
    if any(sign.isspace() or sign in ":/[]@," for sign in text):
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def loopback_of(address: str) -> str:
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
def gloo_on(host: str) -> Iterator[None]:
    """Makes Gloo use the loopback interface within the block, if `host` is given, and connect two ranks when they first meet.

    A rank that uses torch's default group for nothing then has no descriptor for each other rank.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    wanted = {"GLOO_SOCKET_IFNAME": name if host else "", "TORCH_GLOO_LAZY_INIT": "1"}
    wanted = {variable: value for variable, value in wanted.items() if value and variable not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for variable in wanted:
            del os.environ[variable]
