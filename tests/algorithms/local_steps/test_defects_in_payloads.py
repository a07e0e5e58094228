"""What public implementations have got wrong in the payloads of local steps, one test for each behaviour."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import DiLoCo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests.algorithms import parts
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.common import Tensors, normal, step
from tests.grids import grid


def residual(model: Any) -> torch.Tensor:
    named = parts.vectors(model)["residual"]
    return torch.cat([named[name].flatten() for name in named])


@pytest.mark.parametrize("beta", [0.999, 0.95, 0.5])
def test_the_residual_of_a_model_in_bfloat16_decays(beta: float) -> None:
    """In bfloat16 0.999 x is rounded back to x, so that the decay does nothing; residuals are in float32."""

    def rank(communicator: Communicator) -> None:
        module = Tensors((64, 64), dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        options: dict[str, Any] = {"beta": beta, "codec": ChunkedTopK(1, 4096), "interval": 1}
        with SparseLoCo(module, optimizer, communicator=communicator, **options) as model:
            step(module, optimizer, communicator.rank)
            model.wait()
            before = residual(model)
            assert before.dtype == torch.float32
            optimizer.zero_grad()
            for _ in range(20):
                optimizer.step()
                model.wait()
            after = residual(model)
            # Of each round one element has been sent.
            left = (after - before * beta**20).abs() <= 1e-5 * before.abs()
            assert int(left.sum()) >= 4096 - 20
            assert beta != 0.5 or float(after.abs().max()) < 1e-4

    run_ranks(2, rank)


def test_an_entry_takes_ten_and_a_half_bits() -> None:
    """Indices of 64 bits and values of 8 make an entry nine bytes long."""
    assert ChunkedTopK(64, 4096).payload_size(4096 * 1000) == 84 * 1000
    assert 84 * 8 / 64 == 10.5


def test_signs_arrive_and_both_magnitudes_are_used() -> None:
    """Bins around zero leave half of the codes to values that are never sent, and have one bin for all positive ones."""
    values = normal(4096 * 16, 1) ** 3  # with heavy tails
    codec = ChunkedTopK(64, 4096)
    decoded = codec.decode(codec.encode(values), torch.empty_like(values)).view(16, 4096)
    sent = decoded != 0
    assert (sent.sum(1) == 64).all()
    assert torch.equal(decoded.sign()[sent], values.view(16, 4096).sign()[sent])
    assert all(len(row[row != 0].abs().unique()) == 2 for row in decoded)


@pytest.mark.parametrize(("k", "chunk"), [(1, 32), (3, 32), (7, 64), (63, 128), (127, 128), (4095, 4096)])
def test_any_number_of_elements_of_a_chunk_can_be_sent(k: int, chunk: int) -> None:
    """An odd one, too, of tensors that are no whole chunks; what is left is the residual."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Tensors((67, 131))
        start = flat(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        codec = ChunkedTopK(k, chunk)
        with SparseLoCo(module, optimizer, communicator=communicator, interval=1, codec=codec) as model:
            step(module, optimizer, communicator.rank)
            mine = start - flat(module)
            model.wait()
            kept = residual(model)
            sent = (mine - kept).abs() > 1e-7
            n, whole = 67 * 131, 67 * 131 // chunk
            last = n - whole * chunk
            assert int(sent.sum()) == whole * k + min(k, last)
        return flat(module)

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_a_chunk_that_is_too_large_is_refused_at_once() -> None:
    """Not in the first round, when a run has been under way for an hour."""
    module = Tensors((128, 128))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for spec in ("chunked_topk:k=64,chunk=8192", "chunked_topk:k=3,chunk=100"):
        with pytest.raises(ValueError, match="chunk must be a power of two from 32 to 4096"):
            SparseLoCo(module, optimizer, codec=spec)


@grid(shape=[(), (700,), (3, 250), (5, 7, 23), (4, 3, 8, 9)], codec=["minmax_uint8", "absmax_int4", "sign"], cover=1)
def test_tensors_of_any_number_of_dimensions_are_encoded(shape: tuple[int, ...], codec: str) -> None:
    """Where only matrices are, vectors and flat buckets take eight bytes for each element."""

    def rank(communicator: Communicator) -> tuple[int, torch.Tensor]:
        module = Tensors(shape, shape)
        if len(shape) == 4:
            module = module.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options: dict[str, Any] = {"codec": codec, "exact": (), "min_numel": 0, "interval": 2}
        with DiLoCo(module, optimizer, communicator=communicator, **options) as model:
            step(module, optimizer, communicator.rank, 0)
            step(module, optimizer, communicator.rank, 1)
            model.wait()
            return model.stats().bytes_sent, flat(module)

    (sent, first), (_, second) = run_ranks(2, rank)
    assert torch.equal(first, second)
    assert len(shape) == 0 or sent < 1.4 * first.numel()


@pytest.mark.slow
def test_indices_above_two_to_the_24_are_right() -> None:
    """Sizes and positions that travel as float32 are wrong there: only the last elements of a large tensor change."""
    n = (1 << 24) + 4096

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Tensors((2, n // 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        before = module.p0.detach()[1, -9:].clone()
        with SparseLoCo(module, optimizer, communicator=communicator, interval=1) as model:
            module.p0.grad = torch.zeros_like(module.p0)
            module.p0.grad[1, -7::3] = 1.0 + communicator.rank
            optimizer.step()
            model.wait()
        return before - module.p0.detach()[1, -9:]

    for moved in run_ranks(2, rank):
        assert torch.allclose(moved, torch.tensor([0.0, 0.0, 1.5, 0.0, 0.0, 1.5, 0.0, 0.0, 1.5]), atol=1e-6)
