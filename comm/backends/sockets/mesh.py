"""Connects every rank with every other, by as many sockets as are wanted."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import resource
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining import hello
from bagua_kernels.comm.joining.address import own_address, strays
from bagua_kernels.comm.joining.descriptors import LIMIT, make_room
from bagua_kernels.comm.joining.gate import Gate, listen
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError

_log = logging.getLogger(__name__)

_ROUND_TRIP = 148  # where Linux's struct tcp_info has the shortest round trip, in microseconds
_NO_ROUND_TRIP = (1 << 32) - 1
_SHORTEST = 4  # minus the power of ten of the shortest delay that has a digit of its own, in seconds
_GLANCE = 0.25  # seconds between two looks at whether connecting still makes sense
_LEAST = 0.1  # of the timeout that is left to those who have come so far


class Links(dict[int, list[socket.socket]]):
    """The sockets to each other rank.

    Attributes:
        delays: for each rank a digit for each rank, the same on all ranks. It stands for the one-way delay that its system
            measured, of 10 ** (digit - 4) seconds.
    """

    delays: Sequence[str] = ()

    def delay(self, members: Iterable[int]) -> float:
        """Returns the longest one-way delay between two of some ranks, in seconds, to a power of ten."""
        ranks = list(members)
        most = max((int(self.delays[a][b]) for a in ranks for b in ranks), default=0) if self.delays else 0
        return 10.0 ** (most - _SHORTEST)


def connect(
    rank: int,
    size: int,
    stripes: int,
    exchange: Callable[[Any], list[Any]],
    timeout: float,
    host: str = "",
    *,
    secret: Secret,
    look: Callable[[], bool] | None = None,
) -> Links:
    """Connects the ranks; collective.

    Each rank listens and sends its address to all. A rank connects to those before it, and those after it connect to it.
    Both ends of a connection prove that they know the secret before anything else is read from it.

    Args:
        rank: this rank.
        size: the number of ranks.
        stripes: sockets between two ranks.
        exchange: gathers an object of every rank, in rank order.
        timeout: seconds for all of it.
        host: the address to listen on; by default that of the interface `GLOO_SOCKET_IFNAME`, else the one from which
            MASTER_ADDR, else the host's name, is reached.
        secret: shared by the ranks.
        look: returns True once connecting makes no sense any more, for a rank is lost; `exchange` will raise then.

    Returns:
        For each other rank its sockets, in an order that is the same at both ends, and the delay.

    Raises:
        CommunicationError: if a connection could not be made; on all ranks, naming the ranks concerned.
    """
    # A rank that fails waits for the others to send them its error, and their wait has to end before its own does.
    deadline = time.monotonic() + 0.8 * timeout
    found: dict[tuple[int, int], socket.socket] = {}
    problem, token = "", secrets.token_hex(16)
    with contextlib.ExitStack() as unfinished:
        with contextlib.ExitStack() as stack:
            listener = None
            try:
                make_room(stripes * (size - 1) + 1, size)
                listener = stack.enter_context(listen(host or own_address(), size * stripes))
            except (OSError, ValueError, CommunicationError) as error:
                problem = _told(error)
            offers = exchange((listener.getsockname()[:2] if listener else problem, token))
            if listener is not None and not any(isinstance(where, str) for where, _ in offers):
                unfinished.callback(_close, found)
                key = secret.derive("mesh", offers[0][1])
                addresses = [(where[0], where[1]) for where, _ in offers]
                if rank == 0 and (odd := strays([name for name, _ in addresses])):
                    _log.warning(
                        "ranks listen in different networks (%s): set GLOO_SOCKET_IFNAME on their hosts if they are not reached",
                        "; ".join(f"rank {peer}: {text}" for peer, text in odd.items()),
                    )
                try:
                    connect_all(rank, size, stripes, listener, addresses, key, deadline, found, look)
                except OSError as error:
                    problem = _told(error)
        digits = "".join(_digit(found.get((peer, 0))) for peer in range(size))
        everyone = exchange((problem, digits))
        problems = {peer: text for peer, (text, _) in enumerate(everyone) if text}
        if problems:
            told = "; ".join(f"rank {peer}: {text}" for peer, text in problems.items())
            cure = (
                "set GLOO_SOCKET_IFNAME to the network interface that the ranks share, and see that no firewall closes its "
                "ports"
            )
            if any(LIMIT in text for text in problems.values()):
                cure = "raise the limit on open files there, or close what is not needed"
            raise CommunicationError(f"the ranks could not connect to one another: {told}; {cure}")
        unfinished.pop_all()
    links = Links({peer: [found[peer, number] for number in range(stripes)] for peer in range(size) if peer != rank})
    links.delays = [digits for _, digits in everyone]
    return links


def connect_over(
    communicator: Communicator,
    stripes: int,
    host: str,
    secret: Secret,
    deadline: float,
    exchange: Callable[[Any], list[Any]] | None = None,
) -> Links:
    """Connects the ranks of a communicator, which reads their heartbeats meanwhile; collective.

    Args:
        communicator: carries the addresses.
        stripes: sockets between two ranks.
        host: see `connect`.
        secret: see `connect`.
        deadline: when the time for all of it is over, as of `time.monotonic`.
        exchange: see `connect`; by default an operation of the communicator.

    Raises:
        CommunicationError: as `connect`; a `RankLostError` if the communicator finds that a rank is lost.
    """
    deadline = max(deadline, time.monotonic() + _LEAST * communicator.timeout)
    session, look = getattr(communicator, "session", None), None
    with contextlib.ExitStack() as stack:
        if isinstance(session, Session):
            stack.enter_context(session.within(deadline))
            look = session.reported
        gather, left = exchange or communicator.all_gather_object, deadline - time.monotonic()
        return connect(
            communicator.rank, communicator.size, stripes, gather, left, host, secret=secret, look=look
        )  # fmt: skip


def connect_all(
    rank: int,
    size: int,
    stripes: int,
    listener: socket.socket,
    addresses: list[tuple[str, int]],
    key: Secret,
    deadline: float,
    found: dict[tuple[int, int], socket.socket],
    look: Callable[[], bool] | None,
    refusals: int | None = None,
) -> None:
    """Calls the ranks before this one and is called by those after it, all at once; puts connections into `found`.

    With `refusals` a rank at whose address nobody has listened so often in a row counts as lost.

    Raises:
        OSError: if some of them could not be made.
    """
    wanted = {(peer, number) for peer in range(size) if peer != rank for number in range(stripes)}

    def expected(peer: int, number: int) -> bool:
        return peer > rank and (peer, number) in wanted - found.keys()

    def admit(sock: socket.socket, peer: int, number: int) -> None:
        found[peer, number] = sock

    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        patience = max(1.0, deadline - time.monotonic())
        gate = Gate(selector, listener, key, rank, expected, admit, patience)
        stack.callback(gate.close)
        calls: dict[tuple[int, int], hello.Call] = {}
        for peer, number in sorted(wanted):
            if peer < rank:
                made = calls[peer, number] = hello.Call(selector, addresses[peer], key, rank, number, peer)
                stack.callback(made.close)
        while len(found) < len(wanted):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(_missing(wanted - found.keys(), calls, gate))
            if gate.shortage:
                raise OSError(errno.EMFILE, gate.shortage)
            if look is not None and look():
                raise ConnectionAbortedError("a rank was lost meanwhile")
            if refusals is not None and (
                gone := [peer for (peer, _), each in calls.items() if each.refusals >= refusals]
            ):
                raise ConnectionRefusedError(f"nobody listens at the address of rank {gone[0]}: {addresses[gone[0]]}")
            pause = min(left, _GLANCE, gate.tick(), *(each.tick() for each in calls.values()))
            for ready, _ in selector.select(pause):
                ready.data(ready.fileobj)
            for where in [where for where, each in calls.items() if each.sock is not None]:
                found[where] = cast(socket.socket, calls.pop(where).sock)


def _told(error: Exception) -> str:
    """Returns the part of an error that other ranks need."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"its process or host is out of file descriptors ({LIMIT} is {limit} there)"
    return str(error) or type(error).__name__


