"""Several hosts with slow links on one Linux machine: `python -m bench.netlab run -n 4 --rate 100 --delay 5 -- COMMAND`.

Each host is a network namespace with its own host name (h0, h1, …; they resolve). A full-duplex link joins it to a
bridge, the switch, in one more namespace. Nothing leads out of a lab: labs meet neither each other nor the machine's
network, so that all use the same addresses. It takes root, iproute2 and util-linux; `available` returns what is missing.

A token bucket of two milliseconds of traffic at each end of a link limits its rate. With one millisecond, what flows is
3 % below 500 Mbit/s: tokens are lost whenever all processors are busy for longer. TCP's segments are made to fit into the
bucket, so that the kernel need not cut them up. Delay, jitter and loss are the work of a process, `bench.netlab.relay`,
and cost processor time. Processes that a killed lab leaves, with their namespaces, are ended by
the next lab or by `python -m bench.netlab down`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from bench.netlab import probe as netlab_probe
from bench.netlab import relay as netlab_relay
from bench.netlab import system
from bench.netlab.system import LabError, Result, remove_remains

__all__ = ["Lab", "LabError", "Result", "available", "remove_remains"]

INTERFACE = "eth0"
PORT = 29500
_serial = itertools.count()


def _missing() -> str:
    if sys.platform != "linux":
        return f"a lab takes Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"a lab takes root for network namespaces, this is user {os.geteuid()}"
    missing = [name for name in ("ip", "tc", "unshare", "sh") if shutil.which(name) is None]
    return f"a lab takes iproute2 and util-linux, without {', '.join(missing)} on the path" if missing else ""


@functools.cache
def available(delay: bool = True) -> str:
    """Why no lab can be made here, empty if one can; found by making one."""
    if reason := _missing():
        return reason
    try:
        with Lab(hosts=1, delay=1 if delay else None):
            return ""
    except (LabError, OSError) as error:
        return f"a lab takes namespaces, veth, bridge, tbf and for delays /dev/net/tun: {error}"


def _replaced(word: str, values: Mapping[str, object]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), word)


class Lab:
    """Some hosts around a switch, as long as a `with` block lasts; SIGTERM ends the block in order.

    Args:
        hosts: how many, up to 250.
        rate: of each link, Mbit/s in each direction; None for no limit.
        delay: between two hosts, ms one way; None for none.
        jitter: at most so many ms more or less than the delay. Frames keep their order.
        loss: the share of frames on the way from a host that is lost; a frame may be a segment of several packets.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: float | None = None,
        delay: float | None = None,
        jitter: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts is {hosts}: ask for 1 to 250")
        if not 0 <= jitter <= (delay or 0.0) or not 0 <= loss < 1:
            raise ValueError(f"got delay={delay}, jitter={jitter}, loss={loss}: 0 <= jitter <= delay, 0 <= loss < 1")
        self.hosts, self.rate, self.delay, self.jitter, self.loss = hosts, rate, delay or 0.0, jitter, loss
        self.tag = f"netlab-{os.getpid()}-{system.started(os.getpid())}-{next(_serial)}"
        self._namespaces = [f"{self.tag}-h{host}" for host in range(hosts)]
        self._switch = f"{self.tag}-switch"
        self._processes: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None
        self._runs = 0
        self._parts = False  # True once there is a second switch
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        if reason := _missing():
            raise LabError(reason)
        remove_remains()
        self._stack.enter_context(system.leaving_in_order())
        self._stack.callback(self._close)
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        relay = self._relay
        died = relay.stdout.read() if relay and relay.stdout and relay.poll() is not None else None
        self._stack.close()
        if died is not None and error is None:
            raise LabError(f"the relay ended before the lab did, so no frame has passed since: {died}")

    def _build(self) -> None:
        names = {f"h{host}": self.address(host) for host in range(self.hosts)}
        for namespace in (self._switch, *self._namespaces):
            system.add(namespace, names)
        # A bridge that snoops sends reports of its own.
        system.ip(self._switch, "link add br0 type bridge mcast_snooping 0", "link set br0 up")
        if self.delay or self.loss:
            self._start_relay()
        for host, namespace in enumerate(self._namespaces):
            if self._relay is None:
                system.ip(self._switch, f"link add p{host} type veth peer name {INTERFACE} netns {namespace}")
            system.ip(self._switch, f"link set p{host} master br0 up")
            at = f"addr add {self.address(host)}/24 dev {INTERFACE}"
            system.ip(namespace, "link set lo up", at, f"link set {INTERFACE} up")
            self.shape(host, self.rate)

    def _start_relay(self) -> None:
        pairs = [(namespace, INTERFACE, self._switch, f"p{host}") for host, namespace in enumerate(self._namespaces)]
        links = netlab_relay.Links(pairs=pairs, delay=self.delay / 1e3, jitter=self.jitter / 1e3, loss=self.loss)
        command = [sys.executable, "-I", "-S", netlab_relay.__file__, json.dumps(links)]
        # The relay ends when this pipe closes, which it does with this process.
        self._relay = system.background(command, stdin=subprocess.PIPE)
        answer = self._relay.stdout
        assert answer is not None
        line = answer.readline() if select.select([answer], [], [], 30.0)[0] else ""
        if line != "ready\n":
            system.end([self._relay])
            raise LabError(f"the relay wrote {line + answer.read()!r}, expected 'ready' within 30 s")

    def _close(self) -> None:
        with system.undisturbed():
            system.end(self._processes)
            system.end([self._relay] if self._relay else [])
            for process in (*self._processes, *([self._relay] if self._relay else [])):
                for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                    pipe.close()
            system.remove((*self._namespaces, self._switch))

    def address(self, host: int) -> str:
        return f"10.213.0.{host + 1}"

    def places(self, per_host: int | Sequence[int]) -> list[tuple[int, int]]:
        """The host of each rank, and the rank's number there; `per_host` ranks on each host, or as many as listed."""
        counts = [per_host] * self.hosts if isinstance(per_host, int) else list(per_host)
        if len(counts) != self.hosts:
            raise ValueError(f"expected the ranks of {self.hosts} hosts, got {counts}")
        return [(host, number) for host, count in enumerate(counts) for number in range(count)]

    def environment(self, rank: int, per_host: int | Sequence[int] = 1) -> dict[str, str]:
        """What torchrun would set for a rank, with the interface to use."""
        places = self.places(per_host)
        host, number = places[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(sum(each == host for each, _ in places)),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.address(0),
            # Another one for each run, so that none meets what an earlier one left behind.
            "MASTER_PORT": str(PORT + self._runs),
            "OMP_NUM_THREADS": "1",
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE),
        }

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Starts a command on a host, in a session of its own, with `env` beside this process's environment.

        The process has the pid of the command. What still runs when the block ends is ended, and pipes are closed.
        """
        name = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", name, f"h{host}", "ip", "netns", "exec", self._namespaces[host]]
        command = [*inside, *command]
        process = system.background(command, stdout=stdout, stderr=stderr, env={**os.environ, **(env or {})})
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        per_host: int | Sequence[int] = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        capture: bool = True,
    ) -> list[Result]:
        """Runs a command as ranks on hosts and waits for all; those that take too long are ended.

        Args:
            command: in its words, {rank}, {world}, {host}, {hosts}, {master}, {port} and {interface} are replaced.
            per_host: ranks on each host, or a list of each host's.
            env: variables beside `environment` and those of this process.
            timeout: seconds.
            capture: True to return the output of ranks; otherwise it goes to this process's output.
        """
        self._runs += 1
        places = self.places(per_host)
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank, (host, _) in enumerate(places):
                values = {**self.environment(rank, per_host), **(env or {})}
                words = {"rank": rank, "world": len(places), "host": host, "hosts": self.hosts, "interface": INTERFACE}
                words |= {"master": values["MASTER_ADDR"], "port": values["MASTER_PORT"]}
                # Files take any amount while nobody reads.
                files = [stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)]
                process = self.start(host, [_replaced(word, words) for word in command], values, *files)
                ranks.append(system.Rank(process, *files))
            return system.wait(ranks, timeout)

    def shape(self, host: int, rate: float | None) -> None:
        """Limits a host's link to `rate` Mbit/s in each direction, None for no limit; also while traffic flows."""
        for namespace, device in self._ends(host):
            system.shape(namespace, device, rate, 2 * self.delay)

    def cut(self, host: int) -> None:
        """Unplugs a host at the switch, also while traffic flows. Packets in the switch's queue still arrive.

        The host's own interface stays up with its carrier. Its programs get no error, as after a failure somewhere in
        a network; after a pulled cable they would.
        """
        system.ip(self._switch, f"link set p{host} nomaster")

    def part(self, hosts: Sequence[int]) -> None:
        """Plugs hosts into another switch, which leads nowhere else: they reach one another, and no others."""
        if not self._parts:
            system.ip(self._switch, "link add br1 type bridge mcast_snooping 0", "link set br1 up")
            self._parts = True
        for host in hosts:
            system.ip(self._switch, f"link set p{host} nomaster", f"link set p{host} master br1")

    def join(self, host: int) -> None:
        """Plugs a host in again."""
        system.ip(self._switch, f"link set p{host} master br0")

    def bytes_sent(self, host: int) -> int:
        """Bytes that a host has put on its link, with the headers of every packet, also those that were lost later."""
        return system.bytes_passed(*self._ends(host)[0])

    def bytes_received(self, host: int) -> int:
        """Bytes that the switch has put on a host's link, with the headers of every packet."""
        return system.bytes_passed(*self._ends(host)[1])

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self._namespaces[host], INTERFACE), (self._switch, f"p{host}")


