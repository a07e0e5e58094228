"""How the two ends of a connection recognise each other, with strangers who know everything but the secret."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bagua_kernels.comm.joining import gate, hello
from bagua_kernels.comm.joining.secret import Secret
from tests import limits

MAGIC = b"bagua\x00\x01\n"


class Host:
    """A gate of rank 0 with a loop of its own."""

    def __init__(self, key: Secret, wanted: Callable[[int, int], bool] = lambda rank, number: True) -> None:
        """Listens on loopback, for connections that are `wanted`."""
        self.listener = gate.listen("127.0.0.1", 128)
        self.address = self.listener.getsockname()[:2]
        self.admitted: list[tuple[socket.socket, int, int]] = []
        self.turns = 0
        self._stop = threading.Event()
        self._selector = selectors.DefaultSelector()
        self.gate = gate.Gate(self._selector, self.listener, key, 0, wanted, lambda *one: self.admitted.append(one))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.turns += 1
            for ready, _ in self._selector.select(min(0.02, self.gate.tick())):
                ready.data(ready.fileobj)

    def close(self) -> None:
        """Ends the loop."""
        self._stop.set()
        self._thread.join()
        self.gate.close()
        self._selector.close()
        self.listener.close()
        for sock, _, _ in self.admitted:
            sock.close()


@contextlib.contextmanager
def hosting(key: Secret, **options: Any) -> Iterator[Host]:
    host = Host(key, **options)
    try:
        yield host
    finally:
        host.close()


def until(condition: Callable[[], bool]) -> None:
    limits.until(condition, "the gate has come so far", limit=20, pause=0.002)


def opening(key: Secret, rank: int = 1, number: int = 0, peer: int = 0) -> bytes:
    claim, nonce = struct.pack("<II", rank, number), os.urandom(32)
    return MAGIC + claim + nonce + key.sign(b"opening", peer.to_bytes(4, "little"), claim, nonce)


def everything(sock: socket.socket) -> bytes:
    """All that arrives until the other side hangs up."""
    sock.settimeout(limits.seconds(20))
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def test_two_that_share_the_secret() -> None:
    """Both ends have the connection, and nothing but what is sent afterwards is in it."""
    key = Secret.random()
    with hosting(key) as host, hello.call(host.address, key, 3, 1, 0, limits.seconds(20)) as theirs:
        until(lambda: bool(host.admitted))
        ours, rank, number = host.admitted[0]
        assert (rank, number) == (3, 1)
        theirs.settimeout(limits.seconds(20))
        ours.settimeout(limits.seconds(20))
        theirs.sendall(b"from rank 3")
        ours.sendall(b"from rank 0")
        assert ours.recv(100) == b"from rank 3"
        assert theirs.recv(100) == b"from rank 0"
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not ours.get_inheritable()
        assert not theirs.get_inheritable()


def test_caller_with_another_secret() -> None:
    """It hears of it at once, and the gate notes which rank it claimed to be."""
    with hosting(Secret.random()) as host:
        with pytest.raises(
            hello.HelloError, match=r"where rank 0 should be, does not know the secret .* BAGUA_KERNELS_SECRET"
        ):
            hello.call(host.address, Secret.random(), 1, 0, 0, limits.seconds(20))
        assert host.gate.refused == {1}
        assert not host.admitted


def test_listener_with_another_secret() -> None:
    """A stranger that answers in a rank's place is found out, and gets no proof that it could use elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        got: list[bytes] = []

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(80, socket.MSG_WAITALL)
                sock.sendall(os.urandom(64))
                got.append(everything(sock))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(hello.HelloError, match="does not know the secret"):
            hello.call(server.getsockname(), Secret.random(), 1, 0, 0, limits.seconds(20))
        thread.join()
        assert got == [b""]


@pytest.mark.parametrize(
    "rubbish",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, struct.pack("<Q", 1 << 62) + b"x" * 100, MAGIC + os.urandom(72)],
    ids=["http", "bytes", "length", "magic"],
)
def test_rubbish(rubbish: bytes) -> None:
    """It is not answered, except that who speaks the protocol is told that the secret is another."""
    key = Secret.random()
    with hosting(key) as host:
        with socket.create_connection(host.address) as sock:
            sock.sendall(rubbish)
            assert everything(sock) in (b"", b"bagua_kernels: this job has another secret".ljust(64))
        hello.call(host.address, key, 1, 0, 0, limits.seconds(20)).close()
        until(lambda: len(host.admitted) == 1)


