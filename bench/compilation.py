"""Measures what an empty cache costs: `python -m bench.compilation [--kernels] [--output bench/results/compilation.json]`.

Each row is a process of its own with an empty cache of compiled kernels: two ranks, which are threads, train the network of
`bagua_kernels.warmup` for three steps, on one thread and on two for each rank. Processor seconds are those of the steps, less
those of the same steps in a second process, which finds the cache filled. Of `RUNS` runs the median counts. `--kernels` lists
what was compiled, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bagua_kernels import optim
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.jit import compiling

NAMES = ("bytegrad", "sign", "powersgd", "adamw")
THREADS = (1, 2)
INPUTS, HIDDEN, OUTPUTS = 300, 600, 10
STEPS = 3
RUNS = 3


def train(communicator: Communicator, name: str) -> None:
    layers = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Linear(HIDDEN, OUTPUTS)
    module: Any = torch.nn.Sequential(*layers)
    if name == "adamw":
        optimizer: torch.optim.Optimizer = optim.AdamW(module.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        module = from_spec(name, module, optimizer, communicator=communicator)
    for _ in range(STEPS):
        module(torch.ones(4, INPUTS)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if name != "adamw":
        module.close()


def measured(name: str, threads: int) -> dict[str, Any]:
    """What the steps cost in this process."""
    from numba.core import event

    torch.set_num_threads(threads)
    compiled: list[list[Any]] = []  # name, arguments, seconds of its own
    under_way: list[float] = []  # seconds that compilations within the current one have taken

    class Compilations(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            under_way.append(0.0)
            event.data["started"] = time.thread_time()

        def on_end(self, event: Any) -> None:
            taken = time.thread_time() - event.data["started"]
            inner = under_way.pop()
            if under_way:
                under_way[-1] += taken
            function = event.data["dispatcher"].py_func
            file, short = Path(function.__code__.co_filename).stem, function.__name__
            head, _, tail = short.rpartition("_")
            # Templates have the digest of what they are made of behind their names.
            short = head if len(tail) == 16 else short
            compiled.append([f"{file}.{short}", str(event.data["args"]), taken - inner])

    with event.install_listener("numba:compile", Compilations()):
        start = time.process_time()
        run_ranks(1 if name == "adamw" else 2, train, name, timeout=600.0)
        seconds = time.process_time() - start
    return {"seconds": seconds, "compiling": compiling.seconds(), "compiled": compiled}


def started(name: str, threads: int, cache: str) -> dict[str, Any]:
    """The same in a new process with a cache of its own."""
    command = [sys.executable, "-m", "bench.compilation", "--measure", name, str(threads)]
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def run(name: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        first, second = started(name, threads, cache), started(name, threads, cache)
    return {
        "name": name,
        "threads": threads,
        "processor_seconds": round(first["seconds"] - second["seconds"], 2),
        "seconds": round(first["compiling"], 2),
        "functions": len(first["compiled"]),
        "compiled": first["compiled"],
    }


def row(name: str, threads: int) -> dict[str, Any]:
    runs = [run(name, threads) for _ in range(RUNS)]
    return sorted(runs, key=lambda each: each["processor_seconds"])[RUNS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, help="of algorithms, or adamw")
    parser.add_argument("--kernels", action="store_true", help="list what was compiled")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure[0], int(options.measure[1]))))
        return
    rows = []
    for name in options.names:
        for threads in THREADS:
            found = row(name, threads)
            compiled = found.pop("compiled")
            rows.append(found)
            print(
                f"{name:10} {threads} threads: {found['processor_seconds']:6.2f} processor seconds, "
                f"{found['functions']} functions",
                flush=True,
            )
            if options.kernels:
                counts = Counter(short for short, _, _ in compiled)
                for short, count in sorted(
                    counts.items(), key=lambda item: -sum(s for n, _, s in compiled if n == item[0])
                ):
                    seconds = sum(own for other, _, own in compiled if other == short)
                    print(f"    {seconds:6.2f} s {count:3} x {short}")
    if options.output:
        options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
