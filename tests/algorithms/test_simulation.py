"""Every centralized algorithm against a simulation of its ranks in NumPy, and what must hold whatever the numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import (
    DGC,
    QSGD,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    FP8AllReduce,
    GradientAllReduce,
    NaturalCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from bagua_kernels.comm import Communicator, run_ranks
from tests.grids import grid, one_of_each
from tests.oracles import algorithms as oracle
from tests.oracles.algorithms import Drawn, Largest, Named, Shapes, Ternary, Whole, block
from tests.oracles.block_quantizers import Spec

# Tensors that fill blocks of 64, so that there is no padding.
FULL: Shapes = {"first": (16, 12), "bias": (64,), "second": (8, 2, 8), "scale": (64,)}
# Sizes that are divisible by nothing.
ODD: Shapes = {"first": (13, 11), "bias": (13,), "second": (7, 3, 5), "scale": ()}
STEPS = 5


class Given(nn.Module):
    """A module whose gradients are what it is called with, to the last bit; those left out it does not use."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.get_parameter(name) * g).sum() for name, g in gradients.items()]).sum()


Wrap = Callable[..., Algorithm]


def everything(wrap: Wrap) -> dict[str, Any]:
    """Options with which small parameters are compressed too."""
    chooses = isinstance(wrap, type) and issubclass(wrap, CompressedAllReduce)
    return {"exact": (), "min_numel": 0} if chooses else {}


Simulate = Callable[[Shapes, int], oracle.Algorithm]
Everyone = list[Named]


def draw(shapes: Shapes, ranks: int, steps: int = STEPS, seed: int = 0) -> list[Everyone]:
    """All ranks' gradients of all steps: of different sizes in each tensor, with something in common, and a few zeros."""
    rng = np.random.default_rng(seed)
    common = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    scale = {name: 10.0 ** rng.uniform(-4, 1) for name in shapes}

    def one(name: str) -> np.ndarray:
        values = scale[name] * (common[name] + rng.standard_normal(shapes[name]))
        return np.asarray(np.where(rng.random(shapes[name]) < 0.05, 0.0, values), np.float32)

    return [[{name: one(name) for name in shapes} for _ in range(ranks)] for _ in range(steps)]


class Trained(NamedTuple):
    """What came out of a run: the gradients that all ranks received in each step, and each rank's state after it."""

    means: list[Named]
    states: list[dict[str, Any]]


def follow(algorithm: Algorithm, own: Sequence[Named]) -> list[Named]:
    """Takes one step with each of one rank's gradients; returns the means."""
    means = []
    for named in own:
        algorithm.zero_grad(set_to_none=True)
        algorithm({name: torch.from_numpy(g.copy()) for name, g in named.items()}).backward()
        means.append({n: p.grad.numpy().copy() for n, p in algorithm.module.named_parameters() if p.grad is not None})
    return means


def same(a: Sequence[Named], b: Sequence[Named]) -> bool:
    """Whether all bits are equal."""
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(x[name].tobytes() == y[name].tobytes() for name in x)
        for x, y in zip(a, b, strict=True)
    )


def train(
    wrap: Wrap,
    shapes: Shapes,
    data: list[Everyone],
    states: list[dict[str, Any]] | None = None,
    ranks: int | None = None,
    **arguments: Any,
) -> Trained:
    """Runs an algorithm on all ranks, of which all must receive the same bits; begins from the states of others, if given."""

    def rank(communicator: Communicator) -> Trained:
        algorithm = wrap(Given(shapes), communicator=communicator, **{**everything(wrap), **arguments})
        if states is not None:
            algorithm.load_algorithm_state_dict(states)
        means = follow(algorithm, [everyone[communicator.rank] for everyone in data])
        state = algorithm.algorithm_state_dict()
        algorithm.close()
        return Trained(means, [state])

    everyone = run_ranks(ranks or len(data[0]), rank)
    assert all(same(everyone[0].means, other.means) for other in everyone[1:])
    return Trained(everyone[0].means, [r.states[0] for r in everyone])


@dataclass(frozen=True)
class Row:
    """An algorithm with its options, and what simulates it.

    Attributes:
        wrap: The class.
        simulate: Of shapes and a number of ranks.
        options: Of the class.
        tolerance: Relative to a tensor's largest gradient; 0 where all bits must be equal.
        remembers: Whether all that goes in comes out, or is remembered.
    """

    wrap: Wrap
    simulate: Simulate
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    remembers: bool = False

    def make(self, module: nn.Module, **arguments: Any) -> Algorithm:
        return self.wrap(module, **{**everything(self.wrap), **self.options, **arguments})