def test_replayed_opening() -> None:
    """Who has heard a rank call gets no answer for the same words."""
    key = Secret.random()
    words = opening(key)
    with hosting(key) as host:
        with socket.create_connection(host.address) as first, socket.create_connection(host.address) as second:
            first.sendall(words)
            first.settimeout(limits.seconds(20))
            assert len(first.recv(64, socket.MSG_WAITALL)) == 64
            second.sendall(words)
            assert everything(second) == b""
        assert not host.admitted


def test_replayed_proof() -> None:
    """A proof holds for the nonces of its own connection only."""
    key = Secret.random()
    claim = struct.pack("<II", 1, 0)
    with hosting(key) as host:
        proofs = []
        for replay in (False, True):
            with socket.create_connection(host.address) as sock:
                words = opening(key)
                sock.sendall(words)
                theirs = sock.recv(64, socket.MSG_WAITALL)[:32]
                proofs.append(key.sign(b"proof", bytes(4), claim, words[16:48], theirs))
                sock.sendall(proofs[0])
                if replay:
                    assert everything(sock) == b""
                else:
                    until(lambda: len(host.admitted) == 1)
        assert len(host.admitted) == 1


def test_reflected_messages() -> None:
    """What the listener signs is no proof, and what a rank says to one rank does not open another's door."""
    key = Secret.random()
    with hosting(key) as host:
        with socket.create_connection(host.address) as sock:
            sock.sendall(opening(key))
            sock.sendall(sock.recv(64, socket.MSG_WAITALL)[32:])
            assert everything(sock) == b""
        with socket.create_connection(host.address) as sock:
            sock.sendall(opening(key, peer=2))
            assert everything(sock) == b"bagua_kernels: this job has another secret".ljust(64)
        assert not host.admitted


def test_rank_that_is_not_expected() -> None:
    """Somebody who knows the secret, but comes twice or from nowhere, is turned away."""
    key = Secret.random()
    with hosting(key, wanted=lambda rank, number: rank < 4) as host, socket.create_connection(host.address) as sock:
        sock.sendall(opening(key, rank=4))
        assert everything(sock) == b""


def test_many_strangers_keep_nobody_out() -> None:
    """Of hundreds of silent connections only some are kept, and a rank still comes in."""
    key = Secret.random()
    with hosting(key) as host, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(host.address))
        hello.call(host.address, key, 1, 0, 0, limits.seconds(20)).close()
        until(lambda: len(host.admitted) == 1)
        assert len(host.gate._callers) <= 64


def test_slow_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that trickle in buy no time."""
    monkeypatch.setattr(gate, "_PATIENCE", 0.3)
    with hosting(Secret.random()) as host, socket.create_connection(host.address) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in MAGIC + bytes(72):
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
        assert everything(sock) == b""
        assert not host.gate._callers


@pytest.mark.slow
def test_flood_is_read_for_80_bytes_only() -> None:
    """Megabytes without a pause cost the listener no more memory than an opening."""
    with hosting(Secret.random()) as host, socket.create_connection(host.address) as sock:
        sock.settimeout(limits.seconds(20))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(MAGIC + bytes(1 << 30))
        until(lambda: not host.gate._callers)


def test_call_is_repeated_until_somebody_listens() -> None:
    """A listener that hangs up before it answers, as one beset by strangers may, is called again."""
    key = Secret.random()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        thread = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(3)])
        thread.start()
        with pytest.raises(TimeoutError, match="hung up"):
            hello.call(address, key, 1, 0, 0, 1.0)
        thread.join()


def test_signatures_tell_their_parts_apart() -> None:
    """Neither a shifted border between two parts nor another purpose keeps a signature valid."""
    secret = Secret.random()
    signature = secret.sign(b"ab", b"c")
    assert secret.verify(signature, b"ab", b"c")
    assert not secret.verify(signature, b"a", b"bc")
    assert not secret.verify(signature, b"abc")
    assert not secret.derive("other").verify(signature, b"ab", b"c")
    assert secret.derive("x", "y").sign(b"") != secret.derive("xy").sign(b"")
    assert Secret.from_text("t" * 20).sign(b"") == Secret.from_text("t" * 20).sign(b"")


def test_secret_does_not_leave_by_accident() -> None:
    """It is neither printed nor pickled."""
    secret = Secret.random()
    assert secret.export() not in repr(secret) + str(vars(secret).keys())
    with pytest.raises(TypeError, match="BAGUA_KERNELS_SECRET"):
        pickle.dumps(secret)
