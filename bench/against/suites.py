"""What is compared: each suite is a job that runs in a checkout, and finds seconds by name."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.training.measure import run

Job = dict[str, float]
Memory = dict[str, Any]

_HOSTS, _COUNTED = 4, 4  # steps of a block
# Four ranks' copies of more would not fit into the caches, nor into the memory.
_GRADIENTS = [
    ["ddp", "allreduce", "allreduce in backward", "bytegrad", "bytegrad in backward", "int8"],
    ["ddp", "sign", "topk", "powersgd 2", "powersgd 2 in backward", "powersgd 4 in turn in backward"],
]
# Of local steps most blocks have no round: the median is that of a step alone.
_PARAMETERS = [["ddp", "decentralized", "d2", "sgp"], ["ddp", "local_sgd", "diloco int4", "sparse_loco"]]
_RATES: list[float | None] = [500.0, None]
_IMPORTS = 5  # of which the median counts


@dataclass(frozen=True)
class Suite:
    """What is compared.

    Attributes:
        name: on the command line.
        about: what it is, in a line.
        job: runs it in a checkout, and keeps what the next job may use again in a dictionary.
        needs_lab: True if it runs on emulated hosts.
    """

    name: str
    about: str
    job: Callable[[Path, Memory], Job]
    needs_lab: bool = False


def steps(model: str, groups: list[list[str]]) -> Callable[[Path, Memory], Job]:
    """Training steps of a model on four emulated hosts, by algorithm and rate; no commit changes `ddp`."""

    def job(root: Path, memory: Memory) -> Job:
        tunings = memory.setdefault("tunings", {})
        plan = [(rate, memory.get("rounds", 2), _COUNTED) for rate in _RATES]
        settings = {"model": model, "groups": [(group, plan) for group in groups], "tunings": tunings}
        told = run(_HOSTS, "steps", settings, root)
        # Links are measured once: what an older commit writes a newer one reads.
        if not tunings:
            tunings.update(told["tunings"])
        seconds: dict[str, list[float]] = {}
        for row in told["rows"]:
            place = "no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:g} Mbit/s"
            for name, times in row["times"].items():
                seconds.setdefault(f"{name}, {place}", []).extend(times)
        return {name: statistics.median(times) for name, times in seconds.items()}

    return job


def kernels(root: Path, memory: Memory) -> Job:
    """Codecs and elementwise kernels, each in turns with the others of its group."""
    words = ["--rounds", str(5 * memory.get("rounds", 2)), "--codec-elements", "2000000", "--adamw-elements", "2000000"]
    return _rows(_told(root, ["-m", "bench.speed", *words]))


def optimizers(root: Path, memory: Memory) -> Job:
    """Whole steps of optimizers."""
    words = ["--rounds", str(5 * memory.get("rounds", 2)), "--names", "SGD", "Adam", "AdamW", "--threads", "1"]
    return _rows(_told(root, ["-m", "bench.optimizers", *words]))


def imports(root: Path, memory: Memory) -> Job:
    """How long `import bagua_kernels` takes beside that of PyTorch, in processes of their own."""
    del memory
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import torch; begin = time.perf_counter(); "
        "import bagua_kernels.algorithms, bagua_kernels.optim; print(time.perf_counter() - begin)"
    )
    found = []
    for _ in range(_IMPORTS):
        done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
        found.append(float(done.stdout))
    return {"import beside PyTorch": statistics.median(found)}


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("kernels", "codecs and elementwise kernels", kernels),
        Suite("optimizers", "whole steps of optimizers", optimizers),
        Suite("imports", "the package's import", imports),
        Suite("fc", "training steps of a fully connected net", steps("fc", _GRADIENTS), needs_lab=True),
        Suite("tr", "training steps of a transformer", steps("tr", _GRADIENTS), needs_lab=True),
        Suite("parameters", "steps of algorithms on parameters", steps("fc", _PARAMETERS), needs_lab=True),
    )
}


def _told(root: Path, words: list[str]) -> Memory:
    """What a bench of a checkout writes to its JSON file.

    Raises:
        RuntimeError: it has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, *words, "--output", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed in {root}:\n{done.stderr[-2000:]}")
        found: Memory = json.loads(path.read_text())
        return found


def _rows(told: Memory) -> Job:
    names = ((row["group"], row["subject"], row["name"]) for row in told["rows"])
    return {", ".join(filter(None, each)): row["median_s"] for each, row in zip(names, told["rows"], strict=True)}
