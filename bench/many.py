"""Many ranks on one machine: `python -m bench.many --ranks 64 --limit 1024 --specs diloco bytegrad [--output ...]`.

All ranks are forked from this process, with `--limit` as the hard limit on open files of each. For each algorithm they call
`init`, train a small model for some steps, and end. The table has the seconds of the slowest rank in each
part. It has the most descriptors, threads and memory of any rank, and descriptors divided by the number of other ranks.
The spec `init` trains nothing.

Ranks share two processors here, so that times are those of this machine under a hundred processes, not of a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels import comm, knobs
from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.local_steps.mu_loco import MuLoCo
from bagua_kernels.optim import muon_with_adamw

NOTHING = "init"  # in place of an algorithm
FAMILIES = (
    NOTHING, "allreduce", "bytegrad", "qadam", "powersgd", "topk", "decentralized", "lowprec", "d2",
    "async_model_average", "async_decentralized", "wagma", "local_sgd", "diloco", "sparse_loco",
)  # fmt: skip
_WIDTH = 64
_PART = ("init", "train", "end")
_UNIT = 1 << 20


@dataclass
class Told:
    """What one rank measured.

    Attributes:
        rank: its number.
        init: seconds of `init`.
        train: seconds of wrapping the model and of all steps.
        end: seconds of closing the algorithm and of `shutdown`.
        descriptors: open files after the last step.
        before: open files before `init`.
        threads: of the process, after the last step.
        memory: MiB that only this process has.
        loss: of the last step.
    """

    rank: int
    init: float = 0.0
    train: float = 0.0
    end: float = 0.0
    descriptors: int = 0
    before: int = 0
    threads: int = 0
    memory: float = 0.0
    loss: float = 0.0


def train(communicator: comm.Communicator, spec: str, steps: int) -> tuple[Algorithm | None, float]:
    """Wraps a small model and trains it for some steps; returns what is to be closed, and the last loss."""
    torch.manual_seed(0)
    if spec == NOTHING:
        x = torch.ones(1)
        communicator.all_reduce(x).wait()
        return None, float(x)
    net = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, 1))
    kind, _ = Algorithm.named(spec)
    if issubclass(kind, MomentumAllReduce):
        model = from_spec(spec, net, communicator=communicator, lr=1e-3, freeze_step=steps // 2)
        optimizer: torch.optim.Optimizer = model.optimizer  # type: ignore[assignment]
    else:
        optimizer = muon_with_adamw(net) if issubclass(kind, MuLoCo) else torch.optim.SGD(net.parameters(), 0.05)
        model = from_spec(spec, net, optimizer, communicator=communicator)
    loss = torch.zeros(())
    generator = torch.Generator().manual_seed(communicator.rank)
    for _ in range(steps):
        loss = model(torch.randn(4, _WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, float(loss.detach())


def rank_main(told: Told, size: int, port: int, spec: str, steps: int, timeout: float) -> None:
    """Is one rank from its start to its end."""
    place = {
        "RANK": told.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": told.rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    told.before = len(os.listdir("/proc/self/fd"))
    with _timed(told, "init"):
        communicator = comm.init(timeout=timeout, device="cpu")
    with _timed(told, "train"):
        model, told.loss = train(communicator, spec, steps)
    told.descriptors = len(os.listdir("/proc/self/fd"))
    told.threads = len(os.listdir("/proc/self/task"))
    told.memory = _private()
    with _timed(told, "end"):
        if model is not None:
            model.close()
        comm.shutdown()


def run(size: int, spec: str, *, limit: int = 0, steps: int = 10, timeout: float = 600.0) -> list[Told]:
    """Runs one job of forked ranks; returns what each measured.

    Args:
        size: the number of ranks.
        spec: an algorithm, or `NOTHING`.
        limit: on open files of each rank; 0 for that of this process.
        steps: of training.
        timeout: of `init` and of operations; the job is ended after three times as long.

    Raises:
        RuntimeError: if a rank failed; with the first errors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read, write = os.pipe()
    children = dict[int, int]()
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.close(read)
            _be(rank, size, port, spec, limit, steps, timeout, write)
        children[child] = rank
    os.close(write)
    try:
        lines = _read(read, time.monotonic() + 3 * timeout)
    finally:
        os.close(read)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # those that have ended are zombies, to which it does nothing
            os.waitpid(child, 0)
    found = [json.loads(line) for line in lines]
    failed = [one for one in found if "error" in one]
    if failed or len(found) < size:
        missing = sorted(set(range(size)) - {one["rank"] for one in found})
        texts = "\n".join(f"rank {one['rank']}: {one['error']}" for one in failed[:3])
        raise RuntimeError(f"{spec}: {len(failed)} of {size} ranks failed, {missing=}\n{texts}")
    return [Told(**one) for one in sorted(found, key=lambda one: one["rank"])]


