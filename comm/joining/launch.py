"""Variables that a launcher sets for a process, and those that Gloo reads."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


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
