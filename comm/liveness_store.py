"""Opens the store in which the ranks leave their signs of life."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from bagua_kernels import knobs
from bagua_kernels.comm.liveness import HOST, Liveness

_PATIENCE = timedelta(seconds=10)  # for one attempt to connect

_log = logging.getLogger(__name__)


def connect(rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> Liveness | None:
    """Opens the store on rank 0, connects every rank to it and starts the signs of life; collective.

    Torch's own store will not do: it may live in a launcher, or be busy with a blocking call of another thread, and its
    address is private.

    Args:
        rank: this rank.
        size: the number of ranks.
        exchange: gathers an object of every rank, in rank order.

    Returns:
        The running signs of life, or None, on all ranks, if one of them could not connect: failures are then reported
        without the name of the rank at fault.
    """
    host = socket.gethostname()
    server: TCPStore | None = None
    offer = None
    if rank == HOST:
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
        token = uuid.uuid4().hex
        server.set("token", token)
        # Ranks that beat at different rates would take one another for lost.
        beat = knobs.HEARTBEAT.get()
        offer = {"host": host, "addresses": _addresses(host), "port": server.port, "token": token, "heartbeat": beat}
    offer = exchange(offer)[HOST]
    store, problem = (server, "") if server is not None else _client(offer, host)
    liveness = None if store is None else Liveness(store, rank, size, heartbeat=offer["heartbeat"])
    problems = {r: text for r, text in enumerate(exchange(problem)) if text}
    if problems:
        if liveness is not None:
            liveness.stop("it runs without signs of life")
        if rank == HOST:
            _log.warning("ranks could not connect to rank %d, so errors will not name a lost rank: %s", HOST, problems)
        return None
    return liveness


def _client(offer: dict[str, Any], host: str) -> tuple[TCPStore | None, str]:
    addresses = ["127.0.0.1"] if offer["host"] == host else []
    problem = "no address to try"
    for address in [*addresses, *offer["addresses"]]:
        try:
            store = TCPStore(address, offer["port"], is_master=False, wait_for_workers=False, timeout=_PATIENCE)
            # Another host of the same name has another store at this port, or none.
            if store.check(["token"]) and store.get("token").decode() == offer["token"]:
                return store, ""
            problem = f"{address}:{offer['port']} is another store"
        except RuntimeError as error:
            problem = f"{address}:{offer['port']}: {str(error).splitlines()[0]}"
    return None, problem


def _addresses(host: str) -> list[str]:
    """Returns the addresses under which other hosts may reach this one, the likeliest first."""
    # Rank 0 is on the host that MASTER_ADDR names; without a launcher, the host's name is what others know it by.
    found = [knobs.MASTER_ADDR.get(), host, socket.gethostname()]
    return list(dict.fromkeys(address for address in found if address))
