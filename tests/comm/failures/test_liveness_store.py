"""The store of the signs of life: what ranks write, where it listens, and what strangers do to it in vain."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua_kernels.comm.failures import liveness_client, liveness_store
from bagua_kernels.comm.failures.liveness_client import Client, StoreError
from bagua_kernels.comm.failures.liveness_store import Host
from bagua_kernels.comm.failures.records import FIELDS, NOTHING, SIGNS, Records
from bagua_kernels.comm.joining import hello
from bagua_kernels.comm.joining.secret import Secret
from tests import limits
from tests.grids import grid

KEY = Secret.random()
until = functools.partial(limits.until, what="the other side notices")


@pytest.fixture(params=["process", "thread"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A store for three ranks, in each of the two ways."""
    if request.param == "thread":
        monkeypatch.setattr(sys, "executable", "")
    made = Host("127.0.0.1", KEY, 3)
    made.wait_until_ready(limits.seconds(30))
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def client(host: Host, rank: int = 0) -> Iterator[Client]:
    made = Client(hello.call(host.address, KEY, rank, 0, 0, limits.seconds(30)))
    try:
        yield made
    finally:
        made.close()


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side ends a connection, with no word but that the secret is another."""
    sock.settimeout(limits.seconds(30))
    try:
        return sock.recv(100) in (b"", hello.REFUSAL)
    except ConnectionResetError:
        return True


def text_of(store: Client, key: str) -> str:
    """Returns the text of a key, "none" if there is none."""
    return store.compare_set(key, "none", "none")


def test_one_rank_reads_what_another_one_writes(host: Host) -> None:
    """Texts, numbers and heartbeats, of which only what has changed is sent."""
    with client(host) as mine, client(host, 1) as theirs:
        assert text_of(mine, "r") == "none"
        assert mine.compare_set("r", "", "Ω" * 100_000) == "Ω" * 100_000
        assert theirs.compare_set("r", "", "second") == "Ω" * 100_000
        assert theirs.compare_set("r", "Ω" * 100_000, "third") == "third"
        assert text_of(mine, "r") == "third"
        assert [mine.add("n", 2), theirs.add("n", -3), mine.add("n", 0)] == [2, -1, -1]
        mine.compare_set("report/0", "", "it is late")
        first = theirs.beat(1, {"moved": 1, "process": ["here", 1, 0]}, -1, -1, 0, FIELDS)
        assert first == (1, "5", {"1": {"moved": [1, 0.0], "process": [["here", 1, 0], 0.0]}}, ["it is late"])
        assert mine.beat(0, {"moved": 7}, first[0], -1, 1, NOTHING) == (2, "0", {}, [])
        version, silent, fields, _ = mine.beat(0, {"moved": 8}, 1, 1, 1, FIELDS)
        assert (silent, fields["0"]["moved"][0], list(fields)) == ("6", 8, ["0"])
        assert mine.beat(0, None, version, version, 1, FIELDS) == (version, "7", {}, [])


def test_signs_contain_what_concerns_everybody() -> None:
    """The processes of this host, once, and everything about ranks that leave."""
    records = Records(4, lambda: 0.0)
    for rank in range(4):
        records.beat(rank, {"process": [f"host {rank % 2}", 1, 0], "moved": rank}, -1, -1, 0, NOTHING)
    version, silent, fields, _ = records.beat(0, {}, -1, -1, 0, SIGNS)
    assert silent == "0"
    assert {rank: set(found) for rank, found in fields.items()} == {"0": {"process"}, "2": {"process"}}
    records.beat(1, {"left": "it has enough"}, -1, -1, 0, NOTHING)
    records.beat(2, {"moved": 100}, -1, -1, 0, NOTHING)
    later, silent, fields, _ = records.beat(0, {}, version, -1, 0, SIGNS)
    assert silent == "8"
    assert {rank: set(found) for rank, found in fields.items()} == {"1": {"moved", "left"}}
    assert records.beat(0, {}, later, -1, 0, SIGNS)[1:] == ("e", {}, [])


@grid(
    cover=1,
    frame={
        "longest": b"\xff\xff\xff\xff",
        "long": (1 << 31).to_bytes(4, "little") + b"x",
        "empty": b"\x00\x00\x00\x00",
        "not JSON": b"\x05\x00\x00\x00abcde",
    },
)
def test_malformed_frames_of_a_rank(host: Host, frame: bytes) -> None:
    """They end that rank's connection, or are refused, and touch no other."""
    with client(host, 1) as theirs, client(host, 2) as broken:
        broken._sock.sendall(frame)
        broken._sock.settimeout(limits.seconds(30))
        answer = broken._sock.recv(1 << 16)
        assert answer == b"" or b"error" in answer
        theirs.compare_set("a", "", "1")
        assert text_of(theirs, "a") == "1"


STRANGERS: dict[str, bytes] = {
    "silent": b"",
    "rubbish": os.urandom(1000),
    "request": (13).to_bytes(4, "little") + b'["add","a",1]',
    "torch": b"\x00\x3a\x1d\xe1\x0d\x00\x00\x00",
    "length": b"\xff" * 16,
    "pickle": pickle.dumps(Path("/")),
    "half": b"bagua\x00\x01\n" + bytes(30),
    "megabytes": b"bagua\x00\x01\n" + bytes(1 << 22),
}


