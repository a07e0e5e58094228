"""The lab's links are as slow as asked for, programs find their way in it, and nothing of it is left."""

from __future__ import annotations

import functools
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.netlab import probe as netlab_probe
from bench.netlab.lab import Lab, LabError, available, remove_remains
from tests import limits

ROOT = Path(__file__).parents[3]
until = functools.partial(limits.until, limit=20.0, pause=0.05)

SENDER = """
import socket, time
while True:
    try:
        peer = socket.create_connection(("h1", 5000), timeout=1)
        break
    except OSError:
        time.sleep(0.02)
peer.settimeout(None)
while True:
    peer.sendall(bytes(1 << 16))
"""
RECEIVER = """
import socket
with socket.create_server(("h1", 5000)) as server:
    peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""
WHO = """
import json, os, socket
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS MORE"
own = socket.gethostname()
print(json.dumps([own, socket.gethostbyname(own), {name: os.environ[name] for name in names.split()}]))
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(tensor.unique().tolist())
dist.destroy_process_group()
"""
OPEN = """
import sys, time
from bench.netlab.lab import Lab
with Lab(hosts=2, delay=1) as lab:
    lab.start(0, ["sleep", "1000"])
    print(lab.tag, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _lab_can_be_made() -> None:
    if reason := available():
        pytest.skip(reason)


def left(tag: str) -> list[str]:
    """Namespaces, files and processes of a lab."""
    namespaces = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=limits.seconds(20)
    ).stdout
    files = [str(file) for file in Path("/etc/netns").glob(f"{tag}*")]
    relays = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            relays += [str(file)] * (tag in file.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [line for line in namespaces.splitlines() if tag in line] + files + relays


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def rates(namespace: str, device: str) -> list[tuple[str, float]]:
    """The kind and the rate, in bytes a second, of each queue of a device, as the kernel has them."""
    command = ["tc", "-n", namespace, "-json", "qdisc", "show", "dev", device]
    found = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=limits.seconds(20)).stdout
    )
    return [(each["kind"], float(each["options"]["rate"])) for each in found]


def test_links_are_as_slow_as_asked_for() -> None:
    """Traffic passes queues that the kernel holds to the rate, and a relay that was given the delay."""
    with Lab(hosts=2, rate=100, delay=5) as lab:
        for host in range(2):
            assert rates(f"{lab.tag}-h{host}", "eth0") == [("tbf", 100e6 / 8)]
            assert rates(f"{lab.tag}-switch", f"p{host}") == [("tbf", 100e6 / 8)]
        (relay,) = (Path(file) for file in left(lab.tag) if file.endswith("/cmdline"))
        told = json.loads(relay.read_text().split("\0")[-2])
        assert (told["delay"], len(told["pairs"])) == (0.005, 2)
        assert all(map(math.isfinite, netlab_probe.measure(lab, seconds=0.1)))
        assert lab.bytes_sent(1) > 25 * 66  # 25 round trips of a byte with its headers, and the stream
        until(lambda: lab.bytes_sent(1) == lab.bytes_received(0), "every byte that h1 sent came to h0")
        lab.shape(0, 50)
        assert rates(f"{lab.tag}-h0", "eth0") == [("tbf", 50e6 / 8)]


def test_cut_host_gets_nothing_until_it_joins_again() -> None:
    with Lab(hosts=2, rate=200, delay=2) as lab:
        lab.start(1, python(RECEIVER))
        lab.start(0, python(SENDER))
        until(lambda: lab.bytes_received(1) > 1e6, "traffic")
        lab.cut(1)

        def still() -> bool:
            """True if nothing arrives for a while; what is queued still does."""
            before = lab.bytes_received(1)
            time.sleep(0.3)
            return lab.bytes_received(1) == before

        until(still, "no traffic after the cut")
        at_cut = lab.bytes_received(1)
        lab.join(1)
        until(lambda: lab.bytes_received(1) > at_cut + 1e6, "traffic after the host joined again")
        lab.shape(1, None)
        before = lab.bytes_received(1)
        assert before > at_cut
        until(lambda: lab.bytes_received(1) > before + 1e6, "traffic after the limit was lifted")


