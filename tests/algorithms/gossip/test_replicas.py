"""Algorithms that send payloads: what ranks hold of each other has the same bits, and follows the codec's own oracle."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import Complete, Graph, Ring, Topology, Torus
from bagua_kernels.compression import TernGrad
from tests import grids
from tests.algorithms.gossip.common import ALL, BUCKET_BYTES, SHAPES, Quadratic, Task, flat, trained
from tests.algorithms.gossip.steps import gossiped, spread
from tests.compression.codecs import ALL as CODECS
from tests.compression.codecs import NEAREST
from tests.compression.codecs import Case as CodecCase
from tests.grids import grid, only
from tests.oracles import gossip
from tests.oracles.payloads import block

STEPS = 50 if grids.EVERYTHING else 20
Held = dict[int, dict[int, bytes]]  # of each bucket, by rank


def star(size: int) -> Topology:
    """Rank 0 is the neighbour of all; weights differ."""
    return Graph(size, [(0, rank) for rank in range(1, size)])


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GRAPHS = [(Ring, 2), (Ring, 3), (Ring, 5), (star, 4), (Complete, 4), (Torus, 8), (Ring, 7)]


def held(model: Any) -> Held:
    """The bytes of all replicas of a rank, its own among them."""
    everything = model.replicas()
    assert all(replica.dtype == torch.float32 for of in everything.values() for replica in of.values())
    return {index: {rank: of[rank].numpy().tobytes() for rank in of} for index, of in everything.items()}


def watched(
    topology: Topology, steps: int, codec: Any, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]], **options: Any
) -> list[list[tuple[Held, torch.Tensor]]]:
    """Trains with low precision; returns each rank's replicas and parameters after each step."""

    def rank(communicator: Communicator) -> list[tuple[Held, torch.Tensor]]:
        module = Quadratic(shapes, dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        task = Task(flat(module).numel())
        more = {"peers": topology, "codec": codec, "bucket_bytes": BUCKET_BYTES, **options}
        model = ALL["low_precision"].make(module, optimizer, communicator, **more)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
            model.wait()
            seen.append((held(model), flat(module)))
        model.close()
        return seen

    return run_ranks(topology.size, rank)


def check_replicas(topology: Topology, everyone: list[list[tuple[Held, torch.Tensor]]]) -> None:
    """A rank holds itself and its neighbours, each as that holds itself, after each step."""
    for step, ranks in enumerate(zip(*everyone, strict=True)):
        own = [{index: of[rank] for index, of in mine.items()} for rank, (mine, _) in enumerate(ranks)]
        assert len({len(each) for each in own}) == 1
        for rank, (mine, _) in enumerate(ranks):
            for index, of in mine.items():
                assert set(of) == {rank, *topology.neighbours_in(rank)}
                for other, replica in of.items():
                    assert replica == own[other][index], (step, rank, other, index)


def moved(everyone: list[list[tuple[Held, torch.Tensor]]]) -> bool:
    """True if no rank's replicas stay the same in a step, and the ranks differ."""
    steps = all(a[0] != b[0] for seen in everyone for a, b in pairwise(seen))
    return steps and len({tuple(seen[-1][1].tolist()) for seen in everyone}) == len(everyone)


# Each codec compiles kernels of its own with each dtype; by default those which other tests need, too.
@pytest.mark.parametrize(
    ("case", "dtype"),
    only(
        itertools.product(CODECS, DTYPES),
        (CODECS[4], torch.float32),
    ),
    ids=str,
)
def test_replicas_are_those_of_their_ranks(case: CodecCase, dtype: torch.dtype) -> None:
    """After each of 20 steps, or 50 with --all; topologies in turn.

    Three levels are too few for DCD where neighbours are many.
    """
    peers, size = GRAPHS[(CODECS.index(case) + 3 * DTYPES.index(dtype)) % len(GRAPHS)]
    if case.codec == TernGrad():
        peers, size = Ring, 2
    check_replicas(peers(size), watched(peers(size), STEPS, case.codec, dtype, SHAPES))


@grid(dtype=DTYPES, n=[1, 255, 257, 1009], cover=1)
def test_parameters_are_the_own_replica_rounded(n: int, dtype: torch.dtype) -> None:
    """Vectors beside the model have float32, whatever the parameters have, of any number of elements."""
    everyone = watched(Ring(3), 10, "minmax_uint8", dtype, {"p": (n,)})
    check_replicas(Ring(3), everyone)
    assert moved(everyone) or n == 1 or dtype != torch.float32
    for rank, seen in enumerate(everyone):
        for of, parameters in seen:
            own = torch.frombuffer(bytearray(of[0][rank]), dtype=torch.float32)[:n]
            assert torch.equal(own.to(dtype), parameters)


def one_step(case: CodecCase, topology: Topology, n: int, steps: int) -> tuple[int, int]:
    """Checks each step's new replica against the codec's oracle; returns elements in all, and those with another code.

    The input of the codec is computed in float64, so that a value within rounding of a tie may have either neighbour's code.
    """

    def rank(communicator: Communicator) -> list[tuple[np.ndarray, np.ndarray]]:
        module = Quadratic({"p": (n,)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        task, after = Task(n), []
        optimizer.register_step_post_hook(lambda *_: after.append(flat(module).numpy()))
        more = {"peers": topology, "codec": case.codec}
        model = ALL["low_precision"].make(module, optimizer, communicator, **more)
        seen = [(flat(module).numpy(), flat(module).numpy())]
        for step in range(steps):
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
            stepped = after[-1]
            model.wait()
            seen.append((stepped, model.replicas()[0][communicator.rank].numpy()[:n].copy()))
        model.close()
        return seen

    everyone = run_ranks(topology.size, rank)
    code, own, w = block(case.spec), np.ones(n, np.bool_), topology.matrix()
    differing = 0
    for before, now in zip(range(steps), range(1, steps + 1), strict=True):
        copies = np.stack([seen[before][1] for seen in everyone]).astype(np.float64)
        for r, seen in enumerate(everyone):
            z = w[r] @ copies + seen[now][0].astype(np.float64) - 2 * copies[r]
            q = code.through(z.astype(np.float32), 0, own)
            wrong = np.abs(seen[now][1] - (copies[r] + q)) > 4e-7 * np.abs(copies).max() + 1e-7
            differing += int(wrong.sum())
            # One level at most.
            levels = {8: 255, 4: 15, 2: 3}.get(case.spec.bits, 8)
            assert np.abs(seen[now][1] - (copies[r] + q)).max() <= 2.1 * (z.max() - z.min()) / levels + 1e-6
    return steps * topology.size * n, differing


@pytest.mark.parametrize(
    "case", only([case for case in NEAREST if case.spec.kind in ("minmax", "absmax")], NEAREST[0]), ids=str
)
def test_differences_go_through_the_codec(case: CodecCase) -> None:
    everything, differing = one_step(case, star(4), 777, 10)
    assert differing <= 0.002 * everything


@pytest.mark.parametrize(
    ("codec", "size", "eta", "steps"),
    [
        pytest.param("minmax_uint8", 8, 0.4, 60, marks=pytest.mark.slow),
        ("minmax_uint4", 5, 0.4, 40),
        pytest.param("qsgd:bits=4", 3, 0.3, 40, marks=pytest.mark.slow),
        pytest.param("fp8", 2, 0.3, 20, marks=pytest.mark.slow),
        pytest.param("sign", 3, 0.2, 120, marks=pytest.mark.slow),
        pytest.param("two_magnitudes", 3, 0.3, 60, marks=pytest.mark.slow),
        pytest.param("topk:ratio=0.1", 2, 0.1, 150, marks=pytest.mark.slow),
    ],
)
def test_choco_finds_the_mean_with_codecs_of_any_kind(codec: str, size: int, eta: float, steps: int) -> None:
    """Payloads of few bits, biased or not, and an exact mean in the end: nothing of it is lost."""
    start = spread(size)
    seen = gossiped(ALL["choco"], start, steps, codec=codec, eta=eta)
    mean = start.astype(np.float64).mean(axis=0)
    assert np.abs(seen[-1].astype(np.float64).mean(axis=0) - mean).max() <= 1e-6 * steps
    assert gossip.distance(seen[-1]) <= 1e-2 * gossip.distance(seen[0])


@pytest.mark.parametrize("name", ["low_precision", "choco"])
def test_random_rounding_differs_between_ranks_and_steps_and_repeats(name: str) -> None:
    """The same seed gives the same bits; another one others."""
    runs = [trained(ALL[name], 3, 4, codec="minmax_uint2", seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_one_rank_alone_has_no_replicas() -> None:
    def rank(communicator: Communicator) -> None:
        module = Quadratic(SHAPES)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        assert ALL["low_precision"].make(module, optimizer, communicator).replicas() == {}

    run_ranks(1, rank)
