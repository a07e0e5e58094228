"""The compressed all-reduce in two passes gives, on every rank, the bytes that its steps say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import FIRST_PASS, SECOND_PASS, CompressedAllReduce, Layout, all_reduce_for
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8, Codec, MinMaxUInt8, RandomK, Sign, TopK, fold_seed
from tests.comm.compressed import simulation
from tests.grids import grid, only
from tests.oracles import minmax_uint8 as oracle
from tests.oracles.vectors import make, same_bits

SEED = 99
BLOCK = 64
LENGTHS = (0, 1, BLOCK - 1, BLOCK + 1, 1009, 7001)


def expected(inputs: list[np.ndarray], pieces: int, stochastic: bool) -> np.ndarray:
    """The algorithm's steps on the oracle of the codec, rank by rank."""
    ranks, n = len(inputs), inputs[0].size
    out = np.empty(n, np.float32)
    for number, _, part in simulation.parts(MinMaxUInt8(BLOCK), n, ranks, pieces):
        seeds = [fold_seed(SEED, FIRST_PASS, rank, number) if stochastic else None for rank in range(ranks)]
        payloads = np.stack([oracle.encode(x[part], BLOCK, s) for x, s in zip(inputs, seeds, strict=True)])
        seed = fold_seed(SEED, SECOND_PASS, number) if stochastic else None
        mean = oracle.reduce(payloads, out[part].size, 1 / ranks, BLOCK, seed)
        out[part] = oracle.decode(mean, out[part].size, BLOCK)
    return out


