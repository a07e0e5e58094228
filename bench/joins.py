"""A process joins three that train: how long these wait at most. `python -m bench.joins [--output bench/results/joins.json]`.

Each rank has an emulated host of its own, see `bench.netlab`; it needs Linux and root. After some steps a fourth host's process
rehearses, fetches a draft of the model, and joins. The table has the longest time between two steps of the others, from its call
of `init` until it has their bits. Beside it are the median and the longest before. With local steps the longest is that of a
round. "bound" is 1.1 of the median and 50 ms more. With `--plain` the process joins without a rehearsal and a draft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.netlab import lab as netlab
from bench.waiting import until

HOSTS, PORT = 4, 29700
STEPS = {None: 150, 100.0: 80, 10.0: 25}  # before the process joins, by the rate of a link in Mbit/s
_AFTER = 20  # steps after the new rank has the bits of the others
_LIMIT = 400.0  # seconds for a rank to come to something


def trains(spec: str, joins: str, plain: bool) -> None:
    """One rank: trains until it is ended; prints the time of each step, and the ranks."""
    import torch

    from bagua_kernels import comm
    from bagua_kernels.algorithms import Draft, from_spec
    from bagua_kernels.comm import Communicator

    torch.manual_seed(0)
    x = torch.randn(64, 64)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 512),
            torch.nn.Tanh(),
            torch.nn.Linear(512, 512),
            torch.nn.Tanh(),
            torch.nn.Linear(512, 8),
        )
        return net, torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def rehearse(communicator: Communicator) -> None:
        net, optimizer = make()
        with from_spec(spec, net, optimizer, communicator=communicator) as model:
            for _ in range(10):
                step(model, optimizer)

    net, optimizer = make()
    if joins:
        draft = None
        if not plain:
            comm.run_ranks(HOSTS, rehearse)
            draft = Draft(net, optimizer)
        print("BEGIN", time.time(), flush=True)
        members = comm.init(join=joins, draft=draft).members
    else:
        members = comm.init(elastic=True, listen=str(PORT)).members
    model = from_spec(spec, net, optimizer, on_failure="heal")
    while True:
        step(model, optimizer)
        time.sleep(0.01)
        print("STEP", time.time(), len(members.ranks), int(model.is_behind), flush=True)


def measure(spec: str, rate: float | None, plain: bool) -> dict[str, Any]:
    """Returns the figures of one job."""
    with netlab.Lab(HOSTS, rate=rate) as lab, tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{host}.txt" for host in range(HOSTS)]

        def start(host: int, joins: str) -> None:
            command = [sys.executable, "-m", "bench.joins", "--rank", spec, joins, str(int(plain))]
            secret = {"BAGUA_KERNELS_SECRET": "of this benchmark alone", "PYTHONPATH": str(Path.cwd())}
            world = {**lab.environment(host), "WORLD_SIZE": str(HOSTS - 1)}
            with paths[host].open("wb") as file:
                lab.start(host, command, {**world, **secret}, file, file)

        def printed() -> str:
            return "\n".join(path.read_text(errors="replace")[-700:] for path in paths if path.exists())

        for host in range(HOSTS - 1):
            start(host, "")
        old = paths[:-1]
        until(lambda: all(len(_steps(path)) > STEPS[rate] for path in old), _LIMIT, printed)
        start(HOSTS - 1, ",".join(f"{lab.address(host)}:{PORT}" for host in range(HOSTS - 1)))
        until(lambda: any(not behind for _, _, behind in _steps(paths[-1])), _LIMIT, printed)
        whole = next(moment for moment, _, behind in _steps(paths[-1]) if not behind)
        until(lambda: all(sum(each[0] > whole for each in _steps(path)) > _AFTER for path in old), _LIMIT, printed)
        begin = next(float(line.split()[1]) for line in paths[-1].read_text().splitlines() if line.startswith("BEGIN"))
        entered = _steps(paths[-1])[0][0]
        gaps, medians, before_it = list[float](), list[float](), list[float]()
        for path in old:
            pairs = list(itertools.pairwise([moment for moment, *_ in _steps(path)][5:]))
            quiet = [after - before for before, after in pairs if after < begin]
            medians.append(statistics.median(quiet))
            before_it.append(max(quiet))
            gaps.append(max(after - before for before, after in pairs if after > begin and before < whole))
    median = statistics.median(medians)
    return {
        "spec": spec,
        "rate_mbit": rate,
        "plain": plain,
        "median_step": median,
        "bound": 1.1 * median + 0.05,
        "longest_gap": max(gaps),
        "longest_gap_before": max(before_it),
        "seconds_to_first_step": entered - begin,
        "seconds_to_same_bits": whole - begin,
    }


def _steps(path: Path) -> list[tuple[float, int, bool]]:
    """Returns when a rank has finished its steps, among how many, and if it was behind."""
    lines = [line.split() for line in path.read_text(errors="replace").splitlines() if line.startswith("STEP")]
    return [(float(line[1]), int(line[2]), line[3] == "1") for line in lines if len(line) == 4]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", nargs="+", default=["bytegrad", "decentralized", "diloco:interval=10"])
    parser.add_argument("--rates", nargs="+", default=["none", "100", "10"], help="Mbit/s of a link; none for no limit")
    parser.add_argument("--plain", action="store_true", help="without a rehearsal and a draft")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args(arguments)
    if options.rank:
        spec, joins, plain = options.rank
        trains(spec, joins, plain == "1")
    if reason := netlab.available(delay=False):
        print(reason, file=sys.stderr)
        return 1
    found = []
    print(
        f"{'':20} {'Mbit/s':>7} {'step, s':>9} {'before':>7} {'joining':>8} {'bound':>7} {'first step':>11} {'same bits':>10}"
    )
    for spec in options.specs:
        for rate in options.rates:
            one = measure(spec, None if rate == "none" else float(rate), options.plain)
            found.append(one)
            print(
                f"{spec:20} {rate:>7} {one['median_step']:9.3f} {one['longest_gap_before']:7.3f} {one['longest_gap']:8.3f} "
                f"{one['bound']:7.3f} {one['seconds_to_first_step']:11.2f} {one['seconds_to_same_bits']:10.2f}",
                flush=True,
            )
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
