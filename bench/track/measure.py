"""The slow-link track: `python -m bench.track [--cells 10-0-equal 100-0-slow] [--entrants diloco ddp] [--output FILE]`.

Four hosts train a transformer for characters for 150 s, each way of training in turn, on emulated links. What counts is the
loss over text that is held back, of the mean of all ranks' parameters after that time. What counts next are the bytes sent.

A cell is a rate in Mbit/s, a delay in ms, and "equal" or "slow". In the latter the last rank sleeps after each step for as long
as a step takes. All entrants of a cell take 45 minutes. What is in the file is not measured again: a cell that was stopped goes
on with the next entrant. `make track` runs the cells of 10 and 100 Mbit/s.

An entrant is a file in `bench/track/entrants`, or any other file that is named on the command line. It has a docstring, which is
shown, and these:

    TITLE = "DDP"
    PACKAGE = "torch"          # whose version is shown

    def train(model, optimizer, loop):
        ...                    # connect: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
        for x, y in loop.batches(optimizer):    # until the time is over
            optimizer.zero_grad()
            loop.loss(model, x, y).backward()
            optimizer.step()

`model` and `optimizer` are the same for all; an entrant may bring another optimizer. The clock starts with the first batch. It
counts everything until the last one, so that what is compiled or measured then counts, too. Learning rates follow the time.
An entrant whose package is not installed beside this one runs in an environment of its own: `make .venv-track/installed`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from bench import resume, speed
from bench.netlab import lab as netlab
from bench.resume import Results
from bench.track import rank as program
from bench.track import report
from bench.track.cell import CELLS, HOSTS, SECONDS, Cell
from examples import corpus

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "entrants"
RIVALS = _ROOT / ".venv-track/bin/python"
_BESIDE = 150.0  # seconds that beginning and ending may take
_WINDOWS = 1024  # of the text that is held back


def files_of(names: list[str] | None) -> list[Path]:
    """The files of entrants, of which some may be anywhere."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"}
    if names is None:
        return list(known.values())
    unknown = [name for name in names if name not in known and not Path(name).is_file()]
    if unknown:
        raise ValueError(f"no entrant {', '.join(unknown)}: name a file, or some of {', '.join(known)}")
    return [known.get(name, Path(name).resolve()) for name in names]


