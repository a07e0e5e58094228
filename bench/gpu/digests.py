"""Writes the digests of the CPU's results: `python -m bench.gpu.digests [--groups NAME …] [--check]`.

`bench/gpu/digests.json` has 16 hexadecimal digits of SHA-256 per result, for all cases of `bench.gpu.cases`, and the losses of
`bench.gpu.trainings`. A GPU is compared with them, so that a machine with a GPU compiles nothing for its CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.gpu.child import ROOT

PATH = Path(__file__).with_name("digests.json")
LENGTH = 16
LOSSES = "losses"

# Of a group: for each case the digests of its operations, one after the other.
Digests = dict[str, str]


def made(group: str) -> Digests:
    """The digests of one group, made on this machine's CPU."""
    import torch

    from bench.gpu.cases import CPU, cases_of

    torch.set_num_threads(1)
    return {case.name: "".join(case.digests(CPU)) for case in cases_of(group)}


def losses() -> dict[str, list[float]]:
    """The losses of all trainings, made on this machine's CPU."""
    from bench.gpu.trainings import cpu_losses

    return cpu_losses()


def near(found: Mapping[str, list[float]], known: Mapping[str, list[float]]) -> bool:
    """True if losses differ by no more than rounding can explain: another processor adds up in another order."""
    from bench.gpu.trainings import gap

    if found.keys() != known.keys():
        return False
    gaps = (gap(name, values[0], known) for name, values in found.items())
    return all(difference <= most for difference, most in gaps)


def read(path: Path = PATH) -> dict[str, Any]:
    """The file's content; empty if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def of_group(group: str) -> dict[str, list[str]]:
    """The digests of a group's cases, one per operation."""
    whole: Mapping[str, str] = read().get("groups", {}).get(group, {})
    return {name: list(split(text)) for name, text in whole.items()}


def split(text: str) -> Iterator[str]:
    """The digests of one case."""
    for start in range(0, len(text), LENGTH):
        yield text[start : start + LENGTH]


def written(groups: Mapping[str, Digests], found_losses: Mapping[str, list[float]]) -> str:
    """The file's text, with one line per case."""
    parts = []
    for group, cases in groups.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(text)}" for name, text in cases.items())
        parts.append(f" {json.dumps(group)}: {{\n{lines}\n }}")
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(values)}" for name, values in found_losses.items())
    return '{"groups": {\n' + ",\n".join(parts) + f'\n}},\n"{LOSSES}": {{\n' + rows + "\n}}\n"


def everything(groups: Iterable[str], jobs: int) -> Iterator[tuple[str, Any]]:
    """The digests of all groups, and the losses, as soon as each is there."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Any], str] = {}
        for name in groups:
            waiting[pool.submit(losses) if name == LOSSES else pool.submit(made, name)] = name
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def main() -> None:
    # Before Numba is imported, in the processes of the pool.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".kernel_cache"))
    from bench.gpu.cases import group_names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*group_names(), LOSSES]
    parser.add_argument("--groups", nargs="+", default=known, choices=known, metavar="NAME", help="only some groups")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    start, before = time.monotonic(), read()
    groups: dict[str, Digests] = {name: cases for name, cases in before.get("groups", {}).items() if name in known}
    found_losses: dict[str, list[float]] = before.get(LOSSES, {})
    differing = 0
    for name, result in everything(options.groups, options.jobs):
        same = near(result, found_losses) if name == LOSSES else result == groups.get(name)
        differing += not same
        print(f"[{time.monotonic() - start:4.0f} s] {name}: {'as before' if same else 'differs'}", flush=True)
        if options.check:
            continue
        if name == LOSSES:
            found_losses = result
        else:
            groups[name] = result
        # After each group, so that nothing is lost when the command is stopped.
        PATH.write_text(written({name: groups[name] for name in known if name in groups}, found_losses))
    if options.check and differing:
        raise SystemExit(f"{differing} groups differ from {PATH}: run `make gpu-digests` if the kernels were to change")


if __name__ == "__main__":
    main()
