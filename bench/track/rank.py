"""One rank of a run, on a host of its own; needs PyTorch, and what its entrant needs.

python -m bench.track.rank SETTINGS
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.track.loop import Loop, Windows
from examples import corpus
from examples.transformer import Transformer

WIDTH, LAYERS, CONTEXT, BATCH, RATE = 160, 3, 64, 8, 1.5e-3


def model() -> Transformer:
    """The transformer of all entrants, 0.98 M parameters, with the same ones on all ranks."""
    torch.manual_seed(0)
    return Transformer(corpus.SYMBOLS, WIDTH, LAYERS, context=CONTEXT)


def optimizer_of(net: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer of all entrants that do not bring their own."""
    return torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)


def entrant(path: Path) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(f"entrant_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(settings: dict[str, Any]) -> None:
    """Trains with an entrant, and writes what was found."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A host has its share of the processors: what one rank leaves is not for the others.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank % len(cores) :: size])
    torch.set_num_threads(1)
    net = model()
    x, y = corpus.windows(corpus.load().training, CONTEXT)
    loop = Loop(settings, rank, net, Windows(x, y, BATCH, rank))
    other = copy.deepcopy(net)
    loop.calibrate(optimizer_of(other), other, bool(settings["slow"]) and rank == size - 1)
    entrant(Path(settings["entrant"])).train(net, optimizer_of(net), loop)
    loop.end(Path(settings["folder"]) / f"{rank}.pt")
    # Nobody closes what another still needs.
    loop.meet("end")


def main() -> None:
    warnings.simplefilter("ignore")
    settings = json.loads(sys.argv[1])
    try:
        run(settings)
    except BaseException:
        # One rank's error is all that there will be: others may wait for it for as long as they can.
        Path(settings["folder"], f"{os.environ['RANK']}.error").write_text(traceback.format_exc())
        raise
    sys.stdout.flush()
    # Threads and daemons of entrants are not waited for: what counts is written.
    os._exit(0)


if __name__ == "__main__":
    main()
