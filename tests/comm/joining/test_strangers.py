"""A job whose every listener of our own is attacked from the moment it opens: it goes on, and executes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.backends.sockets import mesh
from bagua_kernels.comm.failures.records import SIGNS
from bagua_kernels.comm.joining import gate
from bagua_kernels.comm.testing import run_processes
from tests import limits

_ROUNDS = 200  # at most, on each listener


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _attack(address: tuple[str, int], words: list[bytes], count: list[int], over: threading.Event) -> None:
    """Connects again and again while somebody listens, and keeps the connections."""
    held: list[socket.socket] = []
    for number in range(_ROUNDS):
        if over.is_set():
            break
        try:
            sock = socket.create_connection(address, 5)
            sock.setblocking(False)
            held.append(sock)
            count[0] += 1
            sock.send(words[number % len(words)])
        except BlockingIOError:
            continue
        except OSError:
            time.sleep(0.005)
    for sock in held:
        sock.close()


def _open_to_others() -> list[str]:
    """Where this process listens for more than this host, torch's store apart, by the kernel's tables."""
    own = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(link))
    found = []
    for table in ("tcp", "tcp6"):
        lines = map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])
        found += [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]
    store = f":{int(os.environ['MASTER_PORT']):04X}"
    return [where for where in found if not where.endswith(store) and not where.startswith("0100007F:")]


def _trains(folder: str) -> None:
    rank = int(os.environ["RANK"])
    bomb = pickle.dumps(Bomb(f"{folder}/executed{rank}"))
    magic = b"bagua\x00\x01\n"
    recorded = magic + bytes(8) + os.urandom(64)
    words = [b"", os.urandom(4000), b"\xff" * 100, bomb, len(bomb).to_bytes(4, "little") + bomb, magic, recorded]
    listen, count, over, threads = gate.listen, [0], threading.Event(), []
    addresses: set[str] = set()

    def attacked(address: str, backlog: int) -> socket.socket:
        listener = listen(address, backlog)
        where = listener.getsockname()[:2]
        addresses.add(where[0])
        threads.append(threading.Thread(target=_attack, args=(where, words, count, over)))
        threads[-1].start()
        return listener

    gate.listen = mesh.listen = attacked
    c = comm.init(timeout=limits.seconds(60))
    for step in range(20):
        x = torch.full((1000,), float(c.rank + step), dtype=torch.float32)
        c.all_reduce(x).wait()
        assert bool((x == sum(range(c.size)) + step * c.size).all())
        assert c.all_gather_object(c.rank) == list(range(c.size))
    pair = c.split([0, 1])
    assert pair is None or pair.all_gather_object(c.rank) == [0, 1]
    c.barrier().wait()
    signs = c.session.liveness  # type: ignore[attr-defined]
    over.set()
    for thread in threads:
        thread.join()
    assert signs._board._store.beat(c.rank, None, -1, -1, 0, SIGNS)[1] == "0"  # it still answers
    print(json.dumps([count[0], sorted(addresses), _open_to_others()]))
    comm.shutdown()


@pytest.mark.slow
def test_attacked_job_goes_on(tmp_path: Path) -> None:
    """Each rank's sockets, those of a split too, and the store, from before `init` to the end."""
    secret = {"BAGUA_KERNELS_SECRET": "a secret that torch's store does not know"}
    results = run_processes(_trains, 3, args=[str(tmp_path)], env=secret, timeout=limits.seconds(120))
    assert [result.returncode for result in results] == [0, 0, 0], results
    for result in results:
        attacks, addresses, others = json.loads(result.stdout)
        assert attacks > 0
        assert addresses == ["127.0.0.1"]
        assert others == []
    assert list(tmp_path.iterdir()) == []
