"""Local steps in plain PyTorch: a model, an optimizer and a loop for each rank, and outer steps by hand.

The formulas are those of the papers: Stich, local SGD, ICLR 2019; Lin et al., post-local SGD, ICLR 2020; Wang et al., SlowMo,
ICLR 2020; Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025; Sarfi et al., SparseLoCo, 2025.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.algorithms.local_steps.draws import Segment, Training
from tests.oracles import chunked

Named = dict[str, torch.Tensor]


@dataclass
class Round:
    """A round under way.

    Attributes:
        sent: of each rank, the parameters of the round as they were when it began.
        means: of pseudo-gradients.
        rates: learning rates of the parameters in the last step of the round.
        due: number of steps after which it is merged.
    """

    sent: list[Named]
    means: Named
    rates: Mapping[str, float]
    due: int


class Replicas:
    """The ranks of a training.

    Attributes:
        nets: of each rank.
        optimizers: of each rank.
        steps: taken by each.
        phi: the outer parameters, by name.
        momentum: of the outer optimizer; of SlowMo in units of gradients.
        residuals: of each rank.
    """

    def __init__(
        self, training: Training, make: Callable[[Training], nn.Module], ranks: int, before: Replicas | None
    ) -> None:
        """Begins with equal models, or with the means of what other ranks have come to."""
        self.training = training
        self.nets = [make(training) for _ in range(ranks)]
        self.optimizers = [training.make_optimizer(net) for net in self.nets]
        self.rates = [float(group["lr"]) for group in self.optimizers[0].param_groups]
        self.last = 0  # rank that has taken a step
        self.tries = [0] * ranks
        self.steps = 0
        self.name = ""
        self.options: dict[str, Any] = {}
        self.phi: Named = {}
        self.momentum: Named = {}
        self.residuals: list[Named] = [{} for _ in range(ranks)]
        self.under_way: Round | None = None
        if before is not None:
            self._take_over(before)

    @property
    def exact(self) -> torch.dtype:
        """The dtype of outer parameters."""
        return torch.promote_types(self.training.dtype, torch.float32)

    def theta(self, rank: int) -> Named:
        """The trainable parameters of a rank."""
        return {name: p.data for name, p in self.nets[rank].named_parameters() if p.requires_grad}

    def _take_over(self, before: Replicas) -> None:
        for net in self.nets:
            for name, p in net.named_parameters():
                p.data.copy_(mean([dict(each.named_parameters())[name].data for each in before.nets]))
            for name, buffer in net.named_buffers():
                found = [dict(each.named_buffers())[name] for each in before.nets]
                buffer.copy_(mean(found) if "running" in name else found[0])
        states = [optimizer.state_dict() for optimizer in before.optimizers]
        merged = copy.deepcopy(states[0])
        for number, entries in merged["state"].items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    entries[key] = mean([state["state"][number][key] for state in states])
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(merged))
        self.tries = [max(before.tries)] * len(self.nets)
        self.steps, self.name, self.options = before.steps, before.name, before.options
        self.phi, self.momentum = before.phi, before.momentum
        if before.residuals[0]:
            means = {name: mean([each[name] for each in before.residuals]) for name in before.residuals[0]}
            self.residuals = [{name: value.clone() for name, value in means.items()} for _ in self.nets]

    def wrap(self, name: str, options: Mapping[str, Any]) -> None:
        """Begins with an algorithm, from what all ranks have in the mean and rank 0's optimizer."""
        if self.name not in ("", "allreduce"):
            self.synchronize()
        state, own = self.nets[0].state_dict(), self.optimizers[0].state_dict()
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            net.load_state_dict(copy.deepcopy(state))
            optimizer.load_state_dict(copy.deepcopy(own))
        self.name, self.options = name, dict(options)
        self._restart()
        self.momentum = {name: torch.zeros_like(phi) for name, phi in self.phi.items()}
        self.residuals = [{name: torch.zeros_like(phi) for name, phi in self.phi.items()} for _ in self.nets]

    def _restart(self) -> None:
        self.phi = {name: theta.to(self.exact, copy=True) for name, theta in self.theta(0).items()}

    def synchronize(self) -> None:
        """All ranks get the mean of parameters and of running statistics, and rank 0's other buffers."""
        self.wait()
        for tensors in (self.theta, lambda rank: dict(self.nets[rank].named_buffers())):
            everyone = [tensors(rank) for rank in range(len(self.nets))]
            for name, first in everyone[0].items():
                averaged = tensors == self.theta or "running" in name
                value = mean([each[name] for each in everyone]) if averaged else first.clone()
                for each in everyone:
                    each[name].copy_(value)
        self._restart()

    def run(self, segment: Segment) -> None:
        """Takes the steps of a segment; a rank without further batches takes part in rounds only."""
        for step in range(segment.steps):
            if self.name == "allreduce":
                self._step_together()
                continue
            for rank in range(len(self.nets)):
                while not (segment.join and step >= segment.join[rank]) and not self._try(rank):
                    pass
            self._end_step()

    def _gradients(self, rank: int, micro: int) -> bool:
        """Adds up the gradients of a rank's next try; returns True if they overflow."""
        training, number = self.training, self.tries[rank]
        self.tries[rank] += 1
        self.optimizers[rank].zero_grad()
        for part in range(micro):
            loss = self.nets[rank](training.batch(number, rank, part), training.layers(number, rank)) / micro
            loss.backward()
        return (rank, number) in training.overflows

    def _take(self, rank: int) -> None:
        if self.training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.nets[rank].parameters(), self.training.clip)
        for group, rate in zip(self.optimizers[rank].param_groups, self.rates, strict=True):
            group["lr"] = rate * self.training.rate(self.steps)
        self.optimizers[rank].step()
        self.last = rank

    def _try(self, rank: int) -> bool:
        if self._gradients(rank, self.training.micro):
            return False
        self._take(rank)
        return True

    def _step_together(self) -> None:
        for rank in range(len(self.nets)):
            self._gradients(rank, 1)
        for same in zip(*(net.parameters() for net in self.nets), strict=True):
            found = [p.grad for p in same if p.grad is not None]
            if found:
                total = torch.stack(found).double().sum(0) / len(self.nets)
                for p in same:
                    p.grad = total.to(p.dtype)
        for rank in range(len(self.nets)):
            self._take(rank)
        self.steps += 1

    def _turn(self) -> int | None:
        """The number of the round that ends with the present step."""
        first = self.options.get("first_phase", 0)
        if self.steps < first:
            return self.steps
        rounds, rest = divmod(self.steps + 1 - first, self.options["interval"] // self.options.get("fragments", 1))
        return None if rest else first + rounds - 1

    def _end_step(self) -> None:
        turn = self._turn()
        if turn is not None:
            self.wait()
            self._send(turn)
        self.steps += 1
        if self.under_way is not None and self.steps >= self.under_way.due:
            self.wait()

    def _send(self, turn: int) -> None:
        count = self.options.get("fragments", 1)
        place = fragments(list(self.phi), count)
        names = [name for name in self.phi if place[name] == turn % count]
        sent = [{name: self.theta(rank)[name].clone() for name in names} for rank in range(len(self.nets))]
        means = {name: self._combined(name, [each[name] for each in sent]) for name in names}
        rates = {}
        # Of a rank that still takes steps: schedulers of those that are through have stopped.
        for group in self.optimizers[self.last].param_groups:
            numbers = {id(p) for p in group["params"]}
            named = self.nets[self.last].named_parameters()
            rates |= {name: float(group["lr"]) for name, p in named if id(p) in numbers}
        self.under_way = Round(sent, means, rates, self.steps + 1 + self.options.get("delay", 0))

    def _combined(self, name: str, thetas: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean pseudo-gradient of a parameter, or what sparse payloads make of it."""
        start = self.phi[name].to(self.training.dtype).to(self.exact)
        codec = self.options.get("codec")
        sparse = self.name == "sparse_loco" and start.dim() > 1 and self.exact != torch.float64
        if not sparse or start.numel() < codec.chunk:
            return mean([start - theta.to(self.exact) for theta in thetas], exact=False)
        n = -(-start.numel() // codec.chunk) * codec.chunk

        def padded(x: torch.Tensor) -> Any:
            # Elements follow one another as they do in the parameter's memory.
            placed = torch.empty_like(thetas[0], dtype=torch.float32).copy_(x)
            return np.pad(placed.as_strided((x.numel(),), (1,)).numpy(), (0, n - x.numel()))

        def shaped(values: Any) -> torch.Tensor:
            placed = torch.empty_like(thetas[0], dtype=torch.float32)
            placed.as_strided((placed.numel(),), (1,)).copy_(torch.from_numpy(values[: placed.numel()]))
            return placed

        payloads = []
        for residuals, theta in zip(self.residuals, thetas, strict=True):
            given = padded(start), padded(theta), padded(residuals[name])
            payload, left = chunked.outer(*given, self.options["beta"], codec.k, codec.chunk)
            residuals[name] = shaped(left)
            payloads.append(payload)
        combined = chunked.mean(payloads, n, codec.k, codec.chunk, self.options["reduce"] == "contributors")
        return shaped(combined)

    def wait(self) -> None:
        """Merges the round under way, if there is one."""
        if self.under_way is None:
            return
        found, self.under_way = self.under_way, None
        for name, d in found.means.items():
            phi = self.phi[name] = self._outer(name, d, found.rates[name]).to(self.exact)
            for rank, sent in enumerate(found.sent):
                theta, blend = self.theta(rank)[name], self.options.get("blend")
                if blend is not None:
                    new = blend * theta.to(self.exact) + (1 - blend) * phi
                elif self.options.get("delay", 0):
                    new = theta.to(self.exact) + (phi - sent[name].to(self.exact))
                else:
                    new = phi
                theta.copy_(new)

    def _outer(self, name: str, d: torch.Tensor, rate: float) -> torch.Tensor:
        if self.name not in ("slow_mo", "diloco"):
            return self.phi[name] - self.options.get("outer_lr", 1.0) * d
        phi, m, d = self.phi[name].double(), self.momentum[name].double(), d.double()
        if self.name == "slow_mo":
            u = self.options["slow_momentum"] * m + d / rate
            self.momentum[name] = u
            return phi - self.options["slow_lr"] * rate * u
        mu, eta = self.options["outer_momentum"], self.options["outer_lr"]
        self.momentum[name] = m = mu * m + d
        return phi - eta * (d + mu * m)


def mean(tensors: Sequence[torch.Tensor], exact: bool = True) -> torch.Tensor:
    """The mean, in the dtype of the tensors; summed up in float64, or in that dtype, as a communicator does it."""
    if not exact:
        return sum(tensors[1:], tensors[0]) / len(tensors)
    return (torch.stack(list(tensors)).double().sum(0) / len(tensors)).to(tensors[0].dtype)


def fragments(names: Sequence[str], count: int) -> dict[str, int]:
    """The fragments of parameters: layer b belongs to fragment b mod F, and the head to that of the last layer."""
    layers = list(dict.fromkeys(name.split(".")[1] for name in names if name.startswith("layers.")))
    last = max(len(layers) - 1, 0)
    places = [layers.index(name.split(".")[1]) if name.startswith("layers.") else last for name in names]
    return {name: place % count for name, place in zip(names, places, strict=True)}
