"""What every algorithm must do, run by thread ranks: one row for each."""

from __future__ import annotations

from collections.abc import Callable

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
    GradientAlgorithm,
    GradientAllReduce,
    NaturalCompression,
    OneBitAdam,
    OneBitSGD,
    PowerSGD,
    QAdam,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    from_spec,
    names,
)
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import from_spec as codec_from_spec
from tests.algorithms.ranks import Odd, batch, fill, gradients, train
from tests.algorithms.training import tuner
from tests.grids import grid, only

ALL: dict[str, object] = {"exact": (), "min_numel": 0}  # the models here are small
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "bytegrad_stochastic": lambda *args, **kw: ByteGrad(*args, stochastic=True, block=64, **kw),
    "compressed": CompressedAllReduce,
    "compressed_exact": lambda *args, **kw: CompressedAllReduce(*args, codec="absmax_int4", exact="1d", **kw),
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "terngrad_shared": lambda *args, **kw: TernGrad(*args, shared=True, **kw),
    "natural": NaturalCompression,
    "fp8": FP8AllReduce,
    "sign": lambda *args, **kw: SignSGD(*args, **{**ALL, **kw}),
    "sign_vote": lambda *args, **kw: SignSGD(*args, majority_vote=True, **kw),
    "onebit": lambda *args, **kw: OneBitSGD(*args, warmup_steps=0, **{**ALL, **kw}),
    "double_squeeze": lambda *args, **kw: DoubleSqueeze(*args, **{**ALL, **kw}),
    "topk": lambda *args, **kw: TopK(*args, **{**ALL, **kw}),
    "randomk": lambda *args, **kw: RandomK(*args, ratio=0.1, **{**ALL, **kw}),
    "dgc": lambda *args, **kw: DGC(*args, **{**ALL, **kw}),
    "powersgd": PowerSGD,
    "powersgd_in_turn": lambda *args, **kw: PowerSGD(*args, alternate=True, min_compression=0.5, **kw),
    "qadam": QAdam,
    "onebit_adam": OneBitAdam,
    "auto": tuner,
}
# Largest error of a mean gradient after one step, relative to the largest gradient of its parameter. Where all but a few bits
# or elements are remembered for later, it says no more than that nothing grew; test_simulation.py has the values.
LOSSY = 2.2
ERROR = {
    # Adams follow their own optimizer, which is not the one here, so that they stay exact, as `auto` is at first.
    **dict.fromkeys(("allreduce", "auto", "qadam", "onebit_adam"), 1e-6),
    "bytegrad": 2.5 / 255,
    "bytegrad_stochastic": 4.5 / 255,
    "compressed": 2.5 / 255,
    "compressed_exact": 2.5 / 14,
    "qsgd": 2.5 / 7,
    "fp8": 2.5 / 16,
    **dict.fromkeys(("terngrad", "terngrad_shared", "natural", "sign", "onebit", "double_squeeze"), LOSSY),
    **dict.fromkeys(("topk", "randomk", "dgc", "powersgd", "powersgd_in_turn"), LOSSY),
}
# Gradients of a vote are signs, of any size before.
MEANS = [name for name in ALGORITHMS if name != "sign_vote"]

every_algorithm = grid(cover=1, name=list(ALGORITHMS))
every_mean = grid(cover=1, name=MEANS)


@grid(name=list(ALGORITHMS), size__bucket_bytes=[(2, 1), (3, 500), (4, 10 << 20), (8, 10 << 20)], cover=1)
def test_all_ranks_end_bit_identical(name: str, size: int, bucket_bytes: int) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        return train(communicator, ALGORITHMS[name], bucket_bytes=bucket_bytes)[0]

    everyone = run_ranks(size, rank)
    for other in everyone[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everyone[0], other, strict=True))


