"""Random trainings by all algorithms, in which features meet, compared with what is known of each.

    python -m tests.algorithms.meetings.fuzz --threads 2000 --processes 200 --seed 0

Each training is drawn from its seed: the algorithm, what its steps are made of, and what happens between them. `--seed SEED
--threads 1` repeats one. `--rows` names the algorithms to draw from.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import run_processes
from tests.algorithms.meetings.checks import compared, differences
from tests.algorithms.meetings.rows import ROWS
from tests.algorithms.meetings.trainings import COLLECTIVE, MIDDLE, NEUTRAL, Event, Training, train

# Seconds for which a rank waits for another: longer than anything takes, shorter than a user's patience.
PATIENCE = 20.0
# By number of ranks.
NODES = {3: ((0, 2), (1,)), 4: ((0, 1), (2, 3)), 5: ((0,), (1, 2), (3, 4))}


def draw(seed: int, ranks: int | None = None, rows: Sequence[str] = tuple(ROWS), nodes: bool = False) -> Training:
    """A training from a seed; with `nodes`, on nodes of several ranks."""
    dice = random.Random(seed)
    size = dice.choice((2, 2, 3, 4))
    size = ranks or (size + 2 - size // 4 * 2 if nodes else size)
    name = dice.choice(list(rows))
    row = ROWS[name]
    steps = dice.randint(3, 8)
    nets = 2 if dice.random() < 0.25 else 1
    optimizer = dice.choice(("sgd", "sgd", "momentum", "adamw"))
    if name in ("mu_loco", "dgc"):
        # The one needs it, the other keeps the momentum itself.
        optimizer = {"mu_loco": "muon", "dgc": "sgd"}[name]
    batches = [steps] * size
    # Of two networks, each within its own join(), ranks would wait for one in the end of the other.
    uneven = dice.random() < 0.2 and row.joins and nets == 1
    if uneven:
        batches = [dice.randint(1, steps) for _ in range(size)]
        batches[dice.randrange(size)] = steps
    scaler = dice.choice(("", "", "own", "shared"))
    # Of two networks with local steps, ranks that leave out different steps would wait for each other's rounds.
    overflows = frozenset(
        (step, rank, number)
        for step in range(steps)
        for rank in range(size)
        for number in range(nets)
        # Of two networks, rounds of one would wait for a rank that is at the end of the other.
        if scaler and dice.random() < 0.08 and not (nets == 2 and row.family == "local")
    )
    leaves = not scaler and row.family in ("gossip", "local") and not uneven and nets == 1 and dice.random() < 0.6
    left_out = frozenset(
        (step, rank) for step in range(steps) for rank in range(size) if leaves and dice.random() < 0.1
    )
    micro = dice.choice((1, 1, 2, 3))
    training = Training(
        row=name,
        ranks=size,
        batches=tuple(batches),
        seed=seed % 1000,
        micro=micro,
        no_sync=dice.random() < 0.5,
        clips=dice.random() < 0.3,
        # Without the frozen layer there is no matrix for Muon.
        frozen=dice.random() < 0.25 and name != "mu_loco",
        nets=nets,
        scaler=scaler,
        overflows=overflows,
        left_out=left_out,
        zeros=dice.random() < 0.3,
        clamp=dice.choice((0.0, 0.0, 0.0, 0.0, 0.7)),
        optimizer=optimizer,
        still=dice.random() < 0.15,
        nodes=NODES.get(size, ()) if nodes else (),
    )
    return replace(training, events=_events(dice, training, steps))


def _events(dice: random.Random, training: Training, steps: int) -> tuple[Event, ...]:
    row = training.kind
    even = not training.uneven
    # Of algorithms with local steps ranks are in different rounds afterwards.
    first = min([step for step, *_ in [*training.overflows, *training.left_out]], default=steps)
    same = first if row.family == "local" else steps
    events: list[Event] = []
    for step in range(steps):
        if dice.random() < 0.5:
            continue
        for _ in range(dice.choice((1, 1, 2))):
            kind = dice.choice(NEUTRAL)
            middle = kind in MIDDLE and dice.random() < 0.4
            if middle and kind in COLLECTIVE and row.family == "courier":
                continue
            rank = None
            if kind in COLLECTIVE:
                if training.uneven or step > same or (row.family == "courier" and kind in ("resume", "reload")):
                    continue
            elif dice.random() < 0.4:
                rank = dice.randrange(training.ranks)
            events.append(Event(step, kind, middle, rank, waits=not middle and dice.random() < 0.3))
    if even and steps > 2 and dice.random() < 0.25:
        step = dice.randint(1, min(steps - 1, same)) if same else 0
        # Weights that are loaded right after others may count as a part of the step between.
        events.append(Event(step, "load"))
    others = [name for name in ROWS if not ROWS[name].own_optimizer and name not in ("mu_loco", "dgc")]
    if even and not training.left_out and same == steps and not row.own_optimizer and dice.random() < 0.2:
        to = dice.choice(others)
        mid = any(event.middle and event.kind in COLLECTIVE for event in events)
        # Scalers of ranks would differ.
        if not training.overflows and not (mid and ROWS[to].family == "courier"):
            wide = row.dtype == torch.float64 or ROWS[to].dtype == torch.float32
            if wide:
                events.append(Event(dice.randint(1, steps - 1), "switch", row=to))
    # In a step: what is loaded first, since an exchange that is put in place afterwards is part of what is compared.
    return tuple(sorted(events, key=lambda event: (event.step, event.kind == "switch")))


def problems_of(training: Training) -> list[str]:
    """What is wrong with a training, an exception among it."""
    # Whoever hangs although all have a timeout tells where.
    faulthandler.dump_traceback_later(20 * PATIENCE, exit=True)
    try:
        return differences(training, PATIENCE)
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-3:])
        return [f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}\n{text}"]
    finally:
        faulthandler.cancel_dump_traceback_later()


def by_threads(seeds: Sequence[int], rows: Sequence[str] = tuple(ROWS), nodes: bool = False) -> dict[int, list[str]]:
    """Runs trainings with threads as ranks; returns what is wrong, by seed."""
    found = {}
    for seed in seeds:
        if problems := problems_of(draw(seed, rows=rows, nodes=nodes)):
            found[seed] = problems
            _tell(seed, problems, draw(seed, rows=rows, nodes=nodes))
    return found


def rank_of_processes(first: int, count: int, rows: Sequence[str], path: str) -> None:
    """One process's part of some trainings over one process group; rank 0 writes what is wrong to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    communicator = comm.init(timeout=PATIENCE)
    found = {}
    for seed in range(first, first + count):
        training = draw(seed, communicator.size, rows)
        outcomes = communicator.all_gather_object(train(communicator, training))
        plain = training.without_neutral()
        others = communicator.all_gather_object(train(communicator, plain)) if plain != training else None
        # What is compared is one rank's work.
        if seed % communicator.size == communicator.rank and (problems := compared(training, outcomes, others)):
            found[seed] = problems
        if seed % 20 == 0:
            gc.collect()
    everywhere = communicator.all_gather_object(found)
    if communicator.rank == 0:
        whole = {seed: problems for part in everywhere for seed, problems in part.items()}
        Path(path).write_text(json.dumps(whole))
    comm.shutdown()


