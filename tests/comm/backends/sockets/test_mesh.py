"""How ranks connect: with strangers at the door and with ranks that do not come."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.sockets import mesh
from bagua_kernels.comm.joining import hello
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.grids import grid

Links = dict[int, list[socket.socket]]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a file descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def shut(links: Links) -> None:
    """Closes all sockets."""
    for sock in [sock for socks in links.values() for sock in socks]:
        sock.close()


def prove(links: Links, rank: int) -> None:
    """Checks that each socket ends where it should: both ends say who they are, and which socket it is."""
    for socks in links.values():
        for number, sock in enumerate(socks):
            sock.settimeout(limits.seconds(10))
            sock.sendall(struct.pack("<II", rank, number))
    for peer, socks in links.items():
        for number, sock in enumerate(socks):
            assert struct.unpack("<II", sock.recv(8, socket.MSG_WAITALL)) == (peer, number)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("size", "stripes"), [(2, 1), (2, 5), (5, 2), (12, 1)])
def test_everyone_is_connected_with_everyone(size: int, stripes: int) -> None:
    """By as many sockets as are wanted, in the same order at both ends."""

    def fn(c: Communicator) -> None:
        links = mesh.connect(c.rank, c.size, stripes, c.all_gather_object, 10.0, "127.0.0.1", secret=c._sealed().secret)
        try:
            assert sorted(links) == [peer for peer in range(size) if peer != c.rank]
            assert {len(socks) for socks in links.values()} == {stripes}
            prove(links, c.rank)
            c.barrier().wait()
        finally:
            shut(links)

    run_ranks(size, fn)


def gatherer(c: Communicator, strangers: Any) -> Any:
    """Gathers objects, and lets strangers know what was gathered first."""
    calls: list[object] = []

    def exchange(obj: object) -> list[Any]:
        everyone = c.all_gather_object(obj)
        if not calls and c.rank == 1:
            strangers(everyone)
        calls.append(obj)
        # The strangers are at the door before the ranks are.
        c.barrier().wait()
        return everyone

    return exchange


def reset(sock: socket.socket) -> None:
    """Closes a connection the rude way."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def opening(key: Secret, rank: int, number: int = 0, peer: int = 0) -> bytes:
    """The first message of a rank that calls another."""
    claim, nonce = struct.pack("<II", rank, number), os.urandom(32)
    signature = key.sign(b"opening", peer.to_bytes(4, "little"), claim, nonce)
    return b"bagua\x00\x01\n" + claim + nonce + signature


KINDS = ["silent", "rubbish", "half", "unsigned", "rank", "other rank", "unproven", "leaves", "resets", "pickle"]


@grid(cover=1, kind=KINDS)
def test_strangers_are_turned_away(kind: str) -> None:
    """Whatever they send, and even if one has come by a signature, the ranks find one another."""
    held: list[socket.socket] = []
    shared: list[Secret] = []

    def strangers(offers: list[Any]) -> None:
        address, token = offers[0]
        key = shared[0].derive("mesh", token)
        for _ in range(3):
            sock = socket.create_connection(address, 10)
            sock.sendall(
                {
                    "silent": b"",
                    "rubbish": os.urandom(5000),
                    "half": opening(key, 1)[:-1],
                    "unsigned": opening(Secret.random(), 1),
                    "rank": opening(key, 77),
                    "other rank": opening(key, 1, peer=2),
                    "unproven": opening(key, 1) + bytes(32),
                    "leaves": opening(key, 1)[:20],
                    "resets": opening(key, 1)[:20],
                    "pickle": pickle.dumps((address, token)),
                }[kind]
            )
            if kind == "leaves":
                sock.close()
            elif kind.startswith("resets"):
                reset(sock)
            else:
                held.append(sock)

    def fn(c: Communicator) -> None:
        shared.append(c._sealed().secret)
        links = mesh.connect(c.rank, c.size, 2, gatherer(c, strangers), 5.0, "127.0.0.1", secret=c._sealed().secret)
        try:
            prove(links, c.rank)
            c.barrier().wait()
        finally:
            shut(links)

    try:
        run_ranks(3, fn)
    finally:
        for sock in held:
            sock.close()


