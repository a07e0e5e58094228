"""Connects every rank with every other, by as many sockets as are wanted."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from bagua_kernels import knobs
from bagua_kernels.errors import CommunicationError

_HELLO = struct.Struct("<16sII")  # token of the mesh, rank, number of the socket
_SIOCGIFADDR = 0x8915


def connect(
    rank: int, size: int, stripes: int, exchange: Callable[[Any], list[Any]], timeout: float, host: str = ""
) -> dict[int, list[socket.socket]]:
    """Connects the ranks; collective.

    Each rank listens and tells all where; a rank connects to those before it and is connected to by those after it.

    Args:
        rank: this rank.
        size: the number of ranks.
        stripes: sockets between two ranks.
        exchange: gathers an object of every rank, in rank order.
        timeout: seconds for all of it.
        host: the address to listen on; by default that of the interface `GLOO_SOCKET_IFNAME`, else the one from which
            MASTER_ADDR, else the host's name, is reached.

    Returns:
        For each other rank its sockets, in an order that is the same at both ends.

    Raises:
        CommunicationError: if a connection could not be made; on all ranks, naming the ranks concerned.
    """
    # Whoever fails waits for the others to tell them, and their wait has to end before its own does.
    deadline = time.monotonic() + 0.8 * timeout
    found: dict[int, list[socket.socket]] = {}
    problem, token = "", secrets.token_bytes(16)
    with contextlib.ExitStack() as unfinished:
        with contextlib.ExitStack() as stack:
            listener = None
            try:
                listener = stack.enter_context(_listen(host or own_address(), size * stripes))
            except (OSError, ValueError) as error:
                problem = str(error)
            offers = exchange((listener.getsockname()[:2] if listener else problem, token))
            token = offers[0][1]
            if listener is not None and not any(isinstance(where, str) for where, _ in offers):
                try:
                    for peer in range(rank):
                        found[peer] = []
                        for number in range(stripes):
                            sock = _call(offers[peer][0], token, rank, number, deadline)
                            found[peer].append(unfinished.enter_context(sock))
                    for peer, socks in _accept(listener, token, range(rank + 1, size), stripes, deadline).items():
                        found[peer] = [unfinished.enter_context(sock) for sock in socks]
                except OSError as error:
                    problem = str(error) or type(error).__name__
        problems = {peer: text for peer, text in enumerate(exchange(problem)) if text}
        if problems:
            told = "; ".join(f"rank {peer}: {text}" for peer, text in problems.items())
            raise CommunicationError(
                f"the ranks could not connect to one another: {told}; set GLOO_SOCKET_IFNAME to the network interface "
                "that the ranks share, and see that no firewall closes its ports"
            )
        unfinished.pop_all()
    return found


def own_address() -> str:
    """Returns the address of this host under which the other ranks most likely reach it."""
    interface = knobs.GLOO_SOCKET_IFNAME.get().split(",")[0]
    if interface:
        return address_of(interface)
    master = knobs.MASTER_ADDR.get()
    if master in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    # The last one is an address that nobody has: on its way there lies the interface to the world.
    for name in filter(None, (master, socket.gethostname(), "192.0.2.1")):
        try:
            family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                # No packet is sent: connecting a datagram socket only chooses the route, and with it the address.
                probe.connect(address)
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        # A host's own name often stands for its loopback, where other hosts cannot reach it.
        if not ipaddress.ip_address(found.split("%")[0]).is_loopback:
            return found
    return "127.0.0.1"


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface, or its first IPv6 address of wider than link scope.

    Raises:
        ValueError: if there is no such interface, or it has no address.
    """
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={interface!r} is no network interface of this host; it has {', '.join(known)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass  # it has no IPv4 address
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as table:
            for digits, _, _, scope, _, name in map(str.split, table):
                if name == interface and scope in ("00", "10"):
                    return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    raise ValueError(f"the network interface {interface!r} has no address: choose another by GLOO_SOCKET_IFNAME")


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {address}: {error}") from error
    return listener


def _call(address: tuple[str, int], token: bytes, rank: int, number: int, deadline: float) -> socket.socket:
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            break
        except ConnectionRefusedError:
            # The listener's queue may be full for a moment.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_HELLO.pack(token, rank, number))
    except OSError:
        sock.close()
        raise
    return sock


def _accept(
    listener: socket.socket, token: bytes, peers: range, stripes: int, deadline: float
) -> dict[int, list[socket.socket]]:
    """Collects the calls of the ranks after this one; others that call are turned away."""
    wanted = {(peer, number) for peer in peers for number in range(stripes)}
    found: dict[tuple[int, int], socket.socket] = {}
    heard: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(found) < len(wanted):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready or time.monotonic() > deadline:
                    missing = sorted({peer for peer, number in wanted - found.keys()})
                    raise TimeoutError(f"ranks {missing} did not connect in time")
                for key, _ in ready:
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is listener:
                        try:
                            caller, _ = listener.accept()
                        except OSError:
                            continue  # it has hung up already
                        caller.setblocking(False)
                        heard[caller] = b""
                        selector.register(caller, selectors.EVENT_READ)
                        continue
                    try:
                        data = sock.recv(_HELLO.size - len(heard[sock]))
                    except OSError:
                        data = b""  # a stranger that hung up is none of this rank's business
                    heard[sock] += data
                    if data and len(heard[sock]) < _HELLO.size:
                        continue
                    selector.unregister(sock)
                    hello = heard.pop(sock)
                    theirs, peer, number = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1, 0)
                    if not secrets.compare_digest(theirs, token) or (peer, number) not in wanted - found.keys():
                        sock.close()
                        continue
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    found[peer, number] = sock
        except OSError:
            for sock in found.values():
                sock.close()
            raise
        finally:
            for sock in heard:
                sock.close()
    return {peer: [found[peer, number] for number in range(stripes)] for peer in peers}
