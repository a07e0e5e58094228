"""Cuts the network between four ranks that heal: `python -m bench.cuts [--timeout 4] [--output bench/results/cuts.json]`.

Each rank has an emulated host of its own, see `bench.netlab`; it needs Linux and root. Where nothing comes from others a rank
goes on only among more than half: of two parts at most one trains on. A case is a partition of the hosts, which lasts or is
mended after some seconds. For each rank the table has what became of it, and how long after the cut it knew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.netlab import lab as netlab
from bench.waiting import until

HOSTS = 4
_WARM, _LIMIT = 20, 90.0  # steps before a cut; seconds for a rank to come to something
# The hosts of the second part, those that are each alone, and seconds until all is mended; what has to become of them.
CASES: dict[str, tuple[list[int], list[int], float | None, list[int]]] = {
    "2 + 2": ([2, 3], [], None, []),
    "3 + 1": ([3], [], None, [0, 1, 2]),
    "3 + 1, rank 0 alone": ([0], [], None, [1, 2, 3]),
    "2 + 1 + 1": ([], [2, 3], None, []),
    "3 + 1 for 2 s": ([3], [], 2.0, [0, 1, 2, 3]),
}


def trains(spec: str, timeout: float) -> None:
    """One rank: trains until it may not; prints each step, and its end."""
    import torch

    from bagua_kernels import comm
    from bagua_kernels.algorithms import from_spec
    from bagua_kernels.errors import MembershipError

    torch.manual_seed(0)
    members = comm.init(elastic=True, timeout=timeout).members
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = from_spec(spec, net, optimizer, on_failure="heal")
    try:
        while True:
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)
            print("STEP", time.time(), *members.ranks, flush=True)
    except MembershipError as error:
        print("OUT", time.time(), error, flush=True)
    os._exit(0)  # what is left would wait for hosts that are cut off


def measure(case: str, spec: str, timeout: float) -> dict[str, Any]:
    """Returns what became of the ranks in one case."""
    part, alone, seconds, go_on = CASES[case]
    command = [sys.executable, "-m", "bench.cuts", "--rank", spec, str(timeout)]
    with netlab.Lab(HOSTS) as lab, tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{host}.txt" for host in range(HOSTS)]
        for host, path in enumerate(paths):
            with path.open("wb") as file:
                lab.start(host, command, {**lab.environment(host), "PYTHONPATH": str(Path.cwd())}, file, file)

        def printed() -> str:
            return "\n".join(path.read_text()[-700:] for path in paths)

        until(lambda: all(path.read_text().count("STEP") > _WARM for path in paths), _LIMIT, printed)
        begin = time.time()
        lab.part(part)
        for host in alone:
            lab.cut(host)
        if seconds is not None:
            time.sleep(seconds)
            for host in part:
                lab.join(host)
        expected = [" ".join(map(str, go_on)) if host in go_on else "" for host in range(HOSTS)]
        found = [dict[str, Any]() for _ in range(HOSTS)]

        def ended() -> bool:
            for host, path in enumerate(paths):
                found[host] = _became(path, begin, expected[host])
            return all(found)

        until(ended, _LIMIT, printed)
    return {"case": case, "spec": spec, "timeout": timeout, "ranks": found}


def _became(path: Path, begin: float, expected: str) -> dict[str, Any]:
    """Returns what became of a rank, by its output; an empty dictionary if that is not known yet."""
    for line in path.read_text(errors="replace").splitlines():
        what, _, rest = line.partition(" ")
        moment, _, text = rest.partition(" ")
        if what == "OUT":
            return {"goes_on": False, "seconds": float(moment) - begin, "error": text}
        # A step that was under way may still end, among all.
        if what == "STEP" and expected and text == expected and float(moment) > begin + 0.5:
            return {"goes_on": True, "seconds": float(moment) - begin, "ranks": text}
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures; the status is 1 if a part went on that must not, or ended that may not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=4.0, help="of the job, in seconds; 4 by default")
    parser.add_argument("--specs", nargs="+", default=["bytegrad", "diloco:interval=4"])
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    if options.rank:
        trains(options.rank[0], float(options.rank[1]))
    if reason := netlab.available(delay=False):
        print(reason, file=sys.stderr)
        return 1
    found, wrong = [], 0
    for spec in options.specs:
        for case, (*_, go_on) in CASES.items():
            one = measure(case, spec, options.timeout)
            found.append(one)
            right = [each["goes_on"] for each in one["ranks"]] == [host in go_on for host in range(HOSTS)]
            wrong += not right
            ranks = [f"{'goes on' if each['goes_on'] else 'raises'} {each['seconds']:.1f} s" for each in one["ranks"]]
            print(f"{spec:20} {case:20} {'; '.join(ranks)}{'' if right else '  WRONG'}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
