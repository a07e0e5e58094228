"""Finds faults of a job's ranks and of the network between them, with the settings to change.

torchrun --nproc-per-node 2 -m bagua_kernels.comm.doctor [--json FILE] [--quick] [--size BYTES] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.incarnation import agree
from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.comm.programs.doctor.facts import Finding, RankFacts, Report
from bagua_kernels.comm.programs.doctor.findings import diagnose
from bagua_kernels.comm.programs.doctor.measure import collect, measure
from bagua_kernels.comm.programs.doctor.report import show
from bagua_kernels.errors import CollectiveTimeoutError

_ROOT = "bagua_kernels/doctor"  # of the keys in the job's store
_GRACE = 10.0  # seconds that ranks wait for one another's last words
_POLL = 0.05  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines, reports on rank 0, and returns the exit status: 1 if something is wrong, the same on all ranks."""
    options = _parse(arguments)
    try:
        launch = Launch.read()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if launch is None:
        facts = collect()
        return _publish(Report(1, "cpu", (facts,), None, diagnose(1, [facts])), options.json)
    facts = collect(launch.rank, launch.number_on_host)
    try:
        return _examine(launch, facts, options)
    except RuntimeError as error:
        # Without the store at MASTER_ADDR, or without rank 0 there, every rank speaks for itself.
        where = f"{launch.master_addr}:{launch.master_port}"
        missing: tuple[int, ...] = ()
        if isinstance(error, CollectiveTimeoutError):
            missing = error.ranks
        else:
            facts = dataclasses.replace(
                facts, problem=f"no word with the others over the store at {where}: {_line(error)}"
            )
        findings = diagnose(launch.world_size, [facts], None, missing)
        report = Report(launch.world_size, options.device, (facts,), None, findings)
        return _publish(report, options.json if launch.number_on_host == 0 else None)


def _examine(launch: Launch, facts: RankFacts, options: argparse.Namespace) -> int:
    """Gathers the facts through the store, for that works where Gloo does not; then joins and measures."""
    rank, size, timeout = launch.rank, launch.world_size, options.timeout
    store = TCPStore(
        launch.master_addr,
        launch.master_port,
        is_master=rank == 0 and facts.network.variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # it would not name the missing ranks
        multi_tenant=True,
    )
    store.set(f"{_ROOT}/facts/{rank}", facts.to_json())
    try:
        with BoundedStore(PrefixStore(_ROOT, store), time.monotonic() + timeout) as bounded:
            session = agree(bounded, rank, size, timeout).name
    except CollectiveTimeoutError as error:
        if rank == 0:
            present = [r for r in range(size) if r not in error.ranks]
            ranks = [_facts(store, f"{_ROOT}/facts/{r}") for r in present]
            findings = diagnose(size, ranks, None, error.ranks)
            status = _publish(Report(size, options.device, tuple(ranks), None, findings), options.json)
            return _dismiss(PrefixStore(f"{_ROOT}/incomplete", store), status, len(present))
        if _await(PrefixStore(f"{_ROOT}/incomplete", store), "status", _GRACE):
            return _obey(PrefixStore(f"{_ROOT}/incomplete", store), 1.0)
        raise
    job = PrefixStore(f"{_ROOT}/{session}", store)
    measured = None
    try:
        communicator = rendezvous.init(timeout=timeout, device=_device(options.device, launch))
        if size > 1:
            measured = measure(communicator, options.size, options.quick)
    except (RuntimeError, ValueError) as error:
        facts = dataclasses.replace(facts, problem=_line(error))
    facts = dataclasses.replace(facts, listening=interfaces.listening())
    job.set(f"facts/{rank}", facts.to_json())
    if rank == 0:
        deadline = time.monotonic() + _GRACE
        said = [_await(job, f"facts/{r}", deadline - time.monotonic()) for r in range(size)]
        ranks = [_facts(job, f"facts/{r}") if said[r] else _silent(store, r) for r in range(size)]
        report = Report(size, options.device, tuple(ranks), measured, diagnose(size, ranks, measured))
        status = _dismiss(job, _publish(report, options.json), sum(said))
    else:
        status = _obey(job, 2 * (timeout + _GRACE))
    if not facts.problem:
        rendezvous.shutdown()
    return status


def _silent(store: Store, rank: int) -> RankFacts:
    """Returns what a rank said before it fell silent."""
    return dataclasses.replace(
        _facts(store, f"{_ROOT}/facts/{rank}"), problem="no word since it arrived; it died or hangs"
    )


def _facts(store: Store, key: str) -> RankFacts:
    # Whoever reaches the store may have written it: it is read as data, not as a pickle, which is a program.
    return RankFacts.from_json(store.get(key).decode())


def _await(store: Store, key: str, seconds: float) -> bool:
    """Returns True if a key appears within the time."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _dismiss(store: Store, status: int, count: int) -> int:
    """Tells the others to end: a launcher kills all ranks when one ends with an error, so none may before the report."""
    store.set("status", str(status))
    deadline = time.monotonic() + _GRACE
    # This process may hold the store, in which the others have yet to read.
    while store.add("read", 0) < count - 1 and time.monotonic() < deadline:
        time.sleep(_POLL)
    return status


def _obey(store: Store, seconds: float) -> int:
    """Waits until rank 0 has reported, and returns the exit status that it found."""
    if not _await(store, "status", seconds):
        raise RuntimeError(f"rank 0 has not reported within {seconds:g} s")
    status = int(store.get("status"))
    store.add("read", 1)
    return status


def _device(kind: str, launch: Launch) -> str:
    return f"{kind}:{launch.number_on_host}" if kind == "cuda" else kind


def _publish(report: Report, path: Path | None) -> int:
    """Prints the report, writes it as JSON, and returns the exit status."""
    try:
        if path is not None:
            path.write_text(report.to_json() + "\n")
    except OSError as error:
        why = "the report is only printed"
        lost = Finding("error", (), f"{path} cannot be written: {error.strerror}", why, "pass another --json FILE")
        report = dataclasses.replace(report, findings=(lost, *report.findings))
    show(report, sys.stdout)
    return 0 if report.healthy else 1


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bagua_kernels.comm.doctor", description="Finds out what is wrong with the ranks of a job."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too, on rank 0")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller messages")
    parser.add_argument(
        "--size", type=int, metavar="BYTES", help="of the largest message (4 MiB; 256 KiB with --quick)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="to wait for the other ranks (60)"
    )
    told = "measure what comm.init gives there: its own sockets and Gloo (cpu), or NCCL (cuda)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=told)
    options = parser.parse_args(arguments)
    if options.size is None:
        options.size = 1 << (18 if options.quick else 22)
    if options.size < 4 or not 0 < options.timeout < math.inf:
        parser.error(f"expected --size of 4 or more and --timeout above 0, got {options.size} and {options.timeout}")
    return options