def by_processes(
    first: int, count: int, size: int, rows: Sequence[str] = tuple(ROWS), timeout: float = 1800
) -> dict[int, list[str]]:
    """Runs trainings with processes as ranks, all in one process group; returns what is wrong, by seed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        arguments = (first, count, list(rows), os.fspath(path))
        results = run_processes(rank_of_processes, size, args=arguments, timeout=timeout)
        if any(result.returncode for result in results):
            # The seed is in none of their words: each of the trainings is repeated by itself.
            if count == 1:
                return {first: [result.stderr[-1500:] for result in results if result.returncode]}
            half = count // 2
            return by_processes(first, half, size, rows, timeout) | by_processes(
                first + half, count - half, size, rows, timeout
            )
        return {int(seed): problems for seed, problems in json.loads(path.read_text()).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings and prints what is wrong; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="trainings with threads as ranks")
    parser.add_argument("--processes", type=int, default=0, help="trainings with processes as ranks")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="the algorithms to draw from")
    parser.add_argument("--nodes", action="store_true", help="threads are ranks on nodes of several")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, total = time.monotonic(), 0
    for part in range(0, options.threads, 50):
        end = min(part + 50, options.threads)
        total += len(by_threads(range(options.seed + part, options.seed + end), options.rows, options.nodes))
        gc.collect()
        print(f"threads: {end} of {options.threads}, {time.monotonic() - begin:.0f} s", flush=True)
    done = 0
    for size, share in ((2, options.processes - options.processes // 2), (3, options.processes // 2)):
        for part in range(0, share, 25):
            count = min(25, share - part)
            found = by_processes(options.seed + done, count, size, options.rows)
            done, total = done + count, total + len(found)
            for seed, problems in found.items():
                _tell(seed, problems, draw(seed, size, options.rows))
            print(f"processes: {done} of {options.processes}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{options.threads + options.processes} trainings, {total} with faults")
    return int(total > 0)


def _tell(seed: int, problems: Sequence[str], training: Training) -> None:
    print(f"seed {seed}: {'; '.join(problems)}\n  {training}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
