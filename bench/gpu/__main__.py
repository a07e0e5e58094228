"""Checks this machine's GPU in stages: `python -m bench.gpu [--stages facts,bytes] [--device cpu [--fake]]`.

Each stage is a process group of its own with a limit. A line of JSON is written as soon as a stage ends. Results go to the folder
that OUT names, else to `bench/results/gpu/<card>/`. The exit status is 1 if a stage failed, crashed or ran out of time, and
if none passed. A stage that the machine refuses, for example because a module is missing, does not count as failed.

`--device cpu` tries the stages themselves without a GPU, at small sizes. Kernels run in Triton's interpreter or in Numba's
simulator. With `--fake` they are compiled, and launched on a driver that does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from bench.gpu.child import ROOT
from bench.gpu.runner import BAD, PASSED, Runner, Stage, table

# All stages together; the machine is lent for twice as long.
DEADLINE = 450.0
CUDA = Path("/usr/local/cuda")
INTERPRETED = {"TRITON_INTERPRET": "1", "BAGUA_KERNELS_BACKEND": "triton"}
SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1", "BAGUA_KERNELS_BACKEND": "numba_cuda"}


def stages(device: str = "cuda", small: bool = False, fake: bool = False, patience: float = 1.0) -> list[Stage]:
    """All stages in their order: what only a GPU can show comes first.

    Limits of stages that run one after the other add up to less than the deadline on 16 cores. `bytes`, `optimizers` and
    `numba_cuda` mostly compile.

    Args:
        device: "cuda", or "cpu" for a trial without a GPU.
        small: True for small sizes.
        fake: True to launch on a driver that does nothing.
        patience: factor of all limits.
    """
    emulated = device == "cpu" and not fake

    def stage(
        name: str,
        limit: float,
        cores: int = 1,
        *,
        alone: bool = False,
        rows: int = 4,
        emulator: Mapping[str, str] | None = None,
    ) -> Stage:
        options = ["--device", device, *["--small"] * small, *["--fake"] * fake]
        command = (sys.executable, "-m", "bench.gpu.stage", name, *options)
        environment = dict(emulator or {}) if emulated else {}
        return Stage(name, command, patience * limit, cores, alone, environment=environment, rows=rows)

    return [
        stage("facts", 50, alone=True),
        stage("smoke", 45, 8, emulator=INTERPRETED),
        stage("nccl", 120, 6),
        stage("bytes", 110, 10, emulator=INTERPRETED),
        stage("training", 90, 6, rows=8),
        stage("speed", 80, alone=True, rows=32),
        stage("optimizers", 80, 10, emulator=INTERPRETED),
        stage("graphs", 30, 2),
        stage("sanitizer", 45, 2, emulator=INTERPRETED),
        stage("numba_cuda", 50, 5, emulator=SIMULATED),
    ]


def shared_environment() -> dict[str, str]:
    """The variables of all stages. A cache that is named already stays where it is."""
    folder = Path(tempfile.gettempdir()) / "bagua_kernels_gpu"
    found = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    for name, part in (("TRITON_CACHE_DIR", "triton"), ("NUMBA_CACHE_DIR", "numba")):
        found[name] = os.environ.get(name) or str(folder / part)
        Path(found[name]).mkdir(parents=True, exist_ok=True)
    if CUDA.is_dir():
        found["CUDA_HOME"] = os.environ.get("CUDA_HOME") or str(CUDA)
    return found


def card() -> str:
    """The name of the first GPU in letters, digits and underscores; "none" without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    name = (done.stdout.strip().splitlines() or ["none"])[0] if done.returncode == 0 else "none"
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def folder_of_results() -> Path:
    """Where results go."""
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else ROOT / "bench" / "results" / "gpu" / card()


def forget(summary: Path, names: Iterable[str]) -> None:
    """Takes the lines of stages that are to run again out of a summary."""
    if not summary.exists():
        return
    again = set(names)
    lines = [line for line in summary.read_text().splitlines() if json.loads(line).get("stage") not in again]
    summary.write_text("".join(f"{line}\n" for line in lines))


def parse(known: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", default="", help=f"some of {', '.join(known)}, with commas or spaces; all by default"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fake", action="store_true", help="with --device cpu: launch on a driver that does nothing")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits, for slow machines")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for all stages (default: 450)")
    parser.add_argument("--output", type=Path, help="folder of results")
    options = parser.parse_args()
    if options.fake and options.device != "cpu":
        parser.error("--fake needs --device cpu")
    options.stages = re.split(r"[,\s]+", options.stages.strip()) if options.stages.strip() else known
    if unknown := [name for name in options.stages if name not in known]:
        parser.error(f"there is no stage {', '.join(unknown)}; known are {', '.join(known)}")
    return options


def main() -> int:
    known = [stage.name for stage in stages()]
    options = parse(known)
    small = options.device == "cpu"
    chosen = [
        stage for stage in stages(options.device, small, options.fake, options.patience) if stage.name in options.stages
    ]
    folder = options.output or folder_of_results()
    log, summary = folder / "log.txt", folder / "summary.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    forget(summary, options.stages)
    # A machine that takes its time back sends this first; the table then holds what there is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runner = Runner(chosen, log, summary, options.patience * options.deadline, shared_environment())
    try:
        runner.run()
    finally:
        print("\n".join(table(runner.reports, f"Results are in {folder}")), flush=True)
    outcomes = {report.outcome for report in runner.reports}
    return 1 if outcomes.intersection(BAD) or PASSED not in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
