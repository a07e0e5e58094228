"""What an entrant trains with: batches until the time is over, and what ranks have to know of each other before."""

from __future__ import annotations

import fcntl
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

LOOKS = 10  # at the parameters of a run, at the same distance in time
_PATIENCE = 90.0  # seconds for another rank to come, before the clock starts
_UP = 0.05  # of the time, in which learning rates rise
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

Pace = Literal["together", "own"]


class Loop:
    """One rank's part of a run. Its clock starts with the first batch, at the same moment on all ranks.

    Ranks agree by files on when to end, so that nothing of it is on the line.

    Attributes:
        rank: of this process, from 0.
        size: how many ranks train.
        batch: windows a rank and step.
        steps: that this rank has begun.
    """

    def __init__(self, settings: dict[str, Any], rank: int, model: torch.nn.Module, data: Windows) -> None:
        """Begins before the clock.

        Args:
            settings: see `measure.settings_of`.
            rank: of this process.
            model: whose parameters are looked at.
            data: what is trained on.
        """
        self.rank, self.size, self.batch = rank, int(settings["ranks"]), data.batch
        self._seconds, self._folder = float(settings["seconds"]), Path(settings["folder"])
        self._addresses: list[str] = settings["addresses"]
        self._model, self._data = model, data
        self._nap = 0.0
        self.steps = 0
        self.looks: list[tuple[float, dict[str, torch.Tensor]]] = []
        self.took = self.compute = 0.0
        self.sent = 0

    def address(self, rank: int) -> str:
        """The IP address of a rank's host."""
        return self._addresses[rank]

    def share(self, name: str, value: object) -> None:
        """Gives a value, which JSON can hold, to all ranks."""
        path = self._folder / f"shared.{name}"
        new = path.with_suffix(f".{self.rank}.new")
        new.write_text(json.dumps(value))
        new.replace(path)

    def shared(self, name: str) -> Any:
        """Returns what a rank has shared; waits for it.

        Raises:
            TimeoutError: nobody has shared it in time.
        """
        path, end = self._folder / f"shared.{name}", time.monotonic() + _PATIENCE
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} has waited {_PATIENCE:g} s for {name}, which no rank has shared")
            time.sleep(0.02)
        return json.loads(path.read_text())

    def meet(self, name: str) -> None:
        """Waits until all ranks are here."""
        self.share(f"{name}.{self.rank}", True)
        for rank in range(self.size):
            self.shared(f"{name}.{rank}")

    def calibrate(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, slow: bool) -> None:
        """Takes steps with a copy while all ranks do: how long a step takes without any exchange."""
        self.meet("calibration")
        taken = []
        for _ in range(12):
            began = time.monotonic()
            x, y = self._data.draw(0)
            optimizer.zero_grad()
            self.loss(model, x, y).backward()
            optimizer.step()
            taken.append(time.monotonic() - began)
        self.compute = sorted(taken[2:])[5]
        self._nap = self.compute if slow else 0.0
        self.meet("calibrated")

    @staticmethod
    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch, in nats per character."""
        return F.cross_entropy(model(x), y)

    def run(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, pace: Pace = "together") -> None:
        """Trains until the time is over, as most entrants do."""
        for x, y in self.batches(optimizer, pace):
            optimizer.zero_grad()
            self.loss(model, x, y).backward()
            optimizer.step()

    def batches(
        self, optimizer: torch.optim.Optimizer, pace: Pace = "together"
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields batches until the time is over, and sets the optimizer's learning rates by the time.

        Args:
            optimizer: whose rates rise in the first twentieth of the time, and fall to a tenth then.
            pace: "together" if a step of one rank may wait for another's, "own" if each ends by itself. In the former all take as
                many steps as the rank that has begun most when the time is over.
        """
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.meet("start")
        if self.rank == 0:
            self.share("began", time.monotonic() + 0.2)
            (self._folder / "begun").write_bytes(bytes(8 * self.size))
        began = float(self.shared("began"))
        self.meet("begun")
        time.sleep(max(0.0, began - time.monotonic()))
        before = int(_SENT.read_text())
        while self._goes_on(began, pace):
            done = min(1.0, (time.monotonic() - began) / self._seconds)
            factor = min(done / _UP, 1.0 - 0.9 * max(0.0, done - _UP) / (1 - _UP))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(factor, 0.02)
            yield self._data.draw(self.steps)
            self.steps += 1
            if self._nap:
                time.sleep(self._nap)
            if len(self.looks) < LOOKS - 1 and time.monotonic() - began > self._seconds * (len(self.looks) + 1) / LOOKS:
                self._look(began)
        self.took = time.monotonic() - began
        self.sent = int(_SENT.read_text()) - before

    def _look(self, began: float) -> None:
        state = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self.looks.append((time.monotonic() - began, state))

    def end(self, path: Path) -> None:
        """Writes what this rank has found, with the parameters that the entrant has left in the model."""
        self.looks.append((self.took, {name: p.detach().clone() for name, p in self._model.named_parameters()}))
        found = {"steps": self.steps, "seconds": self.took, "sent": self.sent, "compute": self.compute}
        torch.save({**found, "looks": self.looks}, path)

    def _goes_on(self, began: float, pace: Pace) -> bool:
        # Under a lock: no rank may see that another has ended, and that one begin a step nevertheless.
        with (self._folder / "begun").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            everyone = list(struct.unpack(f"<{self.size}q", file.read()))
            over = time.monotonic() - began >= self._seconds
            if over and (pace == "own" or everyone[self.rank] >= max(everyone)):
                return False
            everyone[self.rank] += 1
            file.seek(0)
            file.write(struct.pack(f"<{self.size}q", *everyone))
            return True


class Windows:
    """Windows of a text, which a rank draws at random: other ones than other ranks.

    Attributes:
        batch: windows a step.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch: int, rank: int) -> None:
        self._x, self._y, self.batch, self._rank = x, y, batch, rank

    def draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The windows of a step, whatever was drawn before."""
        generator = torch.Generator().manual_seed(step * 1009 + self._rank)
        chosen = torch.randint(len(self._x), (self.batch,), generator=generator)
        return self._x[chosen], self._y[chosen]
