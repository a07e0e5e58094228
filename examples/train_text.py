"""Trains a small transformer on text with several processes, once with each algorithm, and compares them on a slow line.

    python examples/train_text.py                            two processes on this machine, whose line is fast
    python examples/train_text.py --rate 10                  two emulated hosts behind lines of 10 Mbit/s (Linux, root)
    torchrun --nproc-per-node 2 examples/train_text.py       the same under a launcher of one's own

What concerns this project is marked with an arrow; the rest is an ordinary training loop. All algorithms see the same data
from the same start. `ddp` is `GradientAllReduce`, which computes what DistributedDataParallel does. If all of its steps would
take longer than `--patience`, a few are measured, and threads of one process compute its losses without a line.

The text is in corpus.py, the model in transformer.py; hosts and the progress bar are in report.py, the picture in text_report.py.
"""

import argparse
import contextlib
import copy
import os
import sys
from pathlib import Path

import corpus
import report
import text_report
import torch
import torch.nn.functional as F
from transformer import Transformer

from bagua_kernels import comm
from bagua_kernels.algorithms import ModelAlgorithm, from_spec
from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm
from bagua_kernels.comm import Communicator, run_ranks

CONTEXT = 64  # characters of a window
BATCH = 16  # windows per rank and step
VALIDATION = 512  # windows, over all ranks
# What these names stand for without options. There are 15 rounds: too few for a larger momentum, or for the largest 1.6 %.
SPECS = {
    "ddp": "allreduce",
    "diloco": "diloco:outer_momentum=0.6",
    "sparse_loco": "sparse_loco:codec=chunked_topk:chunk=512",
    "local_sgd": "local_sgd:interval=30",
}
FEW = 6  # steps that are measured before the times of all are extrapolated
LONGEST = 600.0  # seconds that a rank waits for another: rank 0 may compute losses alone for a while


def spec_of(algorithm: str) -> str:
    """Returns the spec of an algorithm on the command line."""
    return SPECS.get(algorithm, algorithm)