@pytest.mark.parametrize("absent", [1, 2])
def test_rank_that_never_connects(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear which one it is, before the time of the exchange is up."""
    start = hello.Call._start
    heard: list[str] = []

    def refuse(call: hello.Call) -> None:
        if struct.unpack("<II", call._claim)[0] == absent:
            raise OSError("no way out")
        start(call)

    monkeypatch.setattr(hello.Call, "_start", refuse)

    def fn(c: Communicator) -> None:
        def exchange(obj: Any) -> list[Any]:
            if "in time" in obj:
                time.sleep(0.1)  # a busy machine
            return c.all_gather_object(obj)

        with pytest.raises(CommunicationError, match="could not connect to one another") as caught:
            mesh.connect(c.rank, c.size, 1, exchange, c.timeout, "127.0.0.1", secret=c._sealed().secret)
        heard.append(str(caught.value))

    run_ranks(3, fn, timeout=limits.seconds(1))
    assert len(set(heard)) == 1
    assert f"rank {absent}: no way out" in heard[0]
    assert f"rank 0: ranks [{absent}] did not connect in time" in heard[0]
    assert "GLOO_SOCKET_IFNAME" in heard[0]


def test_second_socket_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is closed again."""
    start = hello.Call._start

    def refuse(call: hello.Call) -> None:
        if struct.unpack("<II", call._claim)[1] == 1:
            raise OSError("too many")
        start(call)

    monkeypatch.setattr(hello.Call, "_start", refuse)

    def fn(c: Communicator) -> None:
        with pytest.raises(CommunicationError, match="rank 1: too many"):
            mesh.connect(c.rank, c.size, 2, c.all_gather_object, 0.5, "127.0.0.1", secret=c._sealed().secret)

    run_ranks(2, fn, timeout=limits.seconds(5))


def test_rank_with_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides hear of it: the one that calls, and the one that is called."""
    heard: list[str] = []

    def fn(c: Communicator) -> None:
        secret = Secret.random() if c.rank == 1 else c._sealed().secret
        with pytest.raises(CommunicationError) as caught:
            mesh.connect(c.rank, c.size, 1, c.all_gather_object, 1.0, "127.0.0.1", secret=secret)
        heard.append(str(caught.value))

    run_ranks(2, fn, timeout=limits.seconds(20))
    assert len(set(heard)) == 1
    assert "rank 1: 127.0.0.1:" in heard[0]
    assert "does not know the secret of this rank" in heard[0]
    assert "BAGUA_KERNELS_SECRET" in heard[0]
    assert "rank 0: ranks [1] did not connect in time, some that called themselves ranks [1] did not know" in heard[0]


def test_without_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that cannot accept says so at once, and does not spin until the time is up."""
    accept, tries = socket.socket.accept, []

    def exhausted(self: socket.socket) -> Any:
        tries.append(self)
        raise OSError(errno.EMFILE, "Too many open files")

    def fn(c: Communicator) -> None:
        with pytest.raises(CommunicationError, match=r"rank 0: .*out of file descriptors \(`ulimit -n`") as caught:
            mesh.connect(c.rank, c.size, 1, c.all_gather_object, 3.0, "127.0.0.1", secret=c._sealed().secret)
        assert "GLOO_SOCKET_IFNAME" not in str(caught.value)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    run_ranks(2, fn, timeout=limits.seconds(20))
    monkeypatch.setattr(socket.socket, "accept", accept)
    assert len(tries) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_exchange_that_fails(which: int) -> None:
    """Where the ranks cannot even tell one another, no socket is left open."""

    def fn(c: Communicator) -> None:
        calls: list[object] = []

        def exchange(obj: object) -> list[Any]:
            calls.append(obj)
            everyone = c.all_gather_object(obj)
            if len(calls) > which:
                raise CommunicationError("lost for words")
            return everyone

        with pytest.raises(CommunicationError, match="lost for words"):
            mesh.connect(c.rank, c.size, 2, exchange, 5.0, "127.0.0.1", secret=c._sealed().secret)

    run_ranks(2, fn)


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1, 2}])
def test_unknown_interface(bad: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear of it at once, though only some are concerned."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")

    def fn(c: Communicator) -> None:
        with pytest.raises(CommunicationError, match=r"rank .: GLOO_SOCKET_IFNAME='nosuch0' is no network") as caught:
            mesh.connect(
                c.rank,
                c.size,
                1,
                c.all_gather_object,
                20.0,
                "" if c.rank in bad else "127.0.0.1",
                secret=c._sealed().secret,
            )
        assert {rank for rank in range(3) if f"rank {rank}:" in str(caught.value)} == bad

    run_ranks(3, fn)


def test_address_that_cannot_be_listened_on() -> None:
    """The error names it, on all ranks."""

    def fn(c: Communicator) -> None:
        with pytest.raises(CommunicationError, match=r"rank 1: cannot listen on 192\.0\.2\.1"):
            mesh.connect(
                c.rank,
                c.size,
                1,
                c.all_gather_object,
                20.0,
                "192.0.2.1" if c.rank else "127.0.0.1",
                secret=c._sealed().secret,
            )

    run_ranks(2, fn)


def test_listener_is_gone_afterwards() -> None:
    """Nobody can connect to a mesh that is complete."""
    offers: list[Any] = []

    def fn(c: Communicator) -> None:
        links = mesh.connect(c.rank, c.size, 1, gatherer(c, offers.extend), 5.0, "127.0.0.1", secret=c._sealed().secret)
        c.barrier().wait()
        shut(links)

    run_ranks(2, fn)
    for address, _ in offers:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 1)
