"""How far codecs change pseudo-gradients: `python -m bench.convergence.pseudo_gradients [--output …/pseudo_gradients.json]`.

A row of a task with local steps is trained up to the end of a round, in the middle of the run by default. What each rank then
has changed since the last round is its pseudo-gradient. `--vectors` is a file for them, which `torch.load` reads.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagua_kernels.algorithms.exchanges.vectors import Named, scatter
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import from_spec
from bench import speed
from bench.convergence.dealing import order_of
from bench.convergence.local_steps import DILOCO
from bench.convergence.measure import begun, take_steps, wrap
from bench.convergence.row import TEXT, Row
from bench.convergence.rows import ROWS
from bench.convergence.tasks import TASKS, Data, Task

CODECS = (
    "absmax_int8",
    "absmax_int4",
    "two_magnitudes",
    "minmax_uint2",
    "sign",
    "topk:ratio=0.0157",
    "chunked_topk:k=64,chunk=4096",
)
LEAST = 4096  # elements of a parameter that codecs are tried on


def pseudo_gradients(algorithm: OuterLoop) -> Named:
    """Returns `start - x` of this rank, by name of the parameter; called after the last step of a round."""
    found: dict[str, torch.Tensor] = {}
    for bucket in algorithm.local.flat.buckets:
        found |= scatter(bucket, algorithm.local.flat.kept(bucket, "start") - bucket.flat)
    return found


def record(
    communicator: Communicator,
    task: Task,
    row: Row,
    start: torch.nn.Module,
    data: Data,
    order: torch.Tensor,
    number: int | None,
) -> Named:
    """Trains as one rank up to the end of a round, and returns its pseudo-gradients."""
    algorithm, optimizer = wrap(communicator, task, row, copy.deepcopy(start), len(order))
    if not isinstance(algorithm, OuterLoop):
        raise TypeError(f"expected a row with an outer loop, got {row.label!r} with {type(algorithm).__name__}")
    rounds = len(order) // algorithm.interval
    last = algorithm.interval * (max(1, rounds // 2) if number is None else number)
    if last > len(order):
        raise ValueError(f"{len(order)} steps have {rounds} rounds of {algorithm.interval}, got round {number}")
    with algorithm:
        take_steps(algorithm, optimizer, task, data, order[:, communicator.rank], last)
        # Before the next forward pass the round is under way, and parameters are as the last step left them.
        found = pseudo_gradients(algorithm)
        algorithm.wait()
    return found


def recorded(task: Task, row: Row, steps: int, number: int | None = None, seed: int = 0) -> Named:
    """Returns the pseudo-gradients of all ranks, each of shape (ranks, elements).

    Args:
        task: to train on.
        row: how.
        steps: of a whole run.
        number: of the round, from 1; None for the one in the middle.
        seed: of the start, and of the order of examples.
    """
    data = task.data()
    start, order = begun(task, data, seed), order_of(len(data.x), task, steps, seed)
    ranks = run_ranks(task.ranks, record, task, row, start, data, order, number, timeout=120.0)
    return {name: torch.stack([one[name] for one in ranks]) for name in ranks[0]}


def relative_error(spec: str, vectors: Sequence[torch.Tensor]) -> float:
    """Returns sum |C(v) - v|^2 / sum |v|^2 over vectors, each of which is encoded by itself."""
    codec, error, norm = from_spec(spec), 0.0, 0.0
    for seed, vector in enumerate(vectors):
        decoded = codec.decode(codec.encode(vector, seed=seed), torch.empty_like(vector))
        error += (decoded - vector).square().sum().item()
        norm += vector.square().sum().item()
    return error / norm


def errors(found: Named, codecs: Sequence[str] = CODECS) -> list[dict[str, Any]]:
    """Each codec's error on all ranks' pseudo-gradients of large parameters, and on normal vectors of the same sizes."""
    vectors = [one for stack in found.values() for one in stack if one.numel() >= LEAST]
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(vector.numel(), generator=generator) for vector in vectors]
    return [
        {
            "codec": spec,
            "bytes_per_element": from_spec(spec).payload_size(10**6) / 10**6,
            "pseudo_gradients": relative_error(spec, vectors),
            "normal": relative_error(spec, normal),
        }
        for spec in codecs
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What `errors` has found."""
    grid = Table(title="|C(v) - v|² / |v|²", title_justify="left")
    grid.add_column("codec")
    for heading in ("bytes per element", "pseudo-gradients", "normal vectors"):
        grid.add_column(heading, justify="right")
    for row in rows:
        found = [f"{row[name]:.4f}" for name in ("pseudo_gradients", "normal")]
        grid.add_row(row["codec"], f"{row['bytes_per_element']:.3f}", *found)
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [row.label for row in ROWS if TEXT[0] in row.tasks]
    parser.add_argument("--row", choices=labels, default=DILOCO)
    parser.add_argument("--steps", type=int, default=TASKS["text"].steps, help="of a whole run")
    parser.add_argument("--round", type=int, help="from 1; the one in the middle by default")
    parser.add_argument("--vectors", type=Path, help="file for the pseudo-gradients of all ranks")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS["text"]
    row = next(row for row in ROWS if row.label == options.row and task.name in row.tasks)
    found = recorded(task, row, options.steps, options.round)
    if options.vectors:
        torch.save(found, options.vectors)
    rows = errors(found)
    speed.console().print(table(rows))
    if options.output:
        elements = sum(one.numel() for one in found.values())
        settings = {"row": row.label, "steps": options.steps, "round": options.round, "ranks": task.ranks}
        settings |= {"elements": elements // task.ranks, "data": task.data().digest}
        speed.write(options.output, {"machine": speed.machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