def compressed(code: Any, **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.Compressed(shapes, ranks, code, **arguments)


def dgc(ratios: Mapping[int, float], **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.DGC(shapes, ranks, ratios, **arguments)


def powersgd(rank: int, **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.PowerSGD(shapes, ranks, rank, **arguments)


def minmax(bits: int = 8, *, stochastic: bool = False) -> oracle.Block:
    return block(Spec("minmax", 64, bits=bits, stochastic=stochastic))


def qsgd(bits: int, norm: Any = "max") -> oracle.Block:
    return block(Spec("absmax", 32, bits=bits, stochastic=True, norm=norm))


def fp8(form: Any = "e4m3", *, stochastic: bool = False) -> oracle.Block:
    return block(Spec("fp8", 32, format=form, stochastic=stochastic))


SIGN, TWO_MEANS = block(Spec("sign", 64)), block(Spec("sign", 64, means=2))
TERNARY = block(Spec("absmax", 64, levels=1, bits=2, stochastic=True))
PLAIN = 1e-6
FACTORS = 2e-5

WITHOUT_MEMORY = {
    "allreduce": Row(GradientAllReduce, oracle.Algorithm, {}, PLAIN),
    "bytegrad": Row(ByteGrad, compressed(minmax(), feedback=False), {"block": 64}),
    "bytegrad_stochastic": Row(ByteGrad, compressed(minmax(stochastic=True)), {"block": 64, "stochastic": True}),
    "qsgd": Row(QSGD, compressed(qsgd(4), seed=5), {"block": 32, "seed": 5}),
    "qsgd_2_bits": Row(QSGD, compressed(qsgd(2), each=True), {"bits": 2, "block": 32, "bucket_bytes": 1}),
    "qsgd_8_bits_l2": Row(QSGD, compressed(qsgd(8, "l2")), {"bits": 8, "block": 32, "norm": "l2"}),
    "terngrad": Row(TernGrad, compressed(TERNARY), {"block": 64, "clip": None}),
    "terngrad_clip": Row(
        TernGrad, lambda shapes, ranks: oracle.Clipped(shapes, ranks, TERNARY, 1.5), {"block": 64, "clip": 1.5}, PLAIN
    ),
    "terngrad_shared": Row(TernGrad, compressed(Ternary(block=64)), {"block": 64, "clip": None, "shared": True}, PLAIN),
    "terngrad_shared_clip": Row(
        TernGrad,
        lambda shapes, ranks: oracle.Clipped(shapes, ranks, Ternary(block=64), 2.5),
        {"block": 64, "shared": True},
        PLAIN,
    ),
    "majority": Row(SignSGD, oracle.Vote, {"block": 64, "majority_vote": True}),
    "natural": Row(NaturalCompression, compressed(block(Spec("natural", 64))), {"block": 64}),
    "fp8": Row(FP8AllReduce, compressed(fp8(), feedback=False), {"block": 32}),
    "fp8_e5m2_stochastic": Row(
        FP8AllReduce, compressed(fp8("e5m2", stochastic=True)), {"format": "e5m2", "block": 32, "stochastic": True}
    ),
    "identity": Row(CompressedAllReduce, compressed(Whole()), {"codec": "identity"}, PLAIN),
}

WITH_MEMORY = {
    "bytegrad_feedback": Row(
        ByteGrad, compressed(minmax(), feedback=True), {"block": 64, "error_feedback": True}, 0, True
    ),
    "fp8_feedback": Row(FP8AllReduce, compressed(fp8(), feedback=True), {"block": 32, "error_feedback": True}, 0, True),
    "sign": Row(SignSGD, compressed(SIGN), {"block": 64}, 0, True),
    "sign_buckets": Row(SignSGD, compressed(SIGN, each=True), {"block": 64, "bucket_bytes": 1}, 0, True),
    "onebit": Row(OneBitSGD, compressed(TWO_MEANS, warmup=2), {"block": 64, "warmup_steps": 2}, PLAIN, True),
    "double_squeeze": Row(DoubleSqueeze, compressed(SIGN), {"codec": "sign:block=64"}, 0, True),
    "double_squeeze_qsgd": Row(
        DoubleSqueeze, compressed(qsgd(2), feedback=True), {"codec": "qsgd:bits=2,block=32"}, 0, True
    ),
    "double_squeeze_natural": Row(
        DoubleSqueeze,
        compressed(block(Spec("natural", 64)), feedback=True, seed=3),
        {"codec": "natural:block=64", "seed": 3},
        0,
        True,
    ),
    "topk": Row(TopK, compressed(Largest(ratio=0.1)), {"ratio": 0.1}, 0, True),
    "topk_buckets": Row(TopK, compressed(Largest(ratio=0.1), each=True), {"ratio": 0.1, "bucket_bytes": 1}, 0, True),
    "randomk": Row(RandomK, compressed(Drawn(ratio=0.1), seed=9), {"ratio": 0.1, "seed": 9}, PLAIN, True),
    "int4": Row(
        CompressedAllReduce,
        compressed(block(Spec("absmax", 64, bits=4))),
        {"codec": "absmax_int4:block=64"},
        0,
        True,
    ),
    "schedule": Row(
        CompressedAllReduce,
        compressed({0: minmax(), 2: None, 3: SIGN, 4: fp8()}, warmup=1),
        {
            "codec": {0: "minmax_uint8:block=64", 2: None, 3: "sign:block=64", 4: "fp8:block=32"},
            "warmup_steps": 1,
        },
        PLAIN,
        True,
    ),
    "groups": Row(
        CompressedAllReduce,
        compressed(SIGN, groups={"s*d": Largest(ratio=0.2), "first": None}, exact=("bias", "scale")),
        {"codec": "sign:block=64", "groups": {"s*d": "topk:ratio=0.2", "first": None}, "exact": "1d"},
        PLAIN,
        True,
    ),
    "groups_of_schedules": Row(
        CompressedAllReduce,
        compressed(minmax(), groups={"bias": {0: SIGN, 2: TWO_MEANS}, "sc*": qsgd(4)}),
        {
            "codec": "minmax_uint8:block=64",
            "groups": {"bias": {0: "sign:block=64", 2: "sign:block=64,two_means=true"}, "sc*": "qsgd:block=32"},
        },
    ),
}

DGC_ROWS = {
    "dgc": Row(DGC, dgc({0: 0.05}), {"ratio": 0.05, "masking": True}, PLAIN),
    "dgc_nesterov": Row(DGC, dgc({0: 0.1}, nesterov=True), {"ratio": 0.1, "nesterov": True, "masking": True}, PLAIN),
    "dgc_unmasked": Row(
        DGC,
        dgc({0: 0.1}, masking=False, momentum=0.5, each=True),
        {"ratio": 0.1, "masking": False, "momentum": 0.5, "bucket_bytes": 1},
        PLAIN,
    ),
    "dgc_clip": Row(DGC, dgc({0: 0.1}, clip=0.2), {"ratio": 0.1, "clip": 0.2, "masking": True}, PLAIN),
    "dgc_warmup": Row(
        DGC,
        dgc({0: 0.25, 2: 0.1, 3: 0.02}, warmup=1),
        {"ratio": 0.02, "warmup": (0.25, 0.1), "warmup_every": 1, "warmup_steps": 1, "masking": True},
        PLAIN,
    ),
}

POWERSGD_ROWS = {
    "powersgd": Row(PowerSGD, powersgd(1), {}, FACTORS),
    "powersgd_rank_2": Row(
        PowerSGD, powersgd(2, seed=7, min_compression=1), {"rank": 2, "seed": 7, "min_compression": 1.0}, FACTORS
    ),
    "powersgd_start": Row(PowerSGD, powersgd(2, start=2), {"rank": 2, "start_step": 2, "bucket_bytes": 1}, FACTORS),
    "powersgd_cold": Row(PowerSGD, powersgd(1, warm=False, start=1), {"warm_start": False, "start_step": 1}, FACTORS),
    "powersgd_in_turn": Row(PowerSGD, powersgd(2, alternate=True), {"rank": 2, "alternate": True}, FACTORS),
}

ROWS = {**WITHOUT_MEMORY, **WITH_MEMORY, **DGC_ROWS, **POWERSGD_ROWS}
REMEMBERING = {name: row for name, row in ROWS.items() if row.remembers}
every_kind = pytest.mark.parametrize(
    "row",
    one_of_each([pytest.param(row, id=name) for name, row in ROWS.items()], lambda given: given.values[0].wrap),
)
remembering = pytest.mark.parametrize("row", REMEMBERING.values(), ids=REMEMBERING.keys())


def check(row: Row, shapes: Shapes, ranks: int) -> None:
    data = draw(shapes, ranks)
    means, states = train(row.make, shapes, data)
    simulation = row.simulate(shapes, ranks)
    size = {name: max(np.abs(g[name]).max() for everyone in data for g in everyone) for name in shapes}
    for step, (everyone, mean) in enumerate(zip(data, means, strict=True)):
        expected = simulation.step(everyone)
        assert mean.keys() == expected.keys()
        for name in shapes:
            error = np.abs(mean[name] - expected[name]).max()
            assert error <= row.tolerance * size[name], (step, name)
    for rank, state in enumerate(states):
        for key, vectors in simulation.remembered(rank).items():
            for name, expected in vectors.items():
                found = state["vectors"].get(key, {}).get(name, torch.zeros(shapes[name])).numpy()
                # What is remembered has gone through all steps.
                error = np.abs(found.reshape(-1) - expected.reshape(-1)).max()
                assert error <= STEPS * row.tolerance * size[name], (rank, key, name)


# ------------------------------------------------------------------------------------------------------ 1. equality


@grid(
    row=ROWS,
    ranks__shapes={"1 odd": (1, ODD), "2 full": (2, FULL), "2 odd": (2, ODD), "3 odd": (3, ODD), "4 full": (4, FULL)},
    cover=1,
)
def test_against_the_simulation(row: Row, shapes: Shapes, ranks: int) -> None:
    check(row, shapes, ranks)


@pytest.mark.parametrize("name", ["bytegrad", "qsgd", "sign", "topk", "dgc", "powersgd", "terngrad_shared"])
def test_against_the_simulation_of_many(name: str) -> None:
    check(ROWS[name], FULL, 8)


# -------------------------------------------------------------------------------------------------- 2. conservation


def added(named: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.sum([np.asarray(n[name], np.float64) for n in named], axis=0)


def remembered(states: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The mean of what ranks keep of a parameter, and what the owners do, of which all ranks know."""
    total = np.zeros(shape)
    for key in ("worker", "residual"):
        of_ranks = [s["vectors"].get(key, {}).get(name) for s in states]
        total += np.mean(
            [np.zeros(shape) if v is None else v.double().reshape(shape).numpy() for v in of_ranks], axis=0
        )
    owners = [s["vectors"].get("owner", {}).get(name) for s in states]
    if owners[0] is not None:
        assert all(torch.equal(owners[0], other) for other in owners[1:])
        total += owners[0].double().reshape(shape).numpy()
    return total


def averaged(data: list[Everyone]) -> list[dict[str, np.ndarray]]:
    """The exact means of what went in."""
    return [{name: np.mean([g[name].astype(np.float64) for g in step], axis=0) for name in step[0]} for step in data]


def check_conserved(shapes: Shapes, inputs: Sequence[Any], means: Sequence[Any], states: Sequence[Any]) -> None:
    for name, shape in shapes.items():
        went_in = added(inputs, name)
        size = np.sum([np.linalg.norm(i[name]) for i in inputs])
        lost = went_in - added(means, name) - remembered(states, name, shape)
        assert np.linalg.norm(lost) <= 1e-5 * size, name


@grid(
    row={**REMEMBERING, **POWERSGD_ROWS},
    ranks__shapes={"2 full": (2, FULL), "3 odd": (3, ODD), "4 full": (4, FULL)},
    cover=1,
)
def test_nothing_is_lost(row: Row, shapes: Shapes, ranks: int) -> None:
    data = draw(shapes, ranks, 7, seed=1)
    means, states = train(row.make, shapes, data)
    check_conserved(shapes, averaged(data), means, states)


def velocities(inputs: Sequence[Any], momentum: float, nesterov: bool = False) -> list[dict[str, np.ndarray]]:
    """What dense SGD with momentum would apply in each step."""
    u = {name: np.zeros_like(g) for name, g in inputs[0].items()}
    applied = []
    for g in inputs:
        u = {name: momentum * (u[name] + g[name]) if nesterov else momentum * u[name] + g[name] for name in u}
        applied.append({name: u[name] + g[name] if nesterov else u[name] for name in u})
    return applied


@grid(ranks=[2, 3], nesterov=[False, True], shapes={"full": FULL, "odd": ODD})
def test_dgc_loses_no_momentum_without_masking(ranks: int, nesterov: bool, shapes: Shapes) -> None:
    """All velocities that ever were are applied or remembered; the velocity is that of dense SGD."""
    data = draw(shapes, ranks, 7, seed=2)
    options = {"ratio": 0.05, "momentum": 0.75, "masking": False, "nesterov": nesterov}
    means, states = train(DGC, shapes, data, **options)
    applied = velocities(averaged(data), 0.75, nesterov)
    check_conserved(shapes, applied, means, states)
    for name, shape in shapes.items():
        u = np.mean([s["vectors"]["velocity"][name].double().reshape(shape).numpy() for s in states], axis=0)
        last = applied[-1][name] - (averaged(data)[-1][name] if nesterov else 0)
        assert np.allclose(u, last, rtol=1e-5, atol=1e-5 * np.abs(last).max())


@pytest.mark.parametrize("codecs", [("sign", "minmax_uint4"), ("sign", "topk:ratio=0.1"), ("topk:ratio=0.1", "sign"),
                                    ("sign", "randomk:ratio=0.1"), ("sign", None), ("sign", "identity")],
                         ids=str)  # fmt: skip
def test_nothing_is_lost_when_codecs_change(codecs: tuple[Any, Any]) -> None:
    first, second = codecs
    data = draw(FULL, 3, 6)
    means, states = train(CompressedAllReduce, FULL, data, codec={0: first, 3: second})
    check_conserved(FULL, averaged(data), means, states)


@pytest.mark.parametrize("name", ["bytegrad_feedback", "sign", "sign_buckets", "onebit", "double_squeeze_qsgd", "topk",
                                  "topk_buckets", "randomk", "powersgd", "powersgd_rank_2",
                                  "powersgd_in_turn"])  # fmt: skip
def test_nothing_is_lost_of_a_parameter_that_is_unused_for_a_step(name: str) -> None:
    """What a payload says of it must be applied or remembered, although its gradient is None on all ranks."""
    data = [[{n: g / np.abs(g).max() for n, g in named.items()} for named in everyone] for everyone in draw(FULL, 2, 6)]
    for everyone in (data[2], data[5]):
        for named in everyone:
            del named["first"]
    means, states = train(ROWS[name].make, FULL, data)
    zeros = {parameter: np.zeros(shape) for parameter, shape in FULL.items()}
    inputs = [{**zeros, **mean} for mean in averaged([[{**zeros, **g} for g in everyone] for everyone in data])]
    check_conserved(FULL, inputs, [{**zeros, **mean} for mean in means], states)


# ---------------------------------------------------------------------------------------------------- 3. identities


def worst(means: Sequence[Named], expected: Sequence[Mapping[str, Any]], name: str) -> float:
    """The largest error of a parameter's mean, relative to its largest."""
    errors = [np.abs(m[name] - e[name]).max() / np.abs(e[name]).max() for m, e in zip(means, expected, strict=True)]
    return float(max(errors))


def low_rank(ranks: int, kept: int) -> list[Everyone]:
    """Gradients of full rank whose mean has a low one."""
    rng = np.random.default_rng(3)
    steps = []
    for _ in range(4):
        mean = rng.standard_normal((13, kept)) @ rng.standard_normal((kept, 11))
        noise = rng.standard_normal((ranks, 13, 11))
        noise -= noise.mean(axis=0)
        steps.append([{"m": (mean + n).astype(np.float32)} for n in noise])
    return steps


@grid(warm_start=[False, True], kept__rank=[(1, 1), (2, 2), (1, 2), (2, 4)], cover=1)
def test_powersgd_of_the_matrix_rank_is_exact(kept: int, rank: int, warm_start: bool) -> None:
    data = low_rank(3, kept)
    means, _ = train(PowerSGD, {"m": (13, 11)}, data, rank=rank, min_compression=0, warm_start=warm_start)
    assert worst(means, averaged(data), "m") <= 1e-4


@pytest.mark.parametrize("shape", [(4, 9), (9, 3), (2, 2, 3)], ids=str)
def test_powersgd_of_full_rank_is_exact(shape: tuple[int, ...]) -> None:
    data = draw({"m": shape}, 3)
    means, _ = train(PowerSGD, {"m": shape}, data, rank=4, min_compression=0)
    assert worst(means, averaged(data), "m") <= 1e-4


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("exact", [(), "1d"], ids=["all", "1d exact"])
def test_dgc_of_all_elements_is_sgd_with_momentum(nesterov: bool, exact: Any) -> None:
    """Also where parameters travel uncompressed: what arrives contains the momentum, and the optimizer adds none."""
    data = draw(ODD, 3)
    means, _ = train(DGC, ODD, data, ratio=1.0, masking=False, momentum=0.8, nesterov=nesterov, exact=exact)
    applied = velocities(averaged(data), 0.8, nesterov)
    assert max(worst(means, applied, name) for name in ODD) <= 1e-5


def test_dgc_trains_as_sgd_with_momentum() -> None:
    """The same parameters, to rounding, as `torch.optim.SGD` with the mean gradients makes."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Given(ODD)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        algorithm = DGC(module, optimizer, communicator=communicator, ratio=1.0, masking=False, **everything(DGC))
        for everyone in data:
            optimizer.zero_grad()
            algorithm({n: torch.from_numpy(g) for n, g in everyone[communicator.rank].items()}).backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    data = draw(ODD, 2)
    plain = Given(ODD)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for mean in averaged(data):
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.from_numpy(np.asarray(mean[name], np.float32))
        optimizer.step()
    for ours, expected in zip(run_ranks(2, rank)[0], plain.parameters(), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_dgc_keeps_the_velocity_of_what_was_not_sent() -> None:
    """The residual of element 1 becomes 0 by itself in step 1, u = -1 and v = 1 - 1; only what was sent loses its velocity."""
    data = [[{"p": np.array([8, first, 0, 0], np.float32)} for _ in range(2)] for first in (1, -1.5, 0)]
    means, states = train(DGC, {"p": (4,)}, data, ratio=0.25, momentum=0.5, masking=True)
    assert [mean["p"].tolist() for mean in means] == [[8, 0, 0, 0]] * 3
    assert states[0]["vectors"]["velocity"]["p"].tolist() == [0, -0.5, 0, 0]
    assert states[0]["vectors"]["worker"]["p"].tolist() == [0, -0.5, 0, 0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_identity_is_no_compression(ranks: int) -> None:
    data = draw(ODD, ranks)
    plain = train(GradientAllReduce, ODD, data).means
    for codec in ("identity", None):
        ours = train(CompressedAllReduce, ODD, data, codec=codec).means
        assert max(worst(ours, plain, name) for name in ODD) <= (0 if ranks == 2 else PLAIN)


def in_order(everyone: Everyone, name: str) -> np.ndarray:
    """The mean of docs/compressed-collectives.md: added in float32 in the order of the ranks, then divided."""
    return oracle.total([g[name] for g in everyone]) / np.float32(len(everyone))


@grid(
    exact=["1d", ("bias", "sc*"), ["*a*"]],
    wrap=[ByteGrad, SignSGD, QSGD, NaturalCompression, FP8AllReduce, DoubleSqueeze, TopK, DGC],
    cover=1,
)
def test_exact_parameters_are_exact(wrap: Wrap, exact: Any) -> None:
    data = draw(ODD, 3, 1 if wrap is DGC else 2)
    means, states = train(wrap, ODD, data, exact=exact)
    for everyone, mean in zip(data, means, strict=True):
        for name in ("bias", "scale"):
            assert np.array_equal(mean[name], in_order(everyone, name))
        assert not np.array_equal(mean["first"], in_order(everyone, "first"))
    for key, vectors in states[0]["vectors"].items():
        assert key == "velocity" or not {"bias", "scale"} & set(vectors)


@pytest.mark.parametrize("min_numel", [0, 14, 106, 1000])
def test_small_parameters_are_exact(min_numel: int) -> None:
    data = draw(ODD, 3)
    means, _ = train(TopK, ODD, data, min_numel=min_numel)
    for everyone, mean in zip(data, means, strict=True):
        for name, shape in ODD.items():
            if math.prod(shape) < min_numel:
                # With all of them exact the bucket is averaged by an ordinary all-reduce, which has an order of its own.
                assert np.allclose(mean[name], in_order(everyone, name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrap", [SignSGD, OneBitSGD, DoubleSqueeze, TopK, RandomK])
def test_small_parameters_are_exact_by_default_where_few_bits_are_sent(wrap: Wrap) -> None:
    shapes: Shapes = {"vector": (600,), "small": (7, 73), "large": (8, 64)}
    data = draw(shapes, 2, 2)
    options = {"warmup_steps": 0} if wrap is OneBitSGD else {}
    means, states = train(lambda *args, **kw: wrap(*args, **kw), shapes, data, **options)
    expected = averaged(data)
    assert max(worst(means, expected, name) for name in ("vector", "small")) <= PLAIN < worst(means, expected, "large")
    assert states[0]["vectors"]["worker"].keys() == {"large"}


def test_groups_without_compression_are_exact() -> None:
    data = draw(ODD, 3)
    means, _ = train(CompressedAllReduce, ODD, data, codec="sign", groups={"[fb]*": None})
    expected = averaged(data)
    assert max(worst(means, expected, name) for name in ("first", "bias")) <= PLAIN
    assert worst(means, expected, "second") > 0.01


@pytest.mark.parametrize(
    "wrap", [ByteGrad, SignSGD, OneBitSGD, TopK, RandomK, QSGD, TernGrad, FP8AllReduce, DoubleSqueeze]
)
def test_warmup_is_no_compression(wrap: Wrap) -> None:
    data = draw(ODD, 3)
    means, _ = train(wrap, ODD, data, warmup_steps=3)
    expected = averaged(data)
    assert max(worst(means[:3], expected[:3], name) for name in ODD) <= PLAIN
    assert worst(means[3:], expected[3:], "first") > 1e-4


def test_powersgd_starts_without_compression() -> None:
    data = draw(ODD, 3)
    means, states = train(PowerSGD, ODD, data[:3], start_step=3)
    assert max(worst(means, averaged(data[:3]), name) for name in ODD) <= PLAIN
    assert all(float(r.norm()) == 0 for r in states[0]["vectors"]["residual"].values())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_votes_are_signs(ranks: int) -> None:
    """Unit gradients; ties, zeros and negative zeros are +1."""
    data = draw(ODD, ranks)
    for everyone in data:
        for rank, named in enumerate(everyone):
            named["bias"] = np.where(np.arange(13) < 6, (-1.0) ** rank, -0.0).astype(np.float32)
    for mean in train(SignSGD, ODD, data, majority_vote=True).means:
        assert all(set(np.unique(g)) <= {-1.0, 1.0} for g in mean.values())
        assert np.all(mean["bias"] == 1)


@pytest.mark.parametrize("name", ["qsgd", "qsgd_2_bits", "bytegrad_stochastic", "terngrad", "terngrad_shared", "natural",
                                  "fp8_e5m2_stochastic"])  # fmt: skip
def test_random_rounding_has_no_bias(name: str) -> None:
    """U = N |mean - v|^2 / E |C(v) - v|^2 is 1 on average, with a standard deviation of about sqrt(2 / n)."""
    shapes: Shapes = {"p": (1024,)}
    data = draw(shapes, 2, 1) * 120
    means = [mean["p"].astype(np.float64) for mean in train(ROWS[name].make, shapes, data).means]
    exact = averaged(data[:1])[0]["p"]
    variance = np.mean([np.sum((m - exact) ** 2) for m in means])
    assert 0.7 < len(means) * np.sum((np.mean(means, axis=0) - exact) ** 2) / variance < 1.35


@pytest.mark.parametrize("options", [{}, {"shared": True}])
def test_terngrad_trains_a_scalar(options: dict[str, Any]) -> None:
    """One element has no deviation to which it could be clipped."""
    data = [[{"scale": np.array(2.0, np.float32)} for _ in range(2)]]
    assert train(TernGrad, {"scale": ()}, data, **options).means[0]["scale"] == 2


@pytest.mark.parametrize("wrap", [ByteGrad, SignSGD, TopK, DGC, PowerSGD])
def test_float64_modules(wrap: Wrap) -> None:
    shapes: Shapes = {"first": (13, 11), "bias": (13,)}
    data = draw(shapes, 2, 2)

    def rank(communicator: Communicator) -> list[dict[str, torch.Tensor]]:
        algorithm = wrap(Given(shapes, torch.float64), communicator=communicator, **everything(wrap))
        means = []
        for everyone in data:
            algorithm.zero_grad()
            algorithm({n: torch.from_numpy(g).double() / 3 for n, g in everyone[communicator.rank].items()}).backward()
            means.append({n: p.grad.clone() for n, p in algorithm.module.named_parameters() if p.grad is not None})
        return means

    for mean, expected in zip(run_ranks(2, rank)[0], averaged(data), strict=True):
        assert mean["bias"].dtype == torch.float64
        if wrap is not DGC:
            assert np.allclose(mean["bias"].numpy(), expected["bias"] / 3, rtol=1e-12)


# -------------------------------------------------------------------------------------- 4. determinism and resuming


@every_kind
def test_twice_the_same(row: Row) -> None:
    data = draw(ODD, 3, 4)
    first, second = (train(row.make, ODD, data) for _ in range(2))
    assert same(first.means, second.means)
    for one, other in zip(first.states, second.states, strict=True):
        assert all(torch.equal(a, b) for a, b in pairs(one, other))


def pairs(state: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What two states remember of the same parameters; of what only one of them names, zeros too."""
    found = []
    for key in sorted(state["vectors"].keys() | other["vectors"].keys()):
        one, two = (s["vectors"].get(key, {}) for s in (state, other))
        for name in sorted(one.keys() | two.keys()):
            like = torch.zeros_like(one.get(name, two.get(name)))
            found.append((one.get(name, like), two.get(name, like)))
    return found


def stored(state: Any) -> Any:
    """What a checkpoint makes of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_resume(wrap: Wrap, shapes: Shapes, data: list[Everyone], done: int, names: Sequence[str] = ()) -> None:
    """Whole, and in two parts with a checkpoint between, is the same bits. `names` is the order in which gradients come."""

    def rank(communicator: Communicator) -> None:
        own = [{name: e[communicator.rank][name] for name in names or shapes} for e in data]
        whole = wrap(Given(shapes), communicator=communicator)
        expected = follow(whole, own)
        first = wrap(Given(shapes), communicator=communicator)
        assert same(follow(first, own[:done]), expected[:done])
        state = stored([first.module.state_dict(), first.algorithm_state_dict()])
        first.close()
        second = wrap(Given(shapes), communicator=communicator)
        second.module.load_state_dict(state[0])
        second.load_algorithm_state_dict(state[1])
        assert second.stats().steps == (done if communicator.size > 1 else 0)
        again = follow(second, own[done:])
        for step, (ours, other) in enumerate(zip(again, expected[done:], strict=True)):
            assert same([ours], [other]), f"step {step} after resuming differs"
        for vector, other in pairs(second.algorithm_state_dict(), whole.algorithm_state_dict()):
            assert torch.equal(vector, other)

    run_ranks(len(data[0]), rank)


@grid(shapes={"full": FULL, "odd": ODD}, row=ROWS, cover=1)
def test_resuming_goes_on_bit_for_bit(row: Row, shapes: Shapes) -> None:
    check_resume(row.make, shapes, draw(shapes, 2 if shapes is FULL else 3, 6), 3)


@every_kind
def test_resuming_before_the_first_step(row: Row) -> None:
    check_resume(row.make, FULL, draw(FULL, 2, 3), 0)


@pytest.mark.parametrize("name", ["allreduce", "bytegrad", "qsgd", "sign", "topk", "dgc", "powersgd"])
def test_resuming_with_gradients_in_another_order(name: str) -> None:
    """Buckets have been laid out by the order in which gradients come, and are laid out so again."""
    check_resume(ROWS[name].make, FULL, draw(FULL, 3, 7), 3, names=["scale", "first", "bias", "second"])


@grid(
    row={**REMEMBERING, **DGC_ROWS, **POWERSGD_ROWS},
    before__after=[(3, 2), (2, 4)],
    cover=1,
)
def test_another_number_of_ranks_keeps_the_mean(row: Row, before: int, after: int) -> None:
    """Every rank begins with the mean of what all ranks remembered; what all knew stays as it is."""
    old = train(row.make, ODD, draw(ODD, before)).states
    for state in train(row.make, ODD, [], stored(old), after).states:
        for vectors in zip(*(pairs(state, one) for one in old), strict=True):
            vector, of_ranks = vectors[0][0], torch.stack([own.double() for _, own in vectors])
            assert torch.allclose(vector.double(), of_ranks.mean(0), rtol=1e-6, atol=0)
            if torch.equal(of_ranks[0], of_ranks[1]) and torch.equal(of_ranks[0], of_ranks[-1]):
                assert torch.equal(vector.double(), of_ranks[0])


@remembering
def test_another_number_of_ranks_loses_nothing(row: Row) -> None:
    first, second = draw(ODD, 3, 4), draw(ODD, 2, 4, seed=8)
    old = train(row.make, ODD, first)
    new = train(row.make, ODD, second, stored(old.states))
    check_conserved(ODD, averaged(first) + averaged(second), old.means + new.means, new.states)