def _digit(sock: socket.socket | None) -> str:
    delay = 0.0 if sock is None else _delay(sock)
    return str(min(9, max(0, round(math.log10(delay)) + _SHORTEST))) if delay > 0 else "0"


def _delay(sock: socket.socket) -> float:
    """Returns half of the shortest round trip of a connection so far, in seconds; 0 where it is not known."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP + 4)
    except OSError:
        return 0.0
    found = int.from_bytes(info[_ROUND_TRIP:], sys.byteorder) if len(info) == _ROUND_TRIP + 4 else 0
    return 0.5e-6 * found if found < _NO_ROUND_TRIP else 0.0


def _close(found: dict[tuple[int, int], socket.socket]) -> None:
    for sock in found.values():
        sock.close()


def _missing(missing: Collection[tuple[int, int]], calls: dict[tuple[int, int], hello.Call], gate: Gate) -> str:
    callers = sorted({peer for peer, number in missing if (peer, number) not in calls})
    told = [f"ranks {callers} did not connect in time"] if callers else []
    for peer in sorted({peer for peer, _ in missing} - set(callers)):
        trouble = next(each.trouble for (to, _), each in calls.items() if to == peer)
        told.append(f"rank {peer} was not reached in time ({trouble})")
    if refused := sorted(gate.refused & set(callers)):
        told.append(f"some that called themselves ranks {refused} did not know the job's secret")
    return ", ".join(told)