def validation_loss(model: torch.nn.Module, text: corpus.Corpus, communicator: Communicator) -> float:
    """Returns the mean loss in nats per character; each rank looks at its part, all return the same number."""
    x, y = (part[:: max(1, len(part) // VALIDATION)] for part in corpus.windows(text.validation, CONTEXT))
    total = torch.zeros(2, device=communicator.device)
    model.eval()
    with torch.no_grad():
        for first in range(communicator.rank * BATCH, len(x), communicator.size * BATCH):
            inputs, targets = (part[first : first + BATCH].to(communicator.device) for part in (x, y))
            total += torch.stack(
                [F.cross_entropy(model(inputs), targets, reduction="sum"), total.new_tensor(targets.numel())]
            )
    model.train()
    communicator.all_reduce(total).wait()
    return (total[0] / total[1]).item()


def train(
    communicator: Communicator,
    algorithm: str,
    start: Transformer,
    text: corpus.Corpus,
    options: argparse.Namespace,
    last: int,
) -> report.Run:
    """Trains a copy of `start` up to a step, and returns what was measured on the way."""
    net = copy.deepcopy(start).to(communicator.device)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95))
    # <- instead of DistributedDataParallel(...)
    model = from_spec(spec_of(algorithm), net, optimizer, communicator=communicator)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    x, y = corpus.windows(text.training, CONTEXT)
    # Windows of all ranks and steps: equal for all algorithms.
    order = torch.randint(len(x), (options.steps, communicator.size, BATCH), generator=torch.Generator().manual_seed(1))
    every = max(1, options.steps // options.evaluations)
    run = report.Run(algorithm, model, last, communicator.rank, communicator.size, "chars", "held back {:.3f}")
    with run, model:
        for step, windows in enumerate(order[:last, communicator.rank]):
            inputs, targets = x[windows].to(communicator.device), y[windows].to(communicator.device)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            evaluates = (step + 1) % every == 0 or step + 1 == options.steps
            if evaluates and isinstance(model, ModelAlgorithm):
                model.wait()  # <- an exchange under way belongs to training, and the evaluation does not
            run.step(loss.item(), inputs.numel(), model.stats())
            if evaluates:
                # Of an algorithm on parameters each rank has its own: their mean is evaluated.
                with model.averaged() if isinstance(model, ModelAlgorithm) else contextlib.nullcontext():
                    run.evaluation(validation_loss(model.module, text, communicator), model.stats())
    return run


def train_or_extrapolate(
    communicator: Communicator, algorithm: str, start: Transformer, text: corpus.Corpus, options: argparse.Namespace
) -> report.Run:
    """Trains as `train` does; where all steps would take too long, measures a few and computes the losses without a line."""
    given = start, text, options
    if algorithm != "ddp":
        return train(communicator, algorithm, *given, options.steps)
    few = train(communicator, algorithm, *given, min(FEW, options.steps))
    seconds = torch.tensor([few.seconds_per_step * options.steps], device=communicator.device)
    communicator.all_reduce(seconds, comm.ReduceOp.MAX).wait()
    if seconds.item() <= options.patience:
        return train(communicator, algorithm, *given, options.steps)
    run = few
    if communicator.rank == 0:
        threads = run_ranks(communicator.size, train, algorithm, *given, options.steps, timeout=LONGEST)
        run = threads[0]
        run.extrapolate(few)
    communicator.barrier().wait()
    return run


def compile_kernels(communicator: Communicator, algorithm: str, start: Transformer) -> None:
    """Takes cheap steps through the first round, in which an algorithm compiles its kernels: times contain none of it."""
    net = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(net.parameters())
    with from_spec(spec_of(algorithm), net, optimizer, communicator=communicator) as model:
        for _ in range(model.interval + model.delay + 1 if isinstance(model, RoundAlgorithm) else 1):
            optimizer.zero_grad()
            model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
            optimizer.step()


def launch(processes: int, rate: float) -> None:
    """Starts the processes, on emulated hosts if a rate is given and this machine can make some, unless that was done."""
    if "RANK" in os.environ:
        return
    if rate:
        reason = report.on_emulated_hosts(processes, rate)
        print(f"{reason}\ntraining with processes on this machine instead, whose line is fast", flush=True)
        sys.argv += ["--rate", "0"]
    report.under_torchrun(processes)


def main() -> None:
    """Reads the command line, starts the processes if that is left to do, trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--algorithm",
        nargs="+",
        default=["ddp", "diloco", "sparse_loco"],
        help="one or several, in turn: ddp, diloco, sparse_loco, local_sgd, each with options such as diloco:interval=50",
    )
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest of the schedule")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds that all steps of ddp may take")
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2, help="ignored under torchrun")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="Mbit/s of each emulated host's line; 0 for no such hosts"
    )
    parser.add_argument("--data", type=Path, help="text file to read instead of the installed text")
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    if min(options.steps, options.evaluations, options.nproc) < 1:
        parser.error("steps, evaluations and nproc must be 1 or more")
    try:
        text = corpus.load(options.data)
    except corpus.CorpusError as error:
        parser.error(str(error))
    launch(options.nproc, options.rate)
    communicator = comm.init(timeout=LONGEST)  # <- reads the launcher's environment: NCCL for GPUs, Gloo for CPUs
    torch.manual_seed(0)
    start = Transformer(corpus.SYMBOLS, options.width, options.layers, context=CONTEXT)
    runs = []
    for algorithm in options.algorithm:
        run_ranks(comm.size(), compile_kernels, algorithm, start, timeout=LONGEST)
        runs.append(train_or_extrapolate(communicator, algorithm, start, text, options))
    if comm.rank() == 0:
        line = f"{options.rate:g} Mbit/s" if options.rate else "no limit"
        title = f"characters ({text.name}), ranks: {comm.size()}, steps: {options.steps}, line: {line}"
        text_report.write(runs, options.output, title, vars(options))
    comm.shutdown()  # <-


if __name__ == "__main__":
    main()