def summary(spec: str, ranks: Sequence[Told]) -> dict[str, Any]:
    """Returns a row of the table: the most of each column among all ranks; descriptors of those that hold no store."""
    others = ranks[1:] or ranks
    row: dict[str, Any] = {"spec": spec, "ranks": len(ranks)}
    row |= {part: round(max(getattr(one, part) for one in ranks), 2) for part in _PART}
    row["descriptors"] = max(one.descriptors for one in ranks)
    row["for each other rank"] = round(max((o.descriptors - o.before) / max(1, len(ranks) - 1) for o in others), 2)
    row["threads"] = max(one.threads for one in ranks)
    row["MiB"] = round(max(one.memory for one in ranks), 1)
    return row


@contextlib.contextmanager
def _timed(told: Told, part: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    setattr(told, part, time.monotonic() - began)


def _be(rank: int, size: int, port: int, spec: str, limit: int, steps: int, timeout: float, write: int) -> None:
    """Is a forked rank; never returns."""
    told, line = Told(rank), dict[str, Any]()
    try:
        if limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        rank_main(told, size, port, spec, steps, timeout)
        line = asdict(told)
    except BaseException as error:
        line = {"rank": rank, "error": f"{type(error).__name__}: {str(error)[:600]}"}
        if rank == 0:
            traceback.print_exc()
    finally:
        # One write of less than a pipe's atomic size does not mix with those of other ranks.
        with contextlib.suppress(OSError):
            os.write(write, json.dumps(line).encode()[:4000] + b"\n")
        os._exit(0)


def _read(pipe: int, deadline: float) -> list[bytes]:
    """Returns the lines that the ranks write until the last one has ended, or the time is over."""
    data = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
        more = os.read(pipe, 1 << 16)
        if not more:
            break
        data += more
    return data.splitlines()


def _private() -> float:
    """Returns the MiB of memory that no other process has."""
    text = Path("/proc/self/smaps_rollup").read_text()
    sizes = [line.split() for line in text.splitlines() if line.startswith("Private_")]
    return sum(int(fields[1]) for fields in sizes) * 1024 / _UNIT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 1 if a job failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.many", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64, help="number of ranks (64)")
    parser.add_argument("--limit", type=int, default=1024, help="open files of each rank, as by `ulimit -n` (1024)")
    parser.add_argument("--specs", nargs="+", default=list(FAMILIES), help=f"algorithms ({', '.join(FAMILIES)})")
    parser.add_argument("--steps", type=int, default=10, help="of training (10)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds, of `init` and of operations (600)")
    parser.add_argument("--heartbeat", default="", help="seconds between two heartbeats (as without this option)")
    parser.add_argument("--output", type=Path, help="JSON file; rows of other specs and numbers of ranks in it stay")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.heartbeat:
        os.environ[knobs.HEARTBEAT.variable] = options.heartbeat
    for spec in options.specs:
        # Ranks inherit compiled kernels: to compile them a hundred times over would take most of the time.
        closing = comm.run_ranks(4, lambda communicator, spec=spec: _once(communicator, spec), timeout=options.timeout)
        assert len(closing) == 4
    rows, failed = [], 0
    for spec in options.specs:
        try:
            rows.append(
                summary(
                    spec, run(options.ranks, spec, limit=options.limit, steps=options.steps, timeout=options.timeout)
                )
            )
            rows[-1] |= {"limit": options.limit, "heartbeat": knobs.HEARTBEAT.get()}
            print(rows[-1], file=sys.stderr, flush=True)
        except RuntimeError as error:
            failed += 1
            print(error, file=sys.stderr, flush=True)
        if options.output is not None and rows:
            _write(options.output, rows)
    table = Table(*(rows[0] if rows else ()))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    return int(bool(failed))


def _once(communicator: comm.Communicator, spec: str) -> None:
    model, _ = train(communicator, spec, 10)
    if model is not None:
        model.close()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["spec"], row["ranks"]) for row in rows}
    kept = [row for row in known if (row["spec"], row["ranks"]) not in done]
    both = sorted([*kept, *rows], key=lambda row: (row["ranks"], row["spec"]))
    path.write_text(json.dumps({"processors": os.cpu_count(), "rows": both}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
