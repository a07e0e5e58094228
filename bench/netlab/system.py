"""What the lab asks of the system: commands, namespaces, links with a limit, and processes that end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

_FILES = Path("/etc/netns")
_MTU = 1500
_FRAME = _MTU + 14
_HEADERS = 52  # of IP and TCP, with time stamps
_UNLIMITED = 100_000.0  # Mbit/s; still through a bucket, which counts the bytes on the wire
_BUCKET_MS = 2.0
_QUEUE_MS = 20.0
# Windows for the fastest long link, and the usual congestion control, or another one that namespaces may use. IPv6 only on
# the loopback, because devices would send packets of their own.
_SETTINGS = """
cd /proc/sys/net/ipv4 && echo 4096 131072 33554432 > tcp_rmem && echo 4096 65536 33554432 > tcp_wmem || exit
{ echo cubic > tcp_congestion_control || echo reno > tcp_congestion_control; } 2> /dev/null || exit
! cd ../ipv6/conf/default 2> /dev/null || echo 1 > disable_ipv6
"""
_Handler = Callable[[int, FrameType | None], object] | signal.Handlers | int | None
_NAME = re.compile(r"(netlab-(\d+)-(\d+)-\d+)-(?:switch|h\d+)")  # tag with process and its start time, then the host


class LabError(RuntimeError):
    """The lab cannot be made, or a part of it failed."""


@dataclass(frozen=True)
class Result:
    """How a rank ended.

    Attributes:
        rank: its number.
        returncode: negative for a signal.
        stdout: its output, if that was captured.
        stderr: as stdout.
        ended: True if it still ran at the timeout and was ended.
        cpu_seconds: of the rank and the children that it waited for; 0 if it was ended.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    ended: bool
    cpu_seconds: float


@dataclass(frozen=True)
class Rank:
    """A process and the files that take what it writes."""

    process: subprocess.Popen[str]
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None


def output_of(*command: str, text: str = "") -> str:
    """What a command writes, given a text to read."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise LabError(
            f"`{' '.join(command)}` gave {done.returncode}, expected 0: {done.stderr.strip()}. Input: {text!r}"
        )
    return done.stdout


def ip(namespace: str, *lines: str) -> None:
    """Runs `ip` in a namespace with one command a line."""
    output_of("ip", "-n", namespace, "-batch", "-", text="\n".join(lines))


def background(
    command: Sequence[str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = subprocess.PIPE,
    stderr: int | IO[bytes] | None = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Starts a command in a session of its own: it does not get the terminal's signals, and all of it can be ended."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, text=True, errors="replace", start_new_session=True
    )


def started(process: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def shape(namespace: str, device: str, rate: float | None, round_trip: float) -> None:
    """Limits what a device sends to `rate` Mbit/s, with a queue for round trips of some ms."""
    rate = rate or _UNLIMITED
    bytes_per_ms = rate * 1e3 / 8
    bucket = int(max(2 * _FRAME, bytes_per_ms * _BUCKET_MS))
    # The bucket counts the headers of all packets of a segment.
    segment = min(65536, max(_FRAME, int(bucket * (_MTU - _HEADERS) / _FRAME) - 100))
    queue = int(max(131072, 4 * bucket, bytes_per_ms * max(_QUEUE_MS, round_trip)))
    ip(namespace, f"link set {device} gso_max_size {segment}")
    # To replace a bucket by a bucket only changes it: what it holds and has counted stays.
    shaper = ("root", "tbf", "rate", f"{int(rate * 1e6)}bit", "burst", str(bucket), "limit", str(queue))
    output_of("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shaper)


def bytes_passed(namespace: str, device: str) -> int:
    """Bytes that a shaped device has sent, with the headers of every packet."""
    answer = output_of("tc", "-n", namespace, "-statistics", "-json", "qdisc", "show", "dev", device)
    return int(json.loads(answer)[0]["bytes"])


def add(namespace: str, names: Mapping[str, str]) -> None:
    """Makes a namespace whose programs know the addresses of some names."""
    output_of("ip", "netns", "add", namespace)
    # `ip netns exec` lays this file over /etc/hosts.
    (_FILES / namespace).mkdir(parents=True)
    lines = [f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()]
    (_FILES / namespace / "hosts").write_text("".join(lines))
    output_of("ip", "netns", "exec", namespace, "sh", "-c", _SETTINGS)


def _there(namespace: str) -> bool:
    return namespace in output_of("ip", "netns", "list").split()


def _delete(namespace: str) -> None:
    deadline = time.monotonic() + 10.0
    while (pids := output_of("ip", "netns", "pids", namespace).split()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    output_of("ip", "netns", "delete", namespace)


def remove(namespaces: Iterable[str]) -> None:
    """Ends what runs in namespaces and deletes them."""
    errors = []
    for name in namespaces:
        shutil.rmtree(_FILES / name, ignore_errors=True)
        try:
            if _there(name):
                _delete(name)
        except LabError as error:
            # Another process may have removed the same remains.
            if _there(name):
                errors.append(str(error))
    if errors:
        raise LabError(f"namespaces are left, `python -m bench.netlab down` tries again: {'; '.join(errors)}")


def remove_remains() -> list[str]:
    """Removes what labs left whose process is gone, and returns their tags."""
    names = set(output_of("ip", "netns", "list").split()) | {f.name for f in _FILES.glob("netlab-*")}
    found = [match for match in map(_NAME.fullmatch, sorted(names)) if match]
    left = [match for match in found if started(int(match[2])) != int(match[3])]
    remove(match[0] for match in left)
    return sorted({match[1] for match in left})


def end(processes: Sequence[subprocess.Popen[str]], grace: float = 2.0) -> None:
    """Asks processes to end, with their sessions, and kills those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + grace
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.01)


def _content(file: IO[bytes] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    return file.read().decode(errors="replace")


def wait(ranks: Sequence[Rank], timeout: float) -> list[Result]:
    """Waits until all ranks have ended; those that take too long are ended."""
    cpu: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while len(cpu) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
        for number, rank in enumerate(ranks):
            if number not in cpu:
                pid, status, usage = os.wait4(rank.process.pid, os.WNOHANG)
                if pid:
                    rank.process.returncode = os.waitstatus_to_exitcode(status)
                    cpu[number] = usage.ru_utime + usage.ru_stime
    end([rank.process for rank in ranks])
    return [
        Result(
            number,
            rank.process.wait(timeout=10),
            _content(rank.stdout),
            _content(rank.stderr),
            number not in cpu,
            cpu.get(number, 0.0),
        )
        for number, rank in enumerate(ranks)
    ]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, _Handler]) -> Iterator[None]:
    # None: set by code that is not Python's, which cannot be put back.
    before = {number: old for number in handlers if (old := signal.getsignal(number)) is not None}
    for number in before:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def leaving_in_order() -> contextlib.AbstractContextManager[None]:
    """Makes signals that would end the process at once raise SystemExit, so that `with` blocks are left."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    return _handlers(dict.fromkeys(numbers * _in_main_thread(), _leave))


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Ignores signals that ask for an end, for as long as it takes to clean up."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] * _in_main_thread()
    return _handlers(dict.fromkeys(numbers, signal.SIG_IGN))
