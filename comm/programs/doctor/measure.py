"""What the doctor measures: the facts of a rank, every link, collectives, the speed of the ranks and their clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.joining.address import own_address
from bagua_kernels.comm.joining.evidence import boot_id
from bagua_kernels.comm.programs.doctor.facts import AllReduceTime, Clock, Measurements, RankFacts
from bagua_kernels.comm.programs.doctor.report import BACKENDS
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Work

_PACKAGES = ("bagua-kernels", "torch", "numpy", "numba", "triton", "numba-cuda")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
_CUPY_TRIAL = "from cupy.cuda import nccl; print(nccl.get_version())"
_WARM_UP = 3
_MOST_REPEATS = 20


def collect(rank: int = 0, local_rank: int = 0) -> RankFacts:
    """Returns this process's facts; imports no optional package."""
    cupy = next((name for name in _CUPY if _version(name)), "")
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    gloo = "" if dist.is_gloo_available() else "this build of torch has no Gloo"
    reasons = (gloo, "" if has_nccl else _why_no_nccl(), _try_cupy(cupy))
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            "cupy": _version(cupy),
        },
        cuda=torch.version.cuda or "",
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
        devices=sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        unavailable={name: why for name, why in zip(BACKENDS, reasons, strict=True) if why},
        cpus=tuple(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)),
        threads=torch.get_num_threads(),
        network=interfaces.examine(),
        sockets=_sockets(),
    )