@grid(dtype=[torch.float32, torch.bfloat16, torch.float16], name=MEANS, cover=1)
def test_gradients_are_the_mean(name: str, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plain = Odd().to(dtype)
        plain(batch(communicator.rank, 0).to(dtype)).float().square().mean().backward()
        algorithm = ALGORITHMS[name](Odd().to(dtype), communicator=communicator, bucket_bytes=600)
        algorithm(batch(communicator.rank, 0).to(dtype)).float().square().mean().backward()
        assert [p.grad.dtype for p in algorithm.parameters() if p.grad is not None] == [dtype] * 4
        return gradients(plain), gradients(algorithm)

    everyone = run_ranks(3, rank)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    for position, parameter in enumerate(everyone[0][0]):
        if parameter is None:
            assert everyone[0][1][position] is None
            continue
        local = torch.stack([plain[position].double() for plain, _ in everyone])
        error = (everyone[0][1][position].double() - local.mean(0)).abs().max()
        assert error <= (ERROR[name] + rounding) * 2 * local.abs().max()


@every_algorithm
def test_one_rank_is_plain_pytorch_bit_for_bit(name: str) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        return train(communicator, ALGORITHMS[name], steps=5)[0]

    (ours,) = run_ranks(1, rank)
    plain = Odd(seed=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        plain(batch(0, step)).float().square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, plain.parameters(), strict=True))


