"""Small runs of the package that record which of its files each thread enters."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import knobs
from bagua_kernels.algorithms import Algorithm, AutoTune, ByteGrad, Decentralized, DiLoCo, SparseLoCo, Wagma, ddp
from bagua_kernels.algorithms.choosing import chooser
from bagua_kernels.algorithms.choosing.search import EXACT_STEPS
from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.optim import AdamW
from tests import limits
from tests.algorithms.choosing.tuned import SLOW
from tests.algorithms.ranks import fill, loss_of

ROOT = Path(__file__).parents[2]
FLOORS = tuple(f"{ROOT / name}{os.sep}" for name in ("bagua_kernels", "comm", "algorithms"))
# A communication thread executes exchanges, in an order of threads that does not repeat. Each of them is recorded by itself.
TASK = ("algorithms/engine/runtime.py", "_drain")


class Recorder:
    """Records the files that threads enter by calls, while it is switched on. Bodies of modules, which imports run, do not count.

    Attributes:
        entries: by the number of a thread and that of its task, the files that it entered, without direct repetitions.
        threads: by the number of a thread, its name.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], list[str]] = {}
        self.threads: dict[int, str] = {}
        self._on = False
        self._files: dict[str, str] = {}
        self._tasks: Counter[int] = Counter()

    def switch(self) -> None:
        """Begins to record, or ends it."""
        self._on = not self._on

    def _file(self, path: str) -> str:
        """A file's path in the repository; nothing for a file of others."""
        found = self._files.get(path)
        if found is None:
            real = os.path.realpath(path)
            found = self._files[path] = os.path.relpath(real, ROOT) if real.startswith(FLOORS) else ""
        return found

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self._on or not (file := self._file(frame.f_code.co_filename)):
            return
        thread, name = threading.get_ident(), frame.f_code.co_name
        if (file, name) == TASK:
            self._tasks[thread] += 1
        self.threads.setdefault(thread, threading.current_thread().name)
        entries = self.entries.setdefault((thread, self._tasks[thread]), [])
        if name != "<module>" and (not entries or entries[-1] != file):
            entries.append(file)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Records the calling thread, and threads that start within."""
        before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    def of(self, *names: str) -> list[list[str]]:
        """What threads entered in each task, of those that have one of these names; all threads without one."""
        return [
            files
            for (thread, _), files in self.entries.items()
            if self.threads[thread] in names or (files and not names)
        ]

    def entered(self) -> set[str]:
        """All files that were entered."""
        return {file for files in self.of() for file in files}


class Matrices(nn.Module):
    """Two matrices that all algorithms compress, and biases, which they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 640), nn.Tanh(), nn.Linear(640, 13))
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(
    wrap: Callable[..., Algorithm], *, before: int, steps: int, called: bool = False, **options: Any
) -> Recorder:
    """Trains on two thread ranks, and records the steps that follow the first ones.

    Args:
        wrap: the algorithm.
        before: steps that are not recorded.
        steps: that are.
        called: True if the forward pass after them is recorded, too.
        options: of the algorithm.
    """

    def rank(communicator: Communicator) -> None:
        module = Matrices()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = wrap(module, optimizer, communicator=communicator, **options)
        for step in range(before + steps):
            if step == before:
                together.wait()
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        if called:
            loss_of(model, communicator.rank, 0)
        together.wait()
        model.close()

    recorder = Recorder()
    together = threading.Barrier(2, recorder.switch, limits.seconds(60))
    with recorder.installed():
        run_ranks(2, rank)
    return recorder


def decided() -> Recorder:
    """The step after which AutoTune decides, as on a slow network, and the next one."""
    with mock.patch.object(chooser, "slowest", return_value=SLOW):
        return trained(AutoTune, before=EXACT_STEPS - 1, steps=2)


def triggered() -> Recorder:
    """A version of WAGMA, in an order that repeats: who begins it and who hears of it depend on the order."""

    def rank(communicator: Communicator) -> None:
        module = Matrices()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = Wagma(module, optimizer, communicator=communicator)
        for step in range(3):
            if step == 2 and communicator.rank == 0:
                recorder.switch()
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        loss_of(model, communicator.rank, 0)
        if communicator.rank == 0:
            recorder.switch()
        model.close()

    recorder = Recorder()
    with recorder.installed():
        run_ranks(4, rank, schedule=Schedule(0))
    return recorder


def hooked() -> Recorder:
    """A pass of DDP with a hook. DDP has a group of one process in each thread; the hook's communicator has both ranks."""

    def rank(communicator: Communicator) -> None:
        model = DistributedDataParallel(Matrices())
        hook = ddp.hook("bytegrad", model, communicator=communicator)
        model.register_comm_hook(None, hook)
        for step in range(3):
            if step == 2:
                together.wait()
            model.zero_grad()
            loss_of(model, communicator.rank, step).backward()
        together.wait()
        hook.close()

    recorder = Recorder()
    together = threading.Barrier(2, recorder.switch, limits.seconds(60))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with recorder.installed():
            run_ranks(2, rank)
    finally:
        dist.destroy_process_group()
    return recorder


def stepped() -> Recorder:
    """A step of AdamW, without ranks."""
    recorder, module = Recorder(), Matrices()
    optimizer = AdamW(module.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(module, 0, step).backward()
        if step == 2:
            with recorder.installed():
                recorder.switch()
                optimizer.step()
                recorder.switch()
        else:
            optimizer.step()
    return recorder


# By the heading of a walk in docs/architecture.md.
WALKS: dict[str, Callable[[], Recorder]] = {
    "ByteGrad, a step": partial(trained, ByteGrad, before=2, steps=1),
    "Decentralized on a ring, a step": partial(trained, Decentralized, before=2, steps=1, peers="ring"),
    "DiLoCo, a round": partial(trained, DiLoCo, before=4, steps=2, called=True, interval=3),
    "SparseLoCo, a round": partial(trained, SparseLoCo, before=4, steps=2, called=True, interval=3),
    "WAGMA, a letter": triggered,
    "AutoTune, a decision": decided,
    "The hook of DDP, a pass": hooked,
    "AdamW, a step": stepped,
}


def recorded(walk: str) -> Recorder:
    """Runs a walk on the NumPy backend, so that rules are entered, too."""
    gc.collect()  # nothing of earlier runs is finalized while this one is recorded
    with knobs.override(knobs.BACKEND, "numpy"):
        return WALKS[walk]()


def printed(walk: str) -> str:
    """What each thread entered, for who writes the page."""
    recorder = recorded(walk)
    lines = [f"{walk}: {len(recorder.entered())} files"]
    for (thread, _), files in recorder.entries.items():
        lines += [recorder.threads[thread], *(f"    {file}" for file in dict.fromkeys(files))]
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n".join(printed(walk) for walk in sys.argv[1:] or WALKS))
