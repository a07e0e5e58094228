"""Trainings of algorithms on parameters whose bits are the same on every processor, and of which few depend on a clock."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, OuterLoop, Penalty, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.local.schedule import Schedule
from bagua_kernels.optim import ChainedOptimizer
from tests.algorithms.gossip.common import unequal
from tests.algorithms.local_steps.clocked import Clock, on_clock

SHAPES = [(5, 4), (5,), (7, 5), (40,), ()]
# Products with powers of two are exact, fused or not.
RATE, MOMENTUM = 0.125, 0.5
# Seconds of the virtual clock: no two ranks have a moment in common, and couriers are through with one before the next.
PERIODS, OFFSETS, PATIENCE = (10.0, 13.0, 17.0, 11.0), (0.1, 0.2, 0.3, 0.4), 1e5

Options = Mapping[str, Any]


class Sums(nn.Module):
    """The sum of its parameters' products with inputs, so that gradients are the inputs, exact on every processor."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(uniform(shape, seed).to(dtype)) for seed, shape in enumerate(shapes)
        )
        self.register_buffer("running_mean", torch.zeros(3))

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        if self.training:
            self.running_mean.mul_(0.5).add_(inputs[1].float()[:3])
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]).sum()


def uniform(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers from -0.5 to 0.5, the same for a seed on every machine."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    """SGD whose first two parameters have another learning rate."""
    first, second = list(module.parameters())[:2], list(module.parameters())[2:]
    return torch.optim.SGD([{"params": first, "lr": RATE / 2}, {"params": second}], lr=RATE, momentum=MOMENTUM)


def muon(module: nn.Module) -> torch.optim.Optimizer:
    """Muon of one matrix, which it leaves as it is because its products of matrices are not exact, and SGD."""
    first, *others = module.parameters()
    return ChainedOptimizer(
        torch.optim.Muon([first], lr=0.0, momentum=MOMENTUM), torch.optim.SGD(others, lr=RATE, momentum=MOMENTUM)
    )


@dataclass(frozen=True)
class Training:
    """An algorithm with its options, and what a loop does with it.

    Attributes:
        spec: of the algorithm.
        options: what a spec cannot say.
        ranks: their number.
        optimizer: makes it.
        dtype: of the parameters.
        timed: True if the algorithm depends on times, so that all run by a virtual clock.
        paced: True if ranks take different numbers of steps in a round.
        exact: False if the algorithm takes norms, whose last bits depend on the processor.
        writes: the step before which parameters are halved; None for none.
        scaled: True if losses are scaled.
    """

    spec: str
    options: Options = field(default_factory=dict)
    ranks: int = 3
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    dtype: torch.dtype = torch.float32
    timed: bool = False
    paced: bool = False
    exact: bool = True
    writes: int | None = None
    scaled: bool = False

    def run(self, function: Callable[..., Any], *arguments: Any, seed: int = 0) -> list[Any]:
        """Runs a function of a `Loop` and further arguments on all ranks; returns what each has returned."""
        schedule = Schedule(seed) if self.timed else None

        def rank(communicator: Communicator) -> Any:
            loop = Loop(self, communicator, schedule)
            found = function(loop, *arguments)
            loop.model.close()
            return found

        if schedule is None:
            return run_ranks(self.ranks, rank)
        return run_ranks(self.ranks, rank, schedule=schedule, timeout=PATIENCE)


class Loop:
    """A rank of a training.

    Attributes:
        model: the algorithm.
        steps: that were taken, here and before a state was loaded.
        overflow: the next step's gradients are infinite, and a scaler leaves that step out.
        seen: hash of the parameters in the last forward pass, and after the step that followed it.
    """

    def __init__(self, training: Training, communicator: Communicator, schedule: Schedule | None) -> None:
        self.training, self.rank, self._schedule = training, communicator.rank, schedule
        self.module = Sums(dtype=training.dtype)
        self.optimizer = training.optimizer(self.module)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=training.scaled)
        options = {
            "bucket_bytes": 200,
            **({"scaler": self.scaler} if self.counts_overflows else {}),
            **training.options,
        }
        self.model: Any = from_spec(training.spec, self.module, self.optimizer, communicator=communicator, **options)
        self._clock = Clock()
        if training.paced:
            on_clock(self.model, self._clock)
        self.steps, self.overflow, self.seen = 0, False, hashlib.sha256()

    @property
    def counts_overflows(self) -> bool:
        """True if a step that a scaler leaves out is a step for the algorithm."""
        kind = Algorithm.registered[self.training.spec.partition(":")[0]]
        return self.training.scaled and not issubclass(kind, OuterLoop)

    def load(self, state: Any) -> None:
        """Loads a state of this rank."""
        self.model.load_algorithm_state_dict(state)
        self.steps = int(state["steps"])

    def train(self, steps: int) -> None:
        """Takes some steps; of ranks that take different numbers in a round, as many rounds, and one step of the next."""
        if self.training.paced:
            end = self.model.stats().rounds + steps
            while self.model.stats().rounds < end:
                self.step()
            steps = 1
        for _ in range(steps):
            self.step()
        # What the last step has begun is through before the call that follows.
        self.rest()

    def step(self) -> None:
        """Takes a step."""
        if self.steps == self.training.writes:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.mul_(0.5)
        self.rest()
        self.optimizer.zero_grad()
        seed = 1000 + 100 * self.steps + 10 * self.rank
        inputs = [uniform(shape, seed + place).to(self.training.dtype) for place, shape in enumerate(SHAPES)]
        loss = self.model(inputs)
        self.seen = hashlib.sha256(bits([*self.module.parameters()]))
        # What was waited for came at a moment of another rank.
        self.rest()
        self.scaler.scale(loss * math.inf if self.overflow else loss).backward()
        self._clock.now += 1000.0 * (1 + 2 * self.rank)
        if self.training.paced:
            self.model.count_samples(2.0 + self.rank)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.update(bits([*self.module.parameters()]))
        self.steps += self.counts_overflows or not self.overflow
        self.overflow = False

    def rest(self) -> None:
        """Waits for the next of this rank's own moments, at which no other rank does anything."""
        if self._schedule is not None:
            period, offset, now = PERIODS[self.rank], OFFSETS[self.rank], self._schedule.now()
            number = math.floor((now - offset) / period + 0.5) + 1
            self._schedule.sleep(number * period + offset - now)


def stored(of: Any) -> Any:
    """What a checkpoint makes of it."""
    file = io.BytesIO()
    torch.save(of, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(of: Any) -> bytes:
    """All tensors in a state, one after the other, in the order of their names."""
    if isinstance(of, torch.Tensor):
        return of.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(of, Mapping):
        return b"".join(bits(of[key]) for key in sorted(of, key=str))
    return b"".join(bits(each) for each in of) if isinstance(of, list | tuple) else b""


TRAININGS = {
    "decentralized": Training("decentralized:peers=ring"),
    "decentralized_in_turn": Training("decentralized:interval=2"),
    "decentralized_nodes": Training("decentralized:hierarchical=true", {"nodes": [[0, 1], [2, 3]]}, ranks=4),
    "d2": Training("d2"),
    "lowprec": Training("lowprec:codec=minmax_uint8"),
    "lowprec_written": Training("lowprec:codec=minmax_uint4", ranks=2, writes=3),
    "choco": Training("choco:codec=minmax_uint4,eta=0.25"),
    "sgp": Training("sgp"),
    "sgp_unequal": Training("sgp", {"peers": unequal(3)}),
    "local_sgd": Training("local_sgd:interval=4", {"sync_state": (1, 2)}),
    "post_local_sgd": Training("post_local_sgd:interval=4,first_phase=3"),
    "diloco": Training("diloco:interval=4,outer_momentum=0.9"),
    "diloco_fragments": Training(
        "diloco:interval=4,fragments=2,delay=1,codec=absmax_int4,min_numel=0,outer_momentum=0.9",
        {"error_feedback": True},
    ),
    "diloco_penalty": Training(
        "diloco:interval=2,outer_momentum=0.9", {"penalty": Penalty(warmup=2, threshold=1.0, clip=0.5)}, exact=False
    ),
    "diloco_by_speed": Training("diloco:interval=4,by_speed=true,outer_momentum=0.9", ranks=2, paced=True),
    "diloco_quorum": Training(
        "diloco:interval=2,quorum=2,codec=absmax_int8,min_numel=0,outer_momentum=0.9", timed=True
    ),
    "slow_mo": Training("slow_mo:interval=4,slow_momentum=0.5", optimizer=two_groups),
    "sparse_loco": Training(
        "sparse_loco:interval=4", {"codec": "chunked_topk:k=4,chunk=32", "dense": "absmax_int8:block=32"}
    ),
    "async_model_average": Training("async_model_average:interval=2", timed=True),
    # The virtual clock has no threads of gradients.
    "async_model_average_warm": Training("async_model_average:interval=100,warmup_steps=8"),
    "async_model_average_encoded": Training("async_model_average:interval=2,codec=minmax_uint8", timed=True),
    "async_decentralized": Training("async_decentralized", timed=True),
    "async_decentralized_half": Training("async_decentralized", dtype=torch.bfloat16, timed=True),
    "async_decentralized_encoded": Training("async_decentralized:codec=minmax_uint8", timed=True),
    "wagma": Training("wagma:period=3", timed=True),
    # Thrice a number of bfloat16 is exact in float32.
    "wagma_paper": Training("wagma:period=4,stale_rule=paper", dtype=torch.bfloat16, timed=True),
}
# PyTorch 2.9.
if hasattr(torch.optim, "Muon"):
    TRAININGS["mu_loco"] = Training("mu_loco:interval=4,min_numel=0,outer_momentum=0.8", optimizer=muon)