@every_algorithm
def test_start_is_rank_0s(name: str) -> None:
    """Parameters, frozen ones and buffers of all dtypes, bit for bit."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        module = Odd(seed=communicator.rank)
        module.register_buffer("flag", torch.tensor([communicator.rank == 0]))
        module.register_buffer("count", torch.tensor(communicator.rank + 7))
        module.register_buffer("odd_byte", torch.tensor([communicator.rank], dtype=torch.uint8))
        module.register_buffer("nan", torch.full((3,), float("nan"), dtype=torch.bfloat16))
        module.calls.fill_(communicator.rank)
        ALGORITHMS[name](module, communicator=communicator)
        return module.state_dict()

    everyone = run_ranks(3, rank)
    for key, value in everyone[0].items():
        for other in everyone[1:]:
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(other[key])), key
    assert everyone[2]["count"] == 7
    assert everyone[2]["flag"].all()


@every_algorithm
def test_buffers_follow_rank_0_in_training_only(name: str) -> None:
    def rank(communicator: Communicator) -> tuple[float, float]:
        module = nn.BatchNorm1d(7)
        algorithm = ALGORITHMS[name](module, communicator=communicator)
        for step in range(3):
            algorithm(batch(communicator.rank, step)).square().mean().backward()
        before = float(module.running_mean.sum())
        algorithm(batch(communicator.rank, 3)).square().mean().backward()
        algorithm.eval()
        algorithm(batch(communicator.rank, 4))
        return before, float(module.running_mean[0])

    first, second = run_ranks(2, rank)
    # Each forward starts from rank 0's statistics and then adds the rank's own batch.
    assert first != second


@every_mean
def test_no_sync_accumulates_and_then_averages_the_sum(name: str) -> None:
    def rank(communicator: Communicator) -> tuple[list, list, int]:
        plain, ours = Odd(), ALGORITHMS[name](Odd(), communicator=communicator)
        for step in range(2):
            plain(batch(communicator.rank, step)).square().mean().backward()
        with ours.no_sync():
            ours(batch(communicator.rank, 0)).square().mean().backward()
            sent = ours.stats().bytes_sent
            local = gradients(ours)
        first = Odd()
        first(batch(communicator.rank, 0)).square().mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(local, gradients(first), strict=True) if a is not None)
        ours(batch(communicator.rank, 1)).square().mean().backward()
        return gradients(plain), gradients(ours), sent

    everyone = run_ranks(2, rank)
    assert everyone[0][2] == 0
    for position, mean in enumerate(everyone[0][1]):
        if mean is not None:
            local = torch.stack([plain[position] for plain, _, _ in everyone])
            assert (mean - local.mean(0)).abs().max() <= ERROR[name] * 2 * local.abs().max()


@grid(set_to_none=[True, False], name=MEANS, cover=1)
def test_accumulation_without_no_sync(name: str, set_to_none: bool) -> None:
    """Gradients that live in the bucket may be accumulated into, zeroed in place or dropped."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        algorithm = ALGORITHMS[name](Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(2):
                algorithm(batch(communicator.rank, 2 * step + micro)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()]

    everyone = run_ranks(2, rank)
    reference = [Odd(), Odd()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in reference]
    for step in range(3):
        for r in range(2):
            optimizers[r].zero_grad()
            for micro in range(2):
                reference[r](batch(r, 2 * step + micro)).square().mean().backward()
        for a, b in zip(*(m.parameters() for m in reference), strict=True):
            if a.grad is not None:
                a.grad = b.grad = (a.grad + b.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
    for ours, expected in zip(everyone[0], reference[0].parameters(), strict=True):
        assert torch.allclose(ours, expected, atol=ERROR[name] * 1.0 + 1e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)
        self.never = nn.Linear(7, 3)
        fill(self)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


@grid(bucket_bytes=[1, 10 << 20], name=MEANS, cover=1)
def test_unused_parameters(name: str, bucket_bytes: int) -> None:
    """Used by one rank: the mean with zeros for the others, everywhere. Used by none: no gradient."""

    def rank(communicator: Communicator) -> tuple[dict, dict]:
        algorithm = ALGORITHMS[name](Branches(), communicator=communicator, bucket_bytes=bucket_bytes)
        algorithm(batch(communicator.rank, 0), left=communicator.rank == 0).square().mean().backward()
        ours = {n: p.grad for n, p in algorithm.module.named_parameters()}
        plain = Branches()
        plain(batch(communicator.rank, 0), left=communicator.rank == 0).square().mean().backward()
        return ours, {n: p.grad for n, p in plain.named_parameters()}

    everyone = run_ranks(2, rank)
    for (ours, _), r in zip(everyone, range(2), strict=True):
        assert ours["never.weight"] is None
        for key, owner in (("left.weight", 0), ("left.bias", 0), ("right.weight", 1), ("right.bias", 1)):
            expected = everyone[owner][1][key] / 2
            assert torch.equal(ours[key], everyone[1 - r][0][key])
            assert (ours[key] - expected).abs().max() <= ERROR[name] * 2 * expected.abs().max()


@grid(bad=[float("nan"), float("inf"), float("-inf")], name=list(ALGORITHMS), cover=1)
def test_non_finite_gradients_arrive_everywhere(name: str, bad: float) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor | None]:
        algorithm = ALGORITHMS[name](Odd(), communicator=communicator)
        x = batch(communicator.rank, 0)
        loss = algorithm(x).square().mean()
        if communicator.rank == 1:
            loss = loss * bad
        loss.backward()
        return gradients(algorithm)

    for grads in run_ranks(3, rank):
        finite = [bool(gradient.isfinite().all()) for gradient in grads if gradient is not None]
        # A sparsifier sends a few of the elements, perhaps none of a parameter.
        assert not (all(finite) if name in ("topk", "randomk", "dgc") else any(finite))


@every_mean
def test_channels_last_parameters_keep_their_layout(name: str) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = nn.Conv2d(3, 5, 3)
        fill(module)
        module = module.to(memory_format=torch.channels_last)
        algorithm = ALGORITHMS[name](module, communicator=communicator)
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(communicator.rank))
        algorithm(x).square().mean().backward()
        assert module.weight.grad.stride() == module.weight.stride()
        return module.weight.grad

    first, second = run_ranks(2, rank)
    module = nn.Conv2d(3, 5, 3)
    fill(module)
    for r in range(2):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(r))
        (module(x).square().mean() / 2).backward()
    assert torch.equal(first, second)
    assert (first - module.weight.grad).abs().max() <= ERROR[name] * 2 * module.weight.grad.abs().max() + 1e-6


def payload(spec: str) -> Callable[[int], float]:
    return codec_from_spec(spec).payload_size