def _sockets() -> str:
    try:
        return own_address()
    except ValueError:  # GLOO_SOCKET_IFNAME is wrong, which the facts of the network show
        return ""


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Returns rounds in which every two ranks meet once, and no rank twice in a round: size - 1 rounds, or size."""
    # The circle: the first seat stays, all others move on by one; with an odd number, one opponent is a pause.
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def estimate_clock(samples: Sequence[tuple[float, float, float, float]]) -> Clock:
    """Estimates how far another clock is ahead, as NTP does, from the exchange that was on its way for the least time.

    Args:
        samples: four times of each exchange: request sent (own clock), request received and answer sent (other clock),
            answer received (own clock).
    """
    sent, received, answered, arrived = min(samples, key=lambda one: (one[3] - one[0]) - (one[2] - one[1]))
    underway = (arrived - sent) - (answered - received)
    return Clock(((received - sent) + (answered - arrived)) / 2, max(0.0, underway / 2))


def measure(communicator: Communicator, size: int, quick: bool = False) -> Measurements:
    """Measures everything; all ranks call it with the same arguments, and all get the same result.

    Args:
        communicator: of the ranks.
        size: bytes of the largest message.
        quick: fewer repeats.

    Raises:
        CommunicationError: if a rank is lost, or an operation takes longer than the communicator's timeout.
    """
    budget = 0.05 if quick else 0.5  # seconds for one bandwidth
    count = communicator.size
    latency = {(communicator.rank, communicator.rank): 0.0}
    bandwidth = dict(latency)
    for pairs in tournament(count):
        _finish(communicator, communicator.barrier())
        pair = next((pair for pair in pairs if communicator.rank in pair), None)
        if pair is None:
            continue
        first = communicator.rank == pair[0]
        other = pair[1] if first else pair[0]
        latency[communicator.rank, other] = _ping_pong(communicator, other, first, 20 if quick else 50)
        # Both directions, one after the other: links need not be symmetric.
        for sends in (first, not first):
            rate = _stream(communicator, other, sends, size, budget, latency[communicator.rank, other])
            if sends:
                bandwidth[communicator.rank, other] = rate
    sizes = sorted({max(4, size >> shift) for shift in ((12, 4, 0) if quick else (12, 8, 4, 2, 0))})
    curve = tuple(_all_reduce(communicator, bytes_, budget) for bytes_ in sizes)
    barrier = _slowest(communicator, _median(10, lambda: _finish(communicator, communicator.barrier())))
    matmul, copy = _work(communicator, 5 if quick else 15)
    clocks = _clocks(communicator, 10 if quick else 30)
    # Threads, which have no session, detect a lost rank by themselves.
    session = getattr(communicator, "session", None)
    watched = session is None or session.liveness is not None
    row = [(latency[communicator.rank, r], bandwidth[communicator.rank, r], matmul, copy) for r in range(count)]
    rows: list[list[tuple[float, float, float, float]]] = communicator.all_gather_object(row)
    return Measurements(
        size=size,
        latency=tuple(tuple(entry[0] for entry in row) for row in rows),
        bandwidth=tuple(tuple(entry[1] for entry in row) for row in rows),
        all_reduce=curve,
        barrier=barrier,
        matmul=tuple(row[0][2] for row in rows),
        copy=tuple(row[0][3] for row in rows),
        clocks=clocks,
        watched=watched or count == 1,
    )


def _ping_pong(communicator: Communicator, other: int, first: bool, repeats: int) -> float:
    """Returns half of the median round trip of eight bytes."""
    message = torch.zeros(8, dtype=torch.uint8, device=communicator.device)

    def trip() -> None:
        for sends in (first, not first):
            _finish(communicator, communicator.send(message, other) if sends else communicator.recv(message, other))

    return _median(repeats, trip) / 2


def _stream(communicator: Communicator, other: int, sends: bool, size: int, budget: float, latency: float) -> float:
    """Returns bytes per second on the sender, whose messages each end with an answer of the other; returns 0 on the other."""
    message = torch.zeros(size, dtype=torch.uint8, device=communicator.device)
    control = torch.zeros(1, dtype=torch.int64, device=communicator.device)

    def transfer() -> None:
        _finish(communicator, communicator.send(message, other) if sends else communicator.recv(message, other))
        _finish(communicator, communicator.recv(control, other) if sends else communicator.send(control, other))

    # The first message opens the connection's window; its time gives the number of further messages.
    seconds = _median(1, transfer, warm_up=1)
    if sends:
        repeats = _repeats(seconds, budget)
        _finish(communicator, communicator.send(control.fill_(repeats), other))
    else:
        _finish(communicator, communicator.recv(control, other))
        repeats = int(control.item())
    seconds = _median(repeats, transfer, warm_up=0)
    # At most half of the time is taken for the answer's way, which a message in a burst may not have waited for.
    return size / max(seconds - latency, seconds / 2, 1e-9) if sends else 0.0


def _all_reduce(communicator: Communicator, size: int, budget: float) -> AllReduceTime:
    data = torch.zeros(size // 4, dtype=torch.float32, device=communicator.device)

    def run() -> None:
        _finish(communicator, communicator.all_reduce(data))

    _finish(communicator, communicator.barrier())
    trial = _slowest(communicator, _median(1, run, warm_up=1))
    seconds = _slowest(communicator, _median(_repeats(trial, budget), run, warm_up=0))
    rate = data.nbytes / max(seconds, 1e-9)
    return AllReduceTime(data.nbytes, seconds, rate, rate * 2 * (communicator.size - 1) / communicator.size)


def _work(communicator: Communicator, repeats: int) -> tuple[float, float]:
    """Times a matrix product and a copy of memory, on all ranks at once as in training."""
    matrix = torch.ones(384, 384, dtype=torch.float32, device=communicator.device)
    source = torch.ones(1 << 20, dtype=torch.float32, device=communicator.device)
    target = torch.empty_like(source)
    seconds = []
    calls: tuple[Callable[[], Any], ...] = (lambda: matrix @ matrix, lambda: target.copy_(source))
    for call in calls:
        _finish(communicator, communicator.barrier())
        seconds.append(_median(repeats, partial(_synchronized, communicator, call)))
    return seconds[0], seconds[1]


def _clocks(communicator: Communicator, repeats: int) -> tuple[Clock, ...]:
    """Compares the clock of every rank with that of rank 0, one rank after the other."""
    found = [Clock(0.0, 0.0)]
    times = torch.zeros(2, dtype=torch.float64, device=communicator.device)
    for other in range(1, communicator.size):
        samples = []
        for _ in range(repeats if communicator.rank in (0, other) else 0):
            if communicator.rank == 0:
                sent = time.time()
                _finish(communicator, communicator.send(times, other))
                _finish(communicator, communicator.recv(times, other))
                received, answered = times.tolist()
                samples.append((sent, received, answered, time.time()))
            else:
                _finish(communicator, communicator.recv(times, 0))
                received = time.time()
                answer = torch.tensor([received, time.time()], dtype=torch.float64, device=communicator.device)
                _finish(communicator, communicator.send(answer, 0))
        if samples:
            found.append(estimate_clock(samples))
    return tuple(communicator.broadcast_object(found))


def _repeats(seconds: float, budget: float) -> int:
    return min(_MOST_REPEATS, max(1, int(budget / max(seconds, 1e-9))))


def _median(repeats: int, call: Callable[[], Any], warm_up: int = _WARM_UP) -> float:
    """Returns the median time of a call in seconds."""
    seconds = []
    for number in range(-warm_up, repeats):
        start = time.perf_counter()
        call()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _slowest(communicator: Communicator, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=communicator.device)
    _finish(communicator, communicator.all_reduce(value, ReduceOp.MAX))
    return float(value.item())


def _finish(communicator: Communicator, work: Work) -> None:
    _synchronized(communicator, work.wait)


def _synchronized(communicator: Communicator, call: Callable[[], Any]) -> None:
    call()
    # On a GPU an operation has only been queued when its call returns.
    if communicator.device.type == "cuda":
        torch.cuda.synchronize(communicator.device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package) if package else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _why_no_nccl() -> str:
    if not torch.version.cuda:
        return "torch is built without CUDA"
    return "this build of torch has no NCCL" if torch.cuda.is_available() else "torch sees no GPU"


def _try_cupy(package: str) -> str:
    """Returns why CuPy cannot use NCCL; tried in a process of its own, for a missing library may end it."""
    if not package:
        return "CuPy is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        trial = subprocess.run([sys.executable, "-c", _CUPY_TRIAL], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "importing CuPy took more than 60 s"
    return (trial.stderr.strip().splitlines() or ["the trial failed"])[-1] if trial.returncode else ""