def test_ranks_know_who_and_where_they_are() -> None:
    with Lab(hosts=2) as lab:
        results = lab.run([*python(WHO), "{rank}"], per_host=2, env={"MORE": "{rank}"})
        assert [result.returncode for result in results] == [0] * 4, results
        told = [json.loads(result.stdout) for result in results]
        assert [(name, address) for name, address, _ in told] == [(f"h{h}", lab.address(h)) for h in (0, 0, 1, 1)]
        assert [values.pop("RANK") for _, _, values in told] == list("0123")
        assert [values.pop("LOCAL_RANK") for _, _, values in told] == list("0101")
        assert (
            told[0][2]
            == told[3][2]
            == {
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": lab.address(0),
                "MASTER_PORT": "29501",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "MORE": "{rank}",
            }
        )
        words = lab.run(["echo", "{rank} of {world} on {host}, {unknown}"])
        assert [result.stdout for result in words] == ["0 of 2 on 0, {unknown}\n", "1 of 2 on 1, {unknown}\n"]


def test_ranks_that_take_too_long_are_ended() -> None:
    with Lab(hosts=2) as lab:
        first, second = lab.run(["sh", "-c", "echo here; test {rank} = 0 || sleep 1000"], timeout=limits.seconds(1))
    assert (first.returncode, first.ended, first.stdout) == (0, False, "here\n")
    assert (second.returncode, second.ended, second.stdout) == (-signal.SIGTERM, True, "here\n")


def test_command_line_runs_ranks() -> None:
    command = [
        sys.executable,
        "-m",
        "bench.netlab",
        "run",
        "-n",
        "2",
        "--rate",
        "100",
        "--",
        "sh",
        "-c",
        "exit {rank}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limits.seconds(60))
    assert done.returncode == 1
    assert "rank 0: gave 0" in done.stderr
    assert "rank 1: gave 1" in done.stderr


@pytest.mark.slow
def test_gloo_reduces_between_hosts() -> None:
    with Lab(hosts=2, rate=1000, delay=1) as lab:
        results = lab.run(python(ALL_REDUCE), timeout=limits.seconds(60))
        assert [(result.returncode, result.stdout) for result in results] == [(0, "[3.0]\n")] * 2, results
        assert lab.bytes_sent(0) > 4000


def test_two_labs_do_not_meet() -> None:
    """In one network, a second server could not have the same address."""
    listening = "import socket, time; s = socket.create_server(('h0', 5000)); print('up', flush=True); time.sleep(1000)"
    with Lab(hosts=1) as one, Lab(hosts=1) as other:
        for lab in (one, other):
            answer = lab.start(0, python(listening), stderr=subprocess.STDOUT).stdout
            assert answer is not None
            assert answer.readline() == "up\n"


def test_nothing_is_left_after_an_error() -> None:
    lab = Lab(hosts=2, delay=1)

    def fail() -> None:
        with lab:
            lab.start(1, ["setsid", "--fork", "sleep", "1000"])
            assert len(left(lab.tag)) >= 6
            raise KeyError("the caller's")

    with pytest.raises(KeyError, match="the caller's"):
        fail()
    assert left(lab.tag) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    """A killed process cannot clean up: its relay ends by itself, the rest is removed by whoever comes next."""
    with subprocess.Popen(python(OPEN), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tag = process.stdout.readline().strip()
        assert left(tag)
        process.send_signal(number)
        assert process.wait(timeout=limits.seconds(20)) == (128 + number if number == signal.SIGTERM else -number)
    if number == signal.SIGKILL:
        remove_remains()
    until(lambda: not left(tag), "nothing left")


def test_a_relay_that_died_is_told() -> None:
    def kill() -> None:
        with Lab(hosts=1, delay=1) as lab:
            relays = [file for file in left(lab.tag) if file.endswith("/cmdline")]
            assert len(relays) == 1
            subprocess.run(["kill", "-KILL", relays[0].split("/")[2]], check=True, timeout=limits.seconds(20))
            until(lambda: ") Z " in Path(relays[0]).with_name("stat").read_text(), "the relay's end")

    with pytest.raises(LabError, match="relay ended"):
        kill()


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"jitter": 1.0}, {"delay": 1, "jitter": 2.0}, {"loss": 1.0}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"got|ask for"):
        Lab(**wrong)  # type: ignore[arg-type]
