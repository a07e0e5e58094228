"""Variables that a launcher sets for a process, and those that Gloo reads."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bagua_kernels import knobs
from bagua_kernels.comm.joining.launchers import Step, several
from bagua_kernels.comm.joining.mpi_address import address_by_mpi

_LARGEST_PORT = 65535
_MOST_RANKS = 1_000_000  # more could not be awaited, nor listed where they are missing
_TORCHRUN = "torchrun"
_BY_HAND = "RANK and WORLD_SIZE"


@dataclass(frozen=True)
class Launch:
    """What a launcher such as torchrun, srun or mpirun passes to a process in its environment.

    Attributes:
        rank: the number of this process (RANK).
        world_size: the number of processes (WORLD_SIZE).
        local_rank: the number of this process on its host (LOCAL_RANK); None where no variable has it.
        master_addr: the host of the key-value store (MASTER_ADDR); empty where no variable has it, see `located`.
        master_port: its port (MASTER_PORT).
        agent_store: True if the launcher holds that store, and not rank 0 (TORCHELASTIC_USE_AGENT_STORE).
        launcher: what started it, for people.
        job: a text that all ranks of one start have, and no other start; empty where MASTER_PORT is given.
    """

    rank: int
    world_size: int
    local_rank: int | None
    master_addr: str
    master_port: int
    agent_store: bool = False
    launcher: str = _BY_HAND
    job: str = ""

    @property
    def number_on_host(self) -> int:
        """Returns `local_rank`, or where no variable has it the rank, which is right on one host."""
        return self.rank if self.local_rank is None else self.local_rank

    @property
    def by_step(self) -> bool:
        """Returns True if a launcher without torchrun's variables started it."""
        return self.launcher not in (_TORCHRUN, _BY_HAND)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """Returns the values of the environment, or None for a process that is alone.

        1. RANK and WORLD_SIZE, as torchrun sets them, or a person.
        2. The variables of MPI's launchers, then of Slurm's `srun`, then of `jsrun`, `horovodrun` and submitit,
           where they speak of several processes.
        3. Alone. Where a batch allocation has several processes, it warns.

        `BAGUA_KERNELS_LAUNCHER` chooses one of them. A variable that is set and empty counts as unset.

        Raises:
            ValueError: if some variables are missing, hold no sensible value or contradict one another. Also if the job looks
                like several processes, and this one has no number.
        """
        kind = knobs.LAUNCHER.get()
        if kind == "alone":
            return None
        if kind in ("auto", "torchrun") and (
            environment.get("RANK") or environment.get("WORLD_SIZE") or kind == "torchrun"
        ):
            return cls._plain(environment, kind)
        step = Step.find(environment, kind)
        if step is None:
            return None
        if step.address and not _can_be_a_host(step.address):
            raise ValueError(_no_host(step.address))
        return cls(
            step.rank, step.size, step.local_rank, step.address, step.port, launcher=step.launcher.name, job=step.job
        )

    def located(self) -> Launch:
        """Returns this with the host of rank 0, for which all ranks ask MPI together where the environment lacks it.

        Raises:
            ValueError: if MPI does not know it.
        """
        if self.master_addr:
            return self
        address = address_by_mpi(self.rank, self.world_size)
        if not address:
            raise ValueError(
                f"{self.launcher} started {self.world_size} processes on several hosts, and no variable has the host of rank 0: "
                "pass it, as by `mpirun -x MASTER_ADDR=host` (Open MPI) or `mpiexec -genv MASTER_ADDR host` (MPICH), or "
                "install mpi4py"
            )
        return replace(self, master_addr=address)

    @classmethod
    def _plain(cls, environment: Mapping[str, str], kind: str) -> Launch:
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
        local_rank = number("LOCAL_RANK") if environment.get("LOCAL_RANK") else None
        if local_rank is not None and local_rank < 0:
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
            raise ValueError(_no_host(address))
        found = several(environment) if kind == "auto" else None
        # More is possible: a launcher may start one torchrun on each host.
        if found is not None and world_size < found[1]:
            raise ValueError(
                f"WORLD_SIZE={world_size}, but {found[0].size}={found[1]} means that {found[0].name} started more processes: "
                f"unset RANK and WORLD_SIZE, or set {knobs.LAUNCHER.variable}=torchrun if they are right"
            )
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        launcher = _TORCHRUN if environment.get("TORCHELASTIC_RUN_ID") else _BY_HAND
        return cls(rank, world_size, local_rank, address, port, agent_store, launcher)


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
    def of(cls, launch: Launch) -> Refusal | None:
        """Returns the values of a process whose environment could be read; None if it is the only one."""
        if launch.world_size == 1 or not launch.master_addr:
            return None
        return cls(str(launch.rank), launch.world_size - 1, launch.master_addr, launch.master_port, launch.agent_store)

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


def _no_host(address: str) -> str:
    return (
        f"expected a hostname or an IP address in MASTER_ADDR, got MASTER_ADDR={address[:60]!r}: give rank 0's host alone, and "
        "the port in MASTER_PORT"
    )


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