@grid(n=LENGTHS, ranks=[2, 3, 4, 7, 8], stochastic=[False, True], cover=1)
def test_against_the_oracle(n: int, ranks: int, stochastic: bool) -> None:
    inputs = [make("heavy", n, 1e-3, rank) for rank in range(ranks)]
    flags = [np.arange(5, dtype=np.float32) * rank for rank in range(ranks)]
    pieces = 1 + n % 5

    def rank(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        x = torch.from_numpy(inputs[communicator.rank].copy())
        exact = torch.from_numpy(flags[communicator.rank].copy())
        all_reduce = CompressedAllReduce(MinMaxUInt8(BLOCK, stochastic), communicator, n, 5, pieces=pieces)
        all_reduce(x, exact, seed=SEED)
        first = x.clone()
        # Buffers are used again: a second call must not see the first.
        x.copy_(torch.from_numpy(inputs[communicator.rank]))
        all_reduce(x, torch.from_numpy(flags[communicator.rank].copy()), seed=SEED)
        assert torch.equal(torch.nan_to_num(first), torch.nan_to_num(x))
        return first.numpy(), exact.numpy()

    reference = expected(inputs, pieces, stochastic)
    for result, exact in run_ranks(ranks, rank):
        assert same_bits(result, reference)
        assert np.array_equal(exact, np.sum(flags, axis=0, dtype=np.float32) / np.float32(ranks))


@pytest.mark.slow
@grid(
    codec=only([MinMaxUInt8(64, True), Sign(), RandomK(0.3), TopK(0.3)], Sign(), RandomK(0.3)),
    dtype=[torch.float16, torch.bfloat16],
    cover=1,
)
def test_other_codecs_and_dtypes(codec: Codec, dtype: torch.dtype) -> None:
    n, ranks, pieces = 1500, 3, 2
    inputs = [torch.from_numpy(make("gaussian", n, 1.0, r)).to(dtype) for r in range(ranks)]

    def rank(communicator: Communicator) -> torch.Tensor:
        x = inputs[communicator.rank].clone()
        flags = torch.ones(3, dtype=dtype)
        CompressedAllReduce(codec, communicator, n, 3, dtype, pieces=pieces)(x, flags, seed=SEED)
        assert torch.equal(flags, torch.ones(3, dtype=dtype))
        return x

    reference = simulation.two_passes(codec, inputs, pieces, SEED)
    for result in run_ranks(ranks, rank):
        assert torch.equal(result, reference)


def test_one_rank_is_the_identity() -> None:
    def rank(communicator: Communicator) -> np.ndarray:
        x = torch.from_numpy(make("heavy", 1000, 1.0, 0))
        CompressedAllReduce(MinMaxUInt8(), communicator, 1000, worker_residual=True, owner_residual=True)(x)
        return x.numpy()

    (result,) = run_ranks(1, rank)
    assert same_bits(result, make("heavy", 1000, 1.0, 0))


def test_nothing_exact() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        x = torch.full((300,), float(communicator.rank))
        CompressedAllReduce(MinMaxUInt8(), communicator, 300)(x)
        return x

    for result in run_ranks(2, rank):
        assert torch.equal(result, torch.full((300,), 0.5))


@grid(cover=1, pieces=[1, 4], residual=[False, True])
def test_what_is_not_finite_comes_out_on_all_ranks_and_is_not_kept(pieces: int, residual: bool) -> None:
    bad = {0: float("nan"), 700: float("inf"), 1023: -float("inf")}

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        collective = CompressedAllReduce(
            MinMaxUInt8(BLOCK), communicator, 1024, worker_residual=residual, owner_residual=residual, pieces=pieces
        )
        x = torch.ones(1024)
        if communicator.rank == 1:
            for index, value in bad.items():
                x[index] = value
        collective(x)
        again = torch.ones(1024)
        collective(again)
        assert all(residual.isfinite().all() for residual in collective.state_dict().values())
        return x, again

    for x, again in run_ranks(3, rank):
        lost = {index // BLOCK for index in bad}
        assert {block for block in range(16) if not x.view(16, BLOCK)[block].isfinite().all()} == lost
        assert torch.equal(again, torch.ones(1024))


@grid(cover=1, residual=[False, True])
def test_payloads_can_be_taken_instead_of_the_mean(residual: bool) -> None:
    n, codec = 7001, MinMaxUInt8(BLOCK)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = torch.from_numpy(make("heavy", n, 1e-3, communicator.rank))
        written, kept, taken = own.clone(), own.clone(), torch.full((n,), torch.nan)
        for x, deliver in (
            (written, None),
            (kept, lambda part, payload: codec.decode(payload.clone(), taken[part])),
        ):
            all_reduce = CompressedAllReduce(codec, communicator, n, 3, worker_residual=residual, pieces=4)
            exact = torch.full((3,), float(communicator.rank))
            all_reduce(x, exact, seed=SEED, deliver=deliver)
            assert exact.tolist() == [1.0] * 3
        assert torch.equal(kept, own)
        return written, taken, kept

    for written, taken, _ in run_ranks(3, rank):
        assert torch.equal(written, taken)


def test_payloads_of_the_mean_are_there_where_it_is_encoded() -> None:
    def rank(communicator: Communicator) -> None:
        for codec in (TopK(0.1), RandomK(0.1)):
            all_reduce = all_reduce_for(codec, communicator, 100)
            assert not all_reduce.delivers
            with pytest.raises(ValueError, match="leave out deliver"):
                all_reduce(torch.zeros(100), seed=1, deliver=lambda part, payload: None)
        assert not CompressedAllReduce(AbsMaxInt8(), communicator, 100, plain_below=101).delivers

    run_ranks(2, rank)


WIRE = [(MinMaxUInt8(), 0.26), (AbsMaxInt8(), 0.26), (AbsMaxInt4(), 0.14), (Sign(), 0.04)]


@pytest.mark.parametrize(("codec", "most"), only(WIRE, WIRE[0], WIRE[3]))
def test_bytes_on_the_wire(codec: Codec, most: float) -> None:
    n = 1 << 19

    def rank(communicator: Communicator) -> float:
        x = torch.zeros(n)
        CompressedAllReduce(codec, communicator, n)(x)
        compressed, communicator.bytes_sent = communicator.bytes_sent, 0
        communicator.all_reduce(x).wait()
        return compressed / communicator.bytes_sent

    for ranks in range(2, 9):
        assert max(run_ranks(ranks, rank)) <= most


def test_the_order_of_messages_is_that_of_the_page() -> None:
    def rank(communicator: Communicator) -> str:
        x, log = torch.zeros(4 * 128), []
        all_reduce = CompressedAllReduce(MinMaxUInt8(BLOCK), communicator, 4 * 128, pieces=4)
        for operation, name in (("all_to_all", "T"), ("all_gather", "G")):
            started = getattr(communicator, operation)
            setattr(communicator, operation, lambda *a, f=started, name=name: (log.append(name), f(*a))[1])
        all_reduce(x)
        return "".join(log)

    assert run_ranks(2, rank) == ["TTGTGTGG"] * 2


def test_layout_covers_the_vector_once() -> None:
    for n in (0, 1, 31, 33, 1000, 12345):
        for owners in (1, 2, 7):
            for pieces in (1, 2, 5, 100):
                layout = Layout.cut(MinMaxUInt8(32), n, owners, pieces)
                parts = [layout.part(p, o) for o in range(owners) for p in range(layout.pieces)]
                assert [e for part in parts for e in range(part.start, part.stop)] == list(range(n))
                assert all(part.start % 32 == 0 for part in parts if part.start < n)
                assert all(layout.width(piece) > 0 for piece in range(layout.pieces) if n)
                assert 1 <= layout.pieces <= pieces


def test_default_number_of_pieces() -> None:
    assert [Layout.cut(MinMaxUInt8(), n, 2).pieces for n in (0, 1 << 19, 1 << 20, 1 << 25)] == [1, 1, 2, 8]
    assert Layout.cut(Sign(), 1 << 20, 2).pieces == 1  # its messages would be too short
    assert Layout.cut(TopK(), 1 << 23, 2).pieces == 3  # of 2^16 bytes and more


def test_wrong_arguments() -> None:
    def rank(communicator: Communicator) -> None:
        def make_one(**changed: Any) -> CompressedAllReduce:
            return CompressedAllReduce(**{"codec": MinMaxUInt8(), "communicator": communicator, "n": 64} | changed)

        with pytest.raises(TypeError, match="expected a codec"):
            make_one(codec="minmax_uint8")
        with pytest.raises(TypeError, match="float64"):
            make_one(dtype=torch.float64)
        for name, value in (("n", -1), ("exact", -1), ("plain_below", -1), ("pieces", 0)):
            with pytest.raises(ValueError, match="must be"):
                make_one(**{name: value})
        all_reduce = make_one()
        with pytest.raises(TypeError, match=r"x must be of torch\.float32"):
            all_reduce(torch.zeros(64, dtype=torch.float16))
        with pytest.raises(ValueError, match=r"shape \(64,\)"):
            all_reduce(torch.zeros(65))
        with pytest.raises(ValueError, match="contiguous"):
            all_reduce(torch.zeros(128)[::2])
        with pytest.raises(ValueError, match="exact must be"):
            all_reduce(torch.zeros(64), torch.zeros(1))

    run_ranks(1, rank)
