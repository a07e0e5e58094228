"""Clipping within a fused step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_
from torch.optim import Optimizer

from bagua_kernels.optim import SGD, Extras
from tests.grids import grid
from tests.optim.step.training import DIGIT, KINDS, all_of, copied, every_kind, make, parameters, params_of


class TestClipping:
    def pair(self, kind: str, params: list[nn.Parameter], **options: Any) -> tuple[Optimizer, Optimizer]:
        found, own = KINDS[kind]
        other = getattr(torch.optim, found.__name__)(copied(params), **{**own, **options, "foreach": False})
        return make(kind, params, **options), other

    def give(self, optimizer: Optimizer, step: int, factor: float = 1.0) -> None:
        for i, p in enumerate(params_of(optimizer)):
            generator = torch.Generator().manual_seed(100 * step + i)
            dtype = p.dtype if p.is_complex() else torch.float32
            p.grad = (torch.randn(p.shape, generator=generator, dtype=dtype) * factor).to(p.dtype)

    @every_kind
    @grid(cover=1, max_norm=[0.1, 1.0, 1e6])
    def test_is_torchs(self, kind: str, max_norm: float) -> None:
        pair = self.pair(kind, parameters(torch.float32), lr=0.05)
        for step in range(1, 5):
            for optimizer in pair:
                self.give(optimizer, step)
            norm = pair[0].clip_grad_norm_(max_norm)
            wanted = torchs_clip_grad_norm_(params_of(pair[1]), max_norm)
            assert norm.shape == ()
            torch.testing.assert_close(norm.float(), wanted, rtol=1e-6, atol=0)
            for optimizer in pair:
                optimizer.step()
        torch.testing.assert_close(params_of(pair[0]), params_of(pair[1]), rtol=2e-5, atol=1e-6)

    def test_several_dtypes_and_complex(self) -> None:
        dtypes = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        params = []
        for n, dtype in enumerate(dtypes):
            drawn = torch.complex64 if dtype.is_complex else torch.float32
            params.append(nn.Parameter(torch.randn(3, 50 + n, generator=generator, dtype=drawn).to(dtype)))
        before = [p.detach().to(torch.complex128, copy=True).numpy() for p in params]
        optimizer = SGD(params, lr=0.5)
        self.give(optimizer, 1)
        gradients = [p.grad.to(torch.complex128).numpy() for p in params]
        norm = np.sqrt(sum((np.abs(g) ** 2).sum() for g in gradients))
        np.testing.assert_allclose(optimizer.clip_grad_norm_(2.0).item(), norm, rtol=1e-7)
        optimizer.step()
        for p, start, g in zip(params, before, gradients, strict=True):
            rounding = 2.0**-8 if p.dtype == torch.bfloat16 else 1e-6
            got = p.detach().to(torch.complex128).numpy()
            np.testing.assert_allclose(got, start - 0.5 * (2 / (norm + 1e-6)) * g, rtol=rounding, atol=rounding)

    def test_lasts_one_step_and_leaves_gradients_as_they_are(self) -> None:
        p = nn.Parameter(torch.zeros(4))
        optimizer = SGD([p], lr=1.0)
        p.grad = torch.full((4,), 2.0)
        assert optimizer.clip_grad_norm_(1.0) == 4
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full((4,), -0.5))
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full((4,), -2.5))
        assert p.grad.tolist() == [2.0] * 4

    def test_the_last_call_counts(self) -> None:
        p = nn.Parameter(torch.zeros(4))
        optimizer = SGD([p], lr=1.0)
        p.grad = torch.full((4,), 2.0)
        optimizer.clip_grad_norm_(0.01)
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        assert p.tolist() == [-2.0] * 4

    def test_is_of_all_groups_and_of_parameters_with_a_gradient(self) -> None:
        params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
        optimizer = SGD([{"params": params[:1]}, {"params": params[1:], "lr": 2.0}], lr=1.0)
        params[0].grad, params[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
        assert optimizer.clip_grad_norm_(1.0) == 5
        optimizer.step()
        np.testing.assert_allclose([p.item() for p in params], [-0.6, -1.6, 0.0], rtol=1e-6)

    @every_kind
    def test_no_gradients_at_all(self, kind: str) -> None:
        optimizer = make(kind, parameters())
        norm = optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert norm == 0
        assert norm.dtype == torch.float64
        optimizer.step()
        assert np.array_equal(all_of(params_of(optimizer)), all_of(parameters()))

    def test_strided_and_sparse_gradients(self) -> None:
        strided, sparse = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(5, 2))
        strided.grad = torch.ones(8, 6)[::2]
        sparse.grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 1, 3]]), torch.ones(3, 2), (5, 2), check_invariants=True
        )
        optimizer = SGD([strided, sparse], lr=1.0)
        # 24 ones; two twos and two ones.
        np.testing.assert_allclose(optimizer.clip_grad_norm_(1.0).item(), np.sqrt(24 + 8 + 2), rtol=1e-7)

    @grid(cover=1, bad=[float("inf"), float("-inf"), float("nan")], kind=["adamw", "sgd"])
    def test_norms_that_are_not_finite(self, kind: str, bad: float) -> None:
        pair = self.pair(kind, parameters(torch.float32))
        for optimizer in pair:
            self.give(optimizer, 1)
            params_of(optimizer)[1].grad[7] = bad
        norm = pair[0].clip_grad_norm_(1.0)
        wanted = torchs_clip_grad_norm_(params_of(pair[1]), 1.0)
        assert norm.isnan() == wanted.isnan()
        assert norm.isinf() == wanted.isinf()
        for optimizer in pair:
            optimizer.step()
        for p, q in zip(*map(params_of, pair), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, equal_nan=True)
        # The next step is not concerned.
        good = make(kind, parameters(torch.float32))
        self.give(good, 1)
        good.clip_grad_norm_(1.0)
        good.step()
        assert all(p.isfinite().all() for p in params_of(good))

    @grid(cover=1, bad=[float("inf"), float("nan")])
    def test_errors_for_norms_that_are_not_finite(self, bad: float) -> None:
        p = nn.Parameter(torch.zeros(4))
        optimizer = SGD([p], lr=1.0)
        p.grad = torch.tensor([1.0, 1.0, bad, 1.0])
        with pytest.raises(RuntimeError, match=r"total norm of the gradients is (inf|nan).*error_if_nonfinite=False"):
            optimizer.clip_grad_norm_(0.1, error_if_nonfinite=True)
        p.grad = torch.ones(4)
        optimizer.step()
        assert p.tolist() == [-1.0] * 4

    def test_large_and_small_gradients(self) -> None:
        """Squares are added in float64, but the terms are float32: what neither overflows nor vanishes is exact."""
        p = nn.Parameter(torch.zeros(1000))
        optimizer = SGD([p], lr=1.0)
        for value in (1e-15, 1e15):
            p.grad = torch.full((1000,), value)
            np.testing.assert_allclose(optimizer.clip_grad_norm_(1.0).item(), value * np.sqrt(1000), rtol=1e-6)

    @pytest.mark.parametrize("unscale", [False, True])
    def test_with_a_gradient_scaler(self, unscale: bool) -> None:
        """Without `unscale_` the norm is of scaled gradients, as it is in PyTorch."""
        p = nn.Parameter(torch.zeros(4))
        optimizer = SGD([p], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(p.sum() * 2).backward()
        if unscale:
            scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1.0)
        assert norm == (4.0 if unscale else 32.0)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(p.detach(), torch.full((4,), -0.5 if unscale else -0.5 / 8))

    @pytest.mark.parametrize("extras", [Extras(precision="master"), Extras(precision="kahan", average=0.5)])
    def test_with_extras(self, extras: Extras) -> None:
        clipped, scaled = (make("adamw", parameters(), extras, eps=1e-3) for _ in range(2))
        for step in range(1, 5):
            # Powers of two, so that scaling gradients rounds nothing.
            for optimizer, factor in ((clipped, 8.0), (scaled, 1.0)):
                self.give(optimizer, step, factor)
            norm = clipped.clip_grad_norm_(1e30)
            clipped.clip_grad_norm_(norm.item() / 8)
            for optimizer in (clipped, scaled):
                optimizer.step()
        for p, q in zip(params_of(clipped), params_of(scaled), strict=True):
            # The factor has 1e-6 in it.
            torch.testing.assert_close(p, q, rtol=0, atol=2 * DIGIT)
            for name in {"master", "average"} & set(clipped.state[p]):
                torch.testing.assert_close(clipped.state[p][name], scaled.state[q][name], rtol=0, atol=1e-4)

    def test_where_torch_takes_the_step(self) -> None:
        dense, sparse = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3, 2))
        optimizer = SGD([dense, sparse], lr=1.0)
        dense.grad = torch.full((4,), 2.0)
        sparse.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.zeros(1, 2), (3, 2), check_invariants=True)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        torch.testing.assert_close(dense.detach(), torch.full((4,), -0.5))


class TestFallback:
    @grid(cover=1, extras=[Extras(average=0.5), Extras(precision="master"), Extras(seed=1)])
    def test_steps_that_are_left_to_torch_are_refused_with_extras(self, extras: Extras) -> None:
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3).to_sparse()
        with pytest.raises(RuntimeError, match=r"SGD cannot take this step with Extras\(.*sparse"):
            SGD([p], lr=0.1, extras=extras).step()
        assert p.tolist() == [1] * 3