PAYLOAD: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 4 * n,
    "auto": lambda n: 4 * n,
    "bytegrad": payload("minmax_uint8"),
    "bytegrad_stochastic": payload("minmax_uint8:stochastic=true,block=64"),
    "compressed": payload("minmax_uint8"),
    "compressed_exact": payload("absmax_int4"),
    "qsgd": payload("qsgd"),
    "terngrad": payload("terngrad"),
    "terngrad_shared": payload("terngrad:shared=true"),
    "natural": payload("natural"),
    "fp8": payload("fp8"),
    "sign": payload("sign"),
    "sign_vote": payload("sign"),
    "onebit": payload("sign:two_means=true"),
    "double_squeeze": payload("sign"),
    "topk": payload("topk"),
    "randomk": lambda n: 4 * n * 0.1,
    "dgc": payload("topk:ratio=0.01"),
    "powersgd": lambda n: 4 * 2 * 512,
    "powersgd_in_turn": lambda n: 4 * 512,
    "qadam": lambda n: 4 * n,
    "onebit_adam": lambda n: 4 * n,
}


# Of four ranks on, payloads are added up four at a time, in kernels of their own.
@every_algorithm
@grid(cover=1, ranks=only([2, 4], 2))
def test_bytes_per_step(name: str, ranks: int) -> None:
    def rank(communicator: Communicator) -> int:
        module = nn.Linear(512, 512, bias=False)
        algorithm = ALGORITHMS[name](module, communicator=communicator)
        algorithm(batch(communicator.rank, 0, 512)).square().mean().backward()
        return algorithm.stats().bytes_sent

    n, (sent, *_), others = 512 * 512, run_ranks(ranks, rank), ranks - 1
    full = 2 * others / ranks * 4 * n
    expected = (2 / ranks if name not in ("topk", "dgc") else 1) * others * PAYLOAD[name](n)
    # Both factors of a matrix are smaller than what the others may add to theirs.
    assert expected <= sent <= expected + (256 if name.startswith("powersgd") else 0.005 * full)


@every_algorithm
def test_resume_is_bit_identical(name: str) -> None:
    """Two steps, a new process (a new module and algorithm), and two more are as good as four."""

    def rank(communicator: Communicator) -> None:
        options = {"bucket_bytes": 600}
        whole, _ = train(communicator, ALGORITHMS[name], steps=4, momentum=0.0, **options)
        half, first = train(communicator, ALGORITHMS[name], steps=2, momentum=0.0, **options)
        state = first.algorithm_state_dict()
        assert state["steps"] == 2
        module = Odd(seed=5)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), half, strict=True):
                parameter.copy_(value)
        second = ALGORITHMS[name](module, communicator=communicator, **options)
        second.load_algorithm_state_dict(state)
        again, _ = train(communicator, second, first=2, steps=2, momentum=0.0)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))

    run_ranks(3, rank)


@every_algorithm
def test_runs_repeat(name: str) -> None:
    """The same seeds give the same bits."""

    def rank(communicator: Communicator) -> None:
        first, second = (train(communicator, ALGORITHMS[name])[0] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    run_ranks(2, rank)


def test_every_registered_algorithm_has_a_row() -> None:
    on_gradients = {name for name in names() if issubclass(Algorithm.registered[name], GradientAlgorithm)}
    assert on_gradients <= set(ALGORITHMS)


def test_from_spec() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = from_spec("bytegrad:block=64", Odd(), communicator=communicator)
        assert isinstance(algorithm, ByteGrad)
        assert algorithm.assignment.default.codecs[0].block == 64
        with pytest.raises(ValueError, match=r"no algorithm 'nothing'.*known are allreduce, async_decentralized"):
            from_spec("nothing", Odd(), communicator=communicator)
        with pytest.raises(ValueError, match="unexpected keyword argument 'blok'"):
            from_spec("bytegrad:blok=64", Odd(), communicator=communicator)
        with pytest.raises(ValueError, match="is a ByteGrad, expected a GradientAllReduce"):
            GradientAllReduce.from_spec("bytegrad", Odd(), communicator=communicator)

    run_ranks(1, rank)
