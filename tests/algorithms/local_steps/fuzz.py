"""Random trainings with local steps, compared with plain PyTorch: one model for each rank, and outer steps by hand.

    python -m tests.algorithms.local_steps.fuzz --threads 500

Each training is drawn from its seed: the net, the optimizers, the algorithm with its options, what the loop does beside plain
steps, and how the run goes on in parts. `--first SEED --threads 1` repeats one.

Of two elements that differ by a rounding only, a sparse payload may have the other one. That is seen in one of 200 trainings.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.algorithms import Algorithm, DiLoCo, GradientAllReduce, LocalSGD, PostLocalSGD, SlowMo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts
from tests.algorithms.local_steps.draws import Net, Segment, Training, draw
from tests.algorithms.local_steps.replicas import Replicas

# Relative to the distance that a parameter has gone and to 1, between a run and its simulation, which round in other orders.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}
PATIENCE = 300
KINDS = {
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "slow_mo": SlowMo,
    "diloco": DiLoCo,
    "sparse_loco": SparseLoCo,
    "allreduce": GradientAllReduce,
}


@dataclass
class Outcome:
    """What a rank ends with: parameters, buffers, the outer parameters, and steps taken."""

    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    outer: list[torch.Tensor]
    steps: int


@dataclass
class Saved:
    """What a rank saves at the end of some segments."""

    state: dict[str, Any]
    tries: int


class Loop:
    """The training loop of a rank, as a user would write it."""

    def __init__(
        self, communicator: Communicator, training: Training, segment: Segment, saved: Sequence[Saved]
    ) -> None:
        self.training, self.communicator = training, communicator
        self.net = Net(training)
        self.optimizer = training.make_optimizer(self.net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6, enabled=training.scaled)
        self.tries = max((each.tries for each in saved), default=0)
        # Plain PyTorch's schedule, which begins before the wrapper, and goes on by the optimizer's own state.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, training.rate)
        self.model: Algorithm = KINDS[segment.name](
            self.net, self.optimizer, communicator=communicator, **segment.options
        )
        if saved:
            rank = communicator.rank
            same = len(saved) == communicator.size
            if same:
                self.tries = saved[rank].tries
            self.model.load_algorithm_state_dict(saved[rank].state if same else [each.state for each in saved])
            self.schedule.last_epoch = self.model.stats().steps

    def run(self, segment: Segment) -> None:
        """Takes the steps of a segment."""
        rank = self.communicator.rank
        if segment.join:
            with self.model.join():
                for _ in range(segment.join[rank]):
                    self.step()
        else:
            goal = self.model.stats().steps + segment.steps
            while self.model.stats().steps < goal:
                self.step()
        if segment.synchronizes:
            self.model.synchronize()

    def step(self) -> None:
        """One try to take a step."""
        training, rank, number = self.training, self.communicator.rank, self.tries
        self.tries += 1
        self.optimizer.zero_grad(set_to_none=True)
        overflow = (rank, number) in training.overflows
        on_gradients = isinstance(self.model, GradientAllReduce)
        # The wrapper and the bare module by turns.
        caller = self.net if number % 3 == 0 and not on_gradients else self.model
        micro = 1 if on_gradients else training.micro
        for part in range(micro):
            loss = caller(training.batch(number, rank, part), training.layers(number, rank)) / micro
            self.scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        if training.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not overflow:
            self.schedule.step()

    def save(self) -> Saved:
        return Saved(copy.deepcopy(self.model.algorithm_state_dict()), self.tries)


def train(communicator: Communicator, training: Training, segments: Sequence[Segment], saved: Sequence[Saved]) -> Any:
    """Segments of a training on a rank, without a checkpoint between them; returns the outcome and what is saved."""
    loop = Loop(communicator, training, segments[0], saved)
    for place, segment in enumerate(segments):
        if place:
            options: dict[str, Any] = {"optimizer": loop.optimizer, **segment.options}
            loop.model = loop.model.switch_to(KINDS[segment.name], **options)
        loop.run(segment)
    model: Any = loop.model
    model.wait()
    outer = [parts.start(model, bucket).clone() for bucket in model.local.flat.buckets]
    net = loop.net
    outcome = Outcome(
        [p.detach().clone() for p in net.parameters()], [b.clone() for b in net.buffers()], outer, model.stats().steps
    )
    state = loop.save()
    model.close()
    return outcome, state


def simulate(training: Training) -> Replicas:
    """The same with plain PyTorch."""
    replicas: Replicas | None = None
    for segment in training.segments:
        if replicas is None or segment.begins == "resize":
            replicas = Replicas(training, Net, segment.ranks, replicas)
        if segment.begins in ("new", "switch"):
            replicas.wrap(segment.name, segment.options)
        replicas.run(segment)
        replicas.wait()
        if segment.synchronizes:
            replicas.synchronize()
    assert replicas is not None
    return replicas


def differences(training: Training, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What differs between ranks, and between each of them and the simulation."""
    for rank, outcome in enumerate(outcomes):
        if not all(map(torch.equal, outcome.outer, outcomes[0].outer)):
            yield f"ranks 0 and {rank} have other outer parameters"
        if not all(x.isfinite().all() for x in outcome.parameters):
            yield f"parameters of rank {rank} are not finite"
    if training.lossy:
        return
    expected = simulate(training)
    beginning = [p.detach().double() for p in Net(training).parameters()]
    for rank, outcome in enumerate(outcomes):
        if outcome.steps != expected.steps:
            yield f"rank {rank} counts {outcome.steps} steps, not {expected.steps}"
        net = expected.nets[rank]
        trained = [q.detach() for q in net.parameters()]
        for i, (p, q, begin) in enumerate(zip(outcome.parameters, trained, beginning, strict=True)):
            distance = float((q.double() - begin).abs().max()) if q.numel() else 0.0
            error = float((p.double() - q.double()).abs().max()) if q.numel() else 0.0
            if not error <= TOLERANCE[training.dtype] * (1 + distance):
                yield f"parameter {i} of rank {rank} is off by {error:.2e} after {distance:.2e}"
        for i, (b, c) in enumerate(zip(outcome.buffers, net.buffers(), strict=True)):
            error = float((b.double() - c.double()).abs().max())
            if not error <= TOLERANCE[training.dtype] * (1 + float(c.double().abs().max())):
                yield f"buffer {i} of rank {rank} is off by {error:.2e}"


def compared(training: Training) -> list[str]:
    """Runs a training with threads as ranks; returns what differs."""
    saved: list[Saved] = []
    outcomes: list[Outcome] = []
    parts: list[list[Segment]] = []
    for segment in training.segments:
        if segment.begins == "switch":
            parts[-1].append(segment)
        else:
            parts.append([segment])
    for part in parts:
        results = run_ranks(part[0].ranks, train, training, part, saved, timeout=PATIENCE)
        outcomes, saved = [outcome for outcome, _ in results], [state for _, state in results]
    return list(differences(training, outcomes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings and prints what differs; the exit status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=100, help="trainings with threads as ranks")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total, begin = 0, time.monotonic()
    for seed in range(options.first, options.first + options.threads):
        if problems := compared(draw(seed)):
            total += 1
            print(f"seed {seed}: {'; '.join(problems)}\n  {draw(seed)}", flush=True)
        if seed % 20 == 0:
            gc.collect()
    print(f"{options.threads} trainings, {total} with differences, {time.monotonic() - begin:.0f} s")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