def environment_of(package: str) -> tuple[str, str]:
    """The interpreter that has a package, and the package's version there.

    Raises:
        LookupError: no environment has it.
    """
    if package == "bagua_kernels" or _has(package):
        return sys.executable, metadata.version(package)
    if RIVALS.exists():
        question = f"from importlib.metadata import version; print(version({package!r}))"
        answer = subprocess.run([str(RIVALS), "-c", question], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return str(RIVALS), answer.stdout.strip()
    raise LookupError(f"{package} is not installed: make .venv-track/installed")


def _has(package: str) -> bool:
    return find_spec(package.replace("-", "_")) is not None


def run(cell: Cell, path: Path, seconds: float) -> Results:
    """Lets one entrant train in a cell, and evaluates it; an entrant that ends with an error has it in its result."""
    # Other work on the machine, which the result contains.
    load = os.getloadavg()[0]
    entrant = program.entrant(path)
    result: Results = {"title": entrant.TITLE, "package": entrant.PACKAGE, "about": (entrant.__doc__ or "").strip()}
    result["machine"] = {"processor": speed.processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    try:
        python, result["version"] = environment_of(entrant.PACKAGE)
    except LookupError as error:
        return {**result, "error": str(error)}
    with tempfile.TemporaryDirectory() as name, netlab.Lab(HOSTS, rate=cell.rate, delay=cell.delay or None) as lab:
        folder = Path(name)
        settings = {
            "entrant": str(path),
            "folder": name,
            "ranks": HOSTS,
            "seconds": seconds,
            "slow": cell.slow,
            "addresses": [lab.address(host) for host in range(HOSTS)],
        }
        command = [python, "-m", "bench.track.rank", json.dumps(settings)]
        ranks = lab.run(command, env={"PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"}, timeout=seconds + _BESIDE)
        errors = sorted(folder.glob("*.error"))
        if errors or not all((folder / f"{one.rank}.pt").exists() for one in ranks):
            words = [path.read_text().strip()[-1500:] for path in errors[:1]]
            words += [f"rank {one.rank} gave {one.returncode}: {one.stderr[-800:]}" for one in ranks if one.returncode]
            return {**result, "error": "\n".join(words) or "a rank has not come to its end in time"}
        notes = sorted(folder.glob("shared.note.*"))
        result |= {"note": json.loads(notes[0].read_text())} if notes else {}
        found = [torch.load(folder / f"{one.rank}.pt") for one in ranks]
    return {**result, **described(found), "cpu_seconds": sum(one.cpu_seconds for one in ranks), "load_average": load}


def described(found: list[Results]) -> Results:
    """What the ranks have found: steps, bytes, and losses by time."""
    # The last look of each rank is what the entrant has left, whatever number of looks came before.
    before = zip(*(one["looks"][:-1] for one in found), strict=False)
    curve = [point(looks) for looks in (*before, tuple(one["looks"][-1] for one in found))]
    return {
        "loss": curve[-1][1],
        "bytes": sum(one["sent"] for one in found),
        "steps": [one["steps"] for one in found],
        "seconds": max(one["seconds"] for one in found),
        "step_seconds_alone": [one["compute"] for one in found],
        "curve": curve,
    }


def point(looks: Sequence[tuple[float, dict[str, torch.Tensor]]]) -> list[float]:
    """When ranks were looked at, in seconds, and the loss of their mean."""
    moments, states = zip(*looks, strict=True)
    mean = {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}
    return [sum(moments) / len(moments), loss_of(mean)]


@torch.no_grad()
def loss_of(state: dict[str, torch.Tensor]) -> float:
    """The loss in nats per character over text that is held back."""
    net = program.model()
    net.load_state_dict(state)
    x, y = held_back()
    parts = zip(x.split(256), y.split(256), strict=True)
    losses = [(torch.nn.functional.cross_entropy(net(inputs), targets, reduction="sum")) for inputs, targets in parts]
    return float(sum(losses)) / y.numel()


@lru_cache
def held_back() -> tuple[torch.Tensor, torch.Tensor]:
    """Some windows of the text that nobody trains on, and the characters that follow theirs."""
    x, y = corpus.windows(corpus.load().validation, program.CONTEXT)
    every = max(1, len(x) // _WINDOWS)
    return x[::every], y[::every]


def settings_of(seconds: float) -> Results:
    """What results have in common, which are compared."""
    text = corpus.load()
    return {
        "seconds": seconds,
        "hosts": HOSTS,
        "text": text.name,
        "digest": text.digest,
        "batch": program.BATCH,
        "rate": program.RATE,
        "torch": torch.__version__,
    }


def begun(options: argparse.Namespace) -> Results:
    """What earlier runs with the same settings have found; errors as of `resume.begun`."""
    return resume.begun(resume.read(options.output), settings_of(options.seconds), options.output, {"cells": {}})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.track", description=(__doc__ or "").splitlines()[0])
    cells = {cell.name: cell for cell in CELLS}
    parser.add_argument("--cells", nargs="+", choices=cells, default=list(cells), metavar="CELL", help=", ".join(cells))
    parser.add_argument(
        "--entrants", nargs="+", help="names, or files of your own; all in bench/track/entrants by default"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training")
    parser.add_argument("--again", action="store_true", help="measure anew what is in the file")
    parser.add_argument("--output", type=Path, help="JSON file, from which a track goes on")
    parser.add_argument("--plot", type=Path, help="picture of losses by time")
    options = parser.parse_args()
    if reason := netlab.available():
        print(reason, file=sys.stderr)
        return 1
    console = Console(width=150)
    try:
        files, results = files_of(options.entrants), begun(options)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for cell in (cells[name] for name in options.cells):
        rows = results["cells"].setdefault(cell.name, {})
        for path in files:
            if path.stem in rows and not options.again:
                continue
            rows[path.stem] = row = run(cell, path, options.seconds)
            resume.write(options.output, results)
            console.print(f"{cell.title}: {report.line(row)}", markup=False, highlight=False)
        report.show(console, cell, rows)
    if options.plot:
        report.plot(results, options.plot)
    return 0
