"""What TwoMagnitudes promises beside its bytes: the error on three laws, contraction, and blocks that are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bagua_kernels.compression import AbsMaxInt4, BlockCodec, Sign, TwoMagnitudes, from_spec
from bagua_kernels.compression.codec import to_spec
from bagua_kernels.rules.signs import two_magnitudes
from tests.conftest import EMULATED, Target
from tests.grids import folded, only
from tests.oracles import block_quantizers as oracle
from tests.oracles.block_rules import Spec
from tests.oracles.vectors import F32, F64, make

N = 512 if EMULATED else 1 << 16
# How values are drawn, the bound, and what docs/codecs.md and the docstring give for this codec, int4 and signs.
LAWS: dict[str, tuple[Callable[[np.random.Generator], F64], float, tuple[float, ...]]] = {
    "gauss": (lambda rng: rng.standard_normal(N), 0.36, (0.34, 0.12, 0.60)),
    "laplace": (lambda rng: rng.laplace(size=N), 0.43, (0.41, 0.16, 0.71)),
    "student": (lambda rng: rng.standard_t(4, N), 0.47, (0.45, 0.19, 0.70)),
}


def decoded(codec: BlockCodec, x: F32, target: Target) -> F64:
    payload = codec.encode(torch.from_numpy(x).to(target.device))
    out: F64 = codec.decode(payload, torch.empty(x.size, device=target.device)).cpu().double().numpy()
    return out


def lost(x: F32, y: F64) -> float:
    """The norm of what is lost, as a part of the norm."""
    return float(np.linalg.norm(y - x) / np.linalg.norm(x.astype(np.float64)))


def test_spec_and_size() -> None:
    assert from_spec("two_magnitudes") == TwoMagnitudes() == TwoMagnitudes(256)
    assert from_spec(to_spec(TwoMagnitudes(64))) == TwoMagnitudes(64) == dataclasses.replace(TwoMagnitudes(), block=64)
    assert TwoMagnitudes().payload_size(10**6) <= 0.27 * 10**6
    with pytest.raises(ValueError, match="power of two from 32 to 4096, got block=100"):
        TwoMagnitudes(100)


@pytest.mark.skipif(EMULATED, reason="a statistic of the bytes, which other tests compare with the native ones")
@pytest.mark.parametrize("law", LAWS)
def test_error_on_three_laws(target: Target, law: str) -> None:
    """Within the bound, that of exact arithmetic with exact magnitudes, and what the documentation gives."""
    draw, bound, stated = LAWS[law]
    x = draw(np.random.default_rng(3)).astype(np.float32)
    error = lost(x, decoded(TwoMagnitudes(), x, target))
    assert error <= bound
    assert error == pytest.approx(lost(x, oracle.ideal(Spec("magnitudes", 256), x)), rel=3e-3)
    others = [lost(x, decoded(codec, x, target)) for codec in (AbsMaxInt4(), Sign())]
    assert [error, *others] == pytest.approx(stated, abs=0.01)


@folded(exponent=[-100, 40] if EMULATED else [-100, -40, -7, 3, 40, 100])
def test_powers_of_two_only_scale(target: Target, exponent: int) -> None:
    x = make("gaussian", 300, 1.0, 2)
    factor = 2.0**exponent
    scaled = decoded(TwoMagnitudes(64), x * np.float32(factor), target)
    assert np.array_equal(scaled, decoded(TwoMagnitudes(64), x, target) * factor)


@folded(value=[1.0, -0.7, 3e38, 2.0**-126, 1.2345e-20], n=[77] if EMULATED else [1, 77, 256])
def test_equal_magnitudes_are_exact_to_bfloat16(target: Target, value: float, n: int) -> None:
    x = np.full(n, value, np.float32) * np.random.default_rng(0).choice([-1, 1], n).astype(np.float32)
    assert np.array_equal(decoded(TwoMagnitudes(), x, target), torch.from_numpy(x).bfloat16().double().numpy())


@folded(zero=[0.0, -0.0])
def test_zeros_stay_zeros(target: Target, zero: float) -> None:
    out = decoded(TwoMagnitudes(), np.full(300, zero, np.float32), target)
    assert not out.any()
    assert not np.signbit(out).any()


def test_two_values_beside_zeros_are_exact(target: Target) -> None:
    """One magnitude is that of the zeros."""
    x = np.zeros(256, np.float32)
    x[[3, 200]] = 1.5, -1.5
    assert np.array_equal(decoded(TwoMagnitudes(), x, target), x)


def worst(block: int, part: float) -> F32:
    """Some values just above the mean, a large one that they keep small, and zeros."""
    many = max(2, round(part * block))
    x = np.zeros(block, np.float32)
    x[1:many] = 1.0
    # The mean is then just below 1, and so is half the mean of the upper side.
    x[0] = 0.999 * min(block, 2 * many) - (many - 1)
    return x


@pytest.mark.parametrize("block", [32] if EMULATED else only([32, 64, 256, 4096], 64, 256))
def test_bound_holds_and_is_close(target: Target, block: int) -> None:
    """Six over the block of the square norm are kept of any block, and not many more of the worst ones."""
    codec = TwoMagnitudes(block)
    inputs = [*(worst(block, part) for part in (0.2, 1 / 3, 0.45, 0.5, 0.6)), make("heavy", block, 1.0, 4)]
    kept = [1 - lost(x, decoded(codec, x, target)) ** 2 for x in inputs]
    assert min(kept) >= codec.bias.delta == 6 / block
    assert min(kept) <= 9.5 / block


def test_feedback_brings_what_is_lost(target: Target) -> None:
    """The mean of what is sent of one vector comes to it, elements far below the magnitudes and zeros included."""
    n, steps = (64, 5) if EMULATED else (256, 400)
    x = make("heavy", n, 1.0, 1)
    x[:5] = 0.0
    given, residual = torch.from_numpy(x).to(target.device), torch.zeros(n, device=target.device)
    codec, sent = TwoMagnitudes(64), torch.zeros(n, device=target.device)
    for _ in range(steps):
        sent += codec.decode(codec.encode_feedback(given, residual), torch.empty_like(given))
    assert torch.allclose(sent + residual, steps * given, rtol=1e-3, atol=1e-3)
    assert float((sent / steps - given).norm()) <= (20 / steps) * float(given.norm())


def test_steps_of_a_block_fit_their_sum() -> None:
    for block in (2**i for i in range(5, 13)):
        rule = two_magnitudes(block)
        assert block * (4 * rule.levels - 1) < 2**30
        # What `nearest_integer` rounds.
        assert 4 * rule.levels <= 2**22


def test_splits_do_not_go_with_sums() -> None:
    with pytest.raises(
        ValueError, match="splits of quantizer 'both' must be 0 or more, and 0 with sums, got 5 with 1 sums"
    ):
        dataclasses.replace(two_magnitudes(256), name="both", sums=1)
