"""A stranger who reaches torch's store, and by writing into it comes between the ranks: no pickle of his is read."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from bagua_kernels import comm
from bagua_kernels.algorithms import ByteGrad, checkpoint
from bagua_kernels.comm.testing import Processes, free_port
from bagua_kernels.errors import CommunicationError
from tests import limits

# Makes the folder "ran" where it is read; short, because it takes the place of other bytes.
BOMB = b"cos\nmkdir\n(S'ran'\ntR."
# Pickles and texts that are long enough to be replaced: pickles by the length of their frame, behind its mark.
PICKLE = re.compile(rb"\x80[\x04\x05]\x95(?:[\x0b-\xff].|.[^\x00])", re.DOTALL)
TEXT = re.compile(rb"[\[{][ -~]{%d,}" % len(BOMB))
# Gloo publishes the `sockaddr_in` at which a rank listens: family, port, address.
ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
SECRET = {"BAGUA_KERNELS_SECRET": "a secret that torch's store does not know"}
LIMIT = limits.seconds(60)


class Stranger:
    """Gives each rank the address of the stranger's listener instead of the other's, and passes on what comes there.

    He also changes values that ranks gather through the store.

    Gloo compares the two addresses to see which rank calls. Both ranks find the same one only if one of his addresses is above
    all real ones, and the other below.

    Args:
        port: of torch's store.

    Attributes:
        pattern: of what he replaces from now on; None for nothing.
        between: connections of ranks that go through him.
        passed: bytes that he has passed on, or seen in the store.
        replaced: places at which he has put the bomb.
    """

    def __init__(self, port: int) -> None:
        self.pattern: re.Pattern[bytes] | None = None
        self.between = self.passed = self.replaced = 0
        self._store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
        )
        self._known: set[str] = set()
        self._sockets: list[socket.socket] = []
        self._looking = threading.Lock()

    def look(self) -> None:
        """Puts addresses of his own in the place of those that he has not seen yet."""
        with self._looking:
            for key in set(self._store.list_keys()) - self._known:
                self._known.add(key)
                told = self._store.get(key)
                if found := ADDRESS.search(told):
                    port = int.from_bytes(found[1], "big")
                    self._store.set(key, told[: found.start()] + self._own(port, key) + told[found.end() :])
                elif "/gathering/" in key and (changed := self._changed(told)) != told:
                    self._store.set(key, changed)

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def _own(self, port: int, key: str) -> bytes:
        """Listens for what is sent to a rank, and returns that address."""
        host = "127.0.0.2" if key.endswith("/0") else "0.0.0.0"
        listener = socket.create_server((host, 0))
        self._sockets.append(listener)
        threading.Thread(target=self._serve, args=(listener, port), daemon=True).start()
        family = socket.AF_INET.value.to_bytes(2, sys.byteorder)
        return family + listener.getsockname()[1].to_bytes(2, "big") + socket.inet_aton(host)

    def _serve(self, listener: socket.socket, port: int) -> None:
        for caller in accepted(listener):
            self.between += 1
            self._sockets += join(caller, port, self._changed, self._changed)

    def _changed(self, data: bytes) -> bytes:
        self.passed += len(data)
        for found in self.pattern.finditer(data) if self.pattern else ():
            end = found.start() + len(BOMB)
            if end <= len(data):
                self.replaced += 1
                data = data[: found.start()] + BOMB + data[end:]
        return data


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Yields connections until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            yield listener.accept()[0]


def join(
    caller: socket.socket, port: int, there: Callable[[bytes], bytes], back: Callable[[bytes], bytes]
) -> tuple[socket.socket, socket.socket]:
    """Joins a connection to a port of this host, in threads, by a function for each direction."""
    called = socket.create_connection(("127.0.0.1", port))
    for source, target, change in ((caller, called, there), (called, caller, back)):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=pump, args=(source, target, change), daemon=True).start()
    return caller, called


def pump(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(change(data))
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def attacked_store() -> Iterator[tuple[Stranger, int]]:
    """Yields the stranger, and the port at which ranks reach the store.

    Whether he is faster than a rank would be chance, so he has time to look before each of their requests.
    """
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    try:
        store.list_keys()
    except RuntimeError as error:
        pytest.skip(f"torch's store does not list its keys: {error}")
    stranger, listener, held = Stranger(port), socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def request(data: bytes) -> bytes:
        stranger.look()
        return data

    def serve() -> None:
        for caller in accepted(listener):
            held.extend(join(caller, port, request, bytes))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield stranger, listener.getsockname()[1]
    finally:
        for each in (listener, *held):
            each.close()
        stranger.close()
        del store


def saves(folder: str) -> None:
    """Tells whether it could save a checkpoint, and whether anything has read the bomb, by whatever function."""
    os.chdir(folder)

    def noted(event: str, given: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and given == ("os", "mkdir"):
            print("READ", flush=True)

    sys.addaudithook(noted)
    try:
        comm.init(timeout=limits.seconds(20))
        model = ByteGrad(torch.nn.Linear(8, 8))
        print("MADE", flush=True)
        limits.until(Path("go").exists, "the stranger begins", limit=60)
        checkpoint.save(model, "saved")
        model.close()
        comm.shutdown()
        print("SAVED", flush=True)
    except CommunicationError as error:
        print("REFUSED", error, flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sockets", "from_start", "pattern", "end"),
    [
        ("2", True, PICKLE, "SAVED"),
        ("0", False, PICKLE, "has not read"),
        ("2", True, TEXT, "do not have the same secret"),
        ("0", True, PICKLE, "has not read"),
    ],
    ids=["own sockets", "objects over Gloo", "texts of the start", "pickles of the start"],
)
def test_no_pickle_of_his_is_read(
    sockets: str, from_start: bool, pattern: re.Pattern[bytes], end: str, tmp_path: Path
) -> None:
    """Neither while the ranks start nor while they save a checkpoint."""
    with attacked_store() as (stranger, port):
        environment = {
            "BAGUA_KERNELS_SOCKETS": sockets,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_PORT": str(port),
        }
        stranger.pattern = pattern if from_start else None
        with Processes(saves, 2, args=[str(tmp_path)], env=SECRET | environment) as ranks:
            for rank in () if from_start else range(2):
                ranks.wait_for_output(rank, "MADE", LIMIT)
            stranger.pattern = pattern
            (tmp_path / "go").touch()
            results = ranks.wait(LIMIT)
        assert (stranger.between > 0) == (sockets == "0")
        assert stranger.passed > 0
        assert (stranger.replaced > 0) == (end != "SAVED")
    assert not (tmp_path / "ran").exists(), results
    for result in results:
        assert "READ" not in result.stdout, result
        assert result.returncode == 0, result
        assert ("SAVED" if end == "SAVED" else "REFUSED") in result.stdout, result
    # One that has read nothing wrong itself may find the connection closed first.
    assert any(end in result.stdout for result in results), results