@grid(cover=1, kind=list(STRANGERS))
def test_strangers(host: Host, kind: str) -> None:
    """Neither what they send nor their number keeps ranks from the store, and they leave nothing in it."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(client(host))
        mine.beat(0, {"moved": 1}, -1, -1, 0, NOTHING)
        for _ in range(100):
            sock = stack.enter_context(socket.create_connection(host.address))
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.send(STRANGERS[kind])
        theirs = stack.enter_context(client(host, 1))
        assert theirs.beat(1, None, -1, -1, 0, FIELDS)[2]["0"]["moved"][0] == 1
        assert text_of(theirs, "a") == "none"
        if kind not in ("silent", "half"):
            assert hung_up(sock)
        theirs.beat(1, {"moved": 2}, -1, -1, 0, NOTHING)
        assert mine.beat(0, None, -1, -1, 0, FIELDS)[2]["1"]["moved"][0] == 2


def test_rank_that_comes_again(host: Host) -> None:
    """Its older connection ends; ranks that the job does not have are turned away."""
    with client(host, 1) as old, client(host, 1) as new:
        new.compare_set("a", "", "1")
        assert hung_up(old._sock)
        assert text_of(new, "a") == "1"
    with pytest.raises(OSError, match="no connection within"):
        hello.call(host.address, KEY, 3, 0, 0, 1.0)


def test_close_ends_a_call_under_way(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for an answer does not outlive the connection."""
    ours, _theirs = socket.socketpair()
    with _theirs:
        store, told = Client(ours), []

        def ask() -> None:
            try:
                store.add("a", 1)
            except StoreError as error:
                told.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: store._lock.locked())
        store.close()
        thread.join(limits.seconds(30))
        assert len(told) == 1


def test_call_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose answer trickles in."""
    monkeypatch.setattr(liveness_client, "_LONGEST_CALL", 0.2)
    ours, theirs = socket.socketpair()
    with theirs:
        store = Client(ours)
        theirs.sendall(b"\x10")
        with pytest.raises(StoreError, match="timed out"):
            store.add("a", 0)


@pytest.mark.slow
def test_everything_ends_with_the_host() -> None:
    """Neither the process nor a file descriptor is left, and its clients notice."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    host = Host("127.0.0.1", KEY, 3)
    host.wait_until_ready(limits.seconds(30))
    process = host._process
    assert process is not None
    with client(host) as mine:
        host.close()
        with pytest.raises(StoreError, match="process has ended"):
            mine.add("a", 0)
    assert process.returncode == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_server_answers_while_this_interpreter_does_not() -> None:
    """A rank 0 that is busy in a call that holds the interpreter's lock keeps nobody waiting: it waits for the other rank."""
    host = Host("127.0.0.1", KEY, 3)
    host.wait_until_ready(limits.seconds(30))
    # The other rank is a process, for in this one no thread runs.
    rank = (
        "import sys\n"
        "from bagua_kernels.comm.joining import hello\n"
        "from bagua_kernels.comm.joining.secret import Secret\n"
        "from bagua_kernels.comm.failures.liveness_client import Client\n"
        f"store = Client(hello.call({host.address!r}, Secret(bytes.fromhex({KEY.export()!r})), 1, 0, 0, 30.0))\n"
        "print('here', flush=True)\n"
        "sys.stdin.readline()\n"
        "for beat in range(100):\n"
        "    store.add('beats', 1)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"here\n"
        with client(host) as mine:
            process.stdin.write(b"go\n")
            process.stdin.flush()
            # PyDLL holds the interpreter's lock until the other rank has written, or for as long as the limit.
            written = ctypes.create_string_buffer(struct.pack("ihh", process.stdout.fileno(), select.POLLIN, 0))
            assert ctypes.PyDLL(None).poll(written, 1, int(1e3 * limits.seconds(10))) == 1
            assert process.stdout.readline() == b"done\n"
            assert mine.add("beats", 0) == 100
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
        process.kill()
        process.wait()
        host.close()


@pytest.mark.slow
def test_server_ends_with_a_killed_owner_whose_child_lives(tmp_path: Path) -> None:
    """A forked child that has inherited everything keeps neither the server nor its connections."""
    owner = (
        "import os, sys, time\n"
        "from bagua_kernels.comm.failures.liveness_store import Host\n"
        "from bagua_kernels.comm.joining.secret import Secret\n"
        f"host = Host('127.0.0.1', Secret(bytes.fromhex({KEY.export()!r})), 3)\n"
        "host.wait_until_ready(30.0)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(pid, host._process.pid, *host.address, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        child, server, address, port = process.stdout.readline().split()
        mine = Client(hello.call((address.decode(), int(port)), KEY, 1, 0, 0, limits.seconds(30)))
        mine.add("a", 1)
        process.kill()
        process.wait()
        assert hung_up(mine._sock)
        mine.close()
        os.kill(int(child), 0)  # it lives
        os.kill(int(child), signal.SIGKILL)
        until(lambda: not Path(f"/proc/{int(server)}").exists())
    finally:
        process.stdout.close()  # type: ignore[union-attr]
        process.kill()
        process.wait()


def listening_at(pid: int) -> list[str]:
    """The local addresses on which a process listens, as the kernel's table has them."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(link))
    found = []
    for table in ("tcp", "tcp6"):
        lines = map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:])
        found += [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
    return sorted(found)


def test_it_listens_on_loopback_only(host: Host) -> None:
    """The kernel's own table says so."""
    pid = os.getpid() if host._process is None else host._process.pid
    local = f"0100007F:{host.address[1]:04X}"
    assert local in listening_at(pid)
    if host._process is not None:
        assert listening_at(pid) == [local]
        assert local not in listening_at(os.getpid())


def test_offer_tells_no_secret() -> None:
    """What goes through the exchange does not let anybody in."""
    offers: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        offers.append(json.loads(json.dumps(value)))
        return [offers[-1]]

    secret = Secret.random()
    made = liveness_store.connect(0, 1, exchange, secret, "127.0.0.1")
    assert made is not None
    made.stop("the test is over")
    text = json.dumps(offers)
    assert secret.export() not in text
    assert secret.derive("liveness", offers[0]["token"]).export() not in text