def _check(rate: float | None, delay: float | None) -> int:
    if reason := available(delay is not None):
        print(f"no lab here: {reason}")
        return 1
    with Lab(2, rate, delay) as lab:
        mbit, trip = netlab_probe.measure(lab, seconds=2.0)
    print(f"one TCP stream: {mbit:.1f} Mbit/s of payload (asked for {rate or 'no limit'} with headers)")
    print(f"round trip: {trip:.2f} ms (asked for {2 * (delay or 0):g})")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.netlab", description="Hosts with slow links on one machine.")
    commands = parser.add_subparsers(dest="do", required=True)
    run = commands.add_parser("run", help="run a command on every host: run -n 4 --rate 100 --delay 5 -- COMMAND")
    check = commands.add_parser("check", help="tell what misses here, or measure a lab of two hosts")
    commands.add_parser("down", help="remove what killed labs left")
    for command in (run, check):
        command.add_argument("--rate", type=float, help="Mbit/s of each link in each direction (default: no limit)")
        command.add_argument("--delay", type=float, help="ms one way between two hosts (default: none)")
    run.add_argument("-n", "--hosts", type=int, default=2)
    run.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    run.add_argument("--jitter", type=float, default=0.0, help="ms more or less than the delay")
    run.add_argument("--loss", type=float, default=0.0, help="share of frames that is lost, 0 to 1")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds")
    run.add_argument("command", nargs="+", help="after --, with {rank}, {world}, {host}, {hosts}, {master}, {port}")
    options = parser.parse_args()
    if options.do == "down":
        print("\n".join(remove_remains()) or "nothing was left")
        return 0
    if options.do == "check":
        return _check(options.rate, options.delay)
    with Lab(options.hosts, options.rate, options.delay, options.jitter, options.loss) as lab:
        results = lab.run(options.command, options.per_host, timeout=options.timeout, capture=False)
        for host in range(lab.hosts):
            sent, received = lab.bytes_sent(host) / 1e6, lab.bytes_received(host) / 1e6
            print(f"h{host}: {sent:.3f} MB sent, {received:.3f} MB received", file=sys.stderr)
    for result in results:
        state = "ended at the timeout" if result.ended else f"gave {result.returncode}"
        print(f"rank {result.rank}: {state}, {result.cpu_seconds:.2f} s of CPU", file=sys.stderr)
    return max(124 if result.ended else abs(result.returncode) for result in results)
