"""Bytes that leave hosts of several ranks, beside the formulas: `python -m bench.training.nodes [--output …/nodes.json]`.

With `--rate 500` links have so many Mbit/s, and the seconds of a step count.

Each layout is a lab (`bench.netlab`) of one host for each of its numbers, with so many ranks: 4,4 is two hosts of four. Every
algorithm trains the same layers. Each host's own counter of its link is read before and after some steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.choosing.cost.facts import Job
from bagua_kernels.algorithms.choosing.cost.methods import bytes_of, known
from bench import speed
from bench.netlab import lab as netlab

LAYOUTS = ("4,4", "1,2,4", "2,2,2,2")
WIDTH, LAYERS = 1024, 8
_QUIET = 2.0  # seconds without the end of an average, after which none is under way
_COUNTER = Path(f"/sys/class/net/{netlab.INTERFACE}/statistics/tx_bytes")

Formula = Callable[[Job, Sequence[int]], float]


@dataclass(frozen=True)
class Case:
    """An algorithm.

    Attributes:
        spec: of the algorithm.
        formula: bytes of an exchange out of each host, by job and ranks of the hosts; None for a list of hosts' own.
        steps: from one exchange to the next.
        even: True if two tiers take hosts of equal numbers of ranks.
    """

    spec: str
    formula: Formula
    steps: int = 1
    even: bool = False


def adviser(name: str) -> Formula:
    """What the adviser counts for a method."""
    method = known()[name]
    return lambda job, ranks: method.sent(job, len(ranks))


def twice(codec: str) -> Formula:
    """An all-reduce between nodes."""
    return lambda job, ranks: bytes_of(codec) * 2 * (len(ranks) - 1) / len(ranks) * job.elements


def once(codec: str) -> Formula:
    """A payload to all other nodes."""
    return lambda job, ranks: bytes_of(codec) * (len(ranks) - 1) * job.elements


def peers(codec: str, most: float) -> Formula:
    """A payload to each of some other nodes."""
    return lambda job, ranks: bytes_of(codec) * min(most, len(ranks) - 1) * job.elements


def ring(job: Job, ranks: Sequence[int]) -> float:
    """A ring of all ranks, which leaves each host once."""
    return 2 * (sum(ranks) - 1) / sum(ranks) * 4 * job.elements


CASES = [
    Case("ddp", ring),
    Case("allreduce", adviser("GradientAllReduce")),
    Case("bytegrad", adviser("ByteGrad")),
    Case("compressed:codec=absmax_int8", adviser("8 bits")),
    Case("compressed:codec=absmax_int4", adviser("4 bits")),
    Case("compressed:codec=cast", twice("cast")),
    Case("sign", adviser("SignSGD")),
    Case("onebit:warmup_steps=0", twice("two_magnitudes")),
    Case("double_squeeze", twice("sign")),
    Case("fp8", twice("fp8")),
    Case("qsgd", twice("qsgd")),
    Case("natural", twice("natural")),
    Case("topk:ratio=0.01", adviser("TopK 1 %")),
    Case("dgc:ratio=0.01", once("topk:ratio=0.01")),
    # Rank 2 has so few bytes that sums take the way with the fewest delays, which sends more.
    Case("powersgd:rank=32", lambda job, ranks: 16 * adviser("PowerSGD 2")(job, ranks)),
    Case("qadam:freeze_step=1", twice("minmax_uint8")),
    Case("onebit_adam:freeze_step=1", adviser("OneBitAdam")),
    Case("local_sgd:interval=2", adviser("LocalSGD 16"), 2),
    Case("diloco:interval=2", adviser("DiLoCo 30"), 2),
    Case("diloco:interval=2,codec=absmax_int4", adviser("DiLoCo 30, 4 bits"), 2),
    Case("sparse_loco:interval=2", adviser("SparseLoCo 30"), 2, even=True),
    Case("decentralized:peers=one_peer_exponential", adviser("Decentralized"), even=True),
    Case("sgp:peers=one_peer_exponential", adviser("SGP"), even=True),
    Case("d2:peers=lazy_ring", adviser("D2 ring"), even=True),
    Case("lowprec:codec=minmax_uint8", adviser("LowPrecisionDecentralized 8"), even=True),
    Case("choco:eta=0.5", adviser("Choco"), even=True),
    Case("wagma:group=2,period=none", peers("", 1.0), even=True),
    Case("async_model_average:interval=2", adviser("AsyncModelAverage"), 2, even=True),
]


def settled(model: Any) -> int:
    """Waits until no average is under way beside training; returns their number."""
    found = -1
    while found != (rounds := model.stats().rounds):
        found = rounds
        time.sleep(_QUIET)
    return found


def on_rank(specs: Sequence[str], exchanges: int) -> None:
    """One rank; prints a line for each algorithm with what its host has sent, if it is the host's first rank."""
    torch.set_num_threads(1)
    world = comm.init()
    for spec in specs:
        case = next(one for one in CASES if one.spec == spec)
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        own: Any = None if spec.startswith(("qadam", "onebit_adam")) else torch.optim.SGD(net.parameters(), 1e-3)
        model: Any = (
            DistributedDataParallel(net)
            if spec == "ddp"
            else from_spec(spec.replace("period=none", "period=1000000"), net, own)
        )
        optimizer = own or model.optimizer

        def train(steps: int, model: Any = model, optimizer: Any = optimizer) -> None:
            for _ in range(steps):
                model(torch.randn(2, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            getattr(model, "wait", lambda: None)()

        train(3 * case.steps)
        rounds = settled(model) if spec.startswith("async") else 0
        world.barrier().wait()
        before = int(_COUNTER.read_text())
        began = time.perf_counter()
        train(exchanges * case.steps)
        world.barrier().wait()
        seconds = (time.perf_counter() - began) / (exchanges * case.steps)
        done = settled(model) - rounds if spec.startswith("async") else exchanges
        world.barrier().wait()
        sent = int(_COUNTER.read_text()) - before
        print(json.dumps({"spec": spec, "sent": sent / done, "seconds": seconds}), flush=True)
        getattr(model, "close", lambda: None)()
    comm.shutdown()


def measure(
    layout: Sequence[int], cases: Sequence[Case], exchanges: int, timeout: float, rate: float | None
) -> dict[str, list[dict[str, float]]]:
    """Returns for each algorithm, and each host, what it has sent for an exchange, and the seconds of a step."""
    specs = [case.spec for case in cases]
    command = [sys.executable, "-m", "bench.training.nodes", "--rank", *specs, "--exchanges", str(exchanges)]
    with netlab.Lab(len(layout), rate=rate) as lab:
        outputs = lab.run(command, layout, timeout=timeout)
        first = [rank for rank, (_, number) in enumerate(lab.places(layout)) if number == 0]
    found: dict[str, list[dict[str, float]]] = {}
    for result in outputs:
        if result.returncode:
            raise SystemExit(
                "\n\n".join(f"rank {each.rank} gave {each.returncode}: {each.stderr[-3000:]}" for each in outputs)
            )
    for rank in first:
        for line in outputs[rank].stdout.splitlines():
            row = json.loads(line)
            found.setdefault(row.pop("spec"), []).append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), help="ranks of each host, such as 4,4")
    parser.add_argument("--specs", nargs="*", default=[case.spec for case in CASES])
    parser.add_argument("--exchanges", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a layout")
    parser.add_argument("--rate", type=float, help="Mbit/s of each link in each direction (default: no limit)")
    parser.add_argument("--rank", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="a JSON file; rows that are not measured anew stay")
    given = parser.parse_args()
    if given.rank:
        on_rank(given.rank, given.exchanges)
        return
    if reason := netlab.available(delay=False):
        raise SystemExit(f"no lab here: {reason}")
    job = Job(1.0, ((WIDTH, WIDTH),) * LAYERS)
    rows = []
    for text in given.layouts:
        layout = [int(word) for word in text.split(",")]
        even = len(set(layout)) == 1
        cases = [case for case in CASES if case.spec in given.specs and (even or not case.even)]
        for spec, hosts in measure(layout, cases, given.exchanges, given.timeout, given.rate).items():
            case = next(one for one in cases if one.spec == spec)
            wanted, sent = case.formula(job, layout), [host["sent"] for host in hosts]
            figures = {"sent": sent, "formula": wanted, "most": max(sent) / wanted}
            seconds = max(host["seconds"] for host in hosts)
            rows.append({"layout": text, "spec": spec, **figures, "seconds": seconds})
            print(json.dumps(rows[-1]), flush=True)
    table = Table(title=f"{job.elements / 1e6:.3g} million parameters: MB that leave a host for an exchange")
    for column in ("ranks of hosts", "algorithm", "sent", "formula", "ratio", "s/step"):
        table.add_column(column, justify="right" if column in ("formula", "ratio", "s/step") else "left")
    for row in rows:
        bytes_ = " ".join(f"{each / 1e6:.3f}" for each in row["sent"])
        cells = (f"{row['formula'] / 1e6:.3f}", f"{row['most']:.3f}", f"{row['seconds']:.3f}")
        table.add_row(row["layout"], row["spec"], bytes_, *cells)
    speed.console().print(table)
    if given.output:
        facts = {"elements": job.elements, "exchanges": given.exchanges, "rate": given.rate}
        rows = merged(given.output, facts, rows)
        speed.write(given.output, {**facts, "rows": rows, "machine": speed.machine()})


def merged(output: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a file with new ones in their places; only new ones if the file is of another run."""
    before = json.loads(output.read_text()) if output.exists() else {}
    if any(before.get(key) != value for key, value in facts.items()):
        return rows
    new = {(row["layout"], row["spec"]): row for row in rows}
    return [new.pop((row["layout"], row["spec"]), row) for row in before["rows"]] + list(new.values())


if __name__ == "__main__":
    main()
