"""Parameters of half precision: digits kept by stochastic rounding, master copies and Kahan sums; and running means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagua_kernels.optim import SGD, Extras
from bagua_kernels.optim.step.extras import Precision
from tests.grids import grid, only
from tests.optim.step.training import (
    DIGIT,
    all_of,
    copied,
    every_kind,
    make,
    parameters,
    params_of,
    through_a_file,
    train,
)

KEEPING: tuple[Precision, ...] = ("stochastic", "master", "kahan")


class TestPrecision:
    @every_kind
    def test_nearest_loses_small_updates_and_the_others_do_not(self, kind: str) -> None:
        steps = range(1, 33)
        exact = make(kind, parameters(torch.float32))
        train(exact, steps)
        start, wanted = all_of(parameters()), all_of(params_of(exact))
        assert np.all(start - wanted > DIGIT)
        errors = {}
        for precision in ("nearest", *KEEPING):
            optimizer = make(kind, parameters(), Extras(precision=precision))
            train(optimizer, steps)
            ends = all_of(params_of(optimizer))
            assert all(p.dtype == torch.bfloat16 for p in params_of(optimizer))
            errors[precision] = ends - wanted
        # Nothing has moved.
        assert np.array_equal(errors["nearest"] + wanted, start)
        # The master's parameter is a rounding away, and Kahan's differs by what rounding its sum, of 16 bits, has cost.
        assert np.abs(errors["master"]).max() <= DIGIT
        assert np.abs(errors["kahan"]).max() <= DIGIT
        # Each step may err by a digit, but the mean over 1301 elements hardly does.
        assert np.abs(errors["stochastic"]).max() <= 8 * DIGIT
        assert np.abs(errors["stochastic"].mean()) <= DIGIT / 4

    @every_kind
    def test_master_is_the_parameter_before_rounding(self, kind: str) -> None:
        optimizer, exact = make(kind, parameters(), Extras(precision="master")), make(kind, parameters(torch.float32))
        for step in range(1, 9):
            for each in (optimizer, exact):
                train(each, range(step, step + 1))
            for p, q in zip(params_of(optimizer), params_of(exact), strict=True):
                master = optimizer.state[p]["master"]
                assert master.dtype == torch.float32
                assert master.shape == p.shape
                assert torch.equal(p.detach(), master.bfloat16())
                if kind == "sgd":
                    assert torch.equal(master, q.detach())
                else:
                    # The states are bfloat16, and so a little off.
                    torch.testing.assert_close(master, q.detach(), rtol=0, atol=DIGIT / 8)

    def test_kahan_keeps_what_rounding_has_lost(self) -> None:
        optimizer, exact = make("sgd", parameters(), Extras(precision="kahan")), make("sgd", parameters(torch.float32))
        for step in range(1, 17):
            for each in (optimizer, exact):
                train(each, range(step, step + 1))
            for p, q in zip(params_of(optimizer), params_of(exact), strict=True):
                compensation = optimizer.state[p]["compensation"]
                assert compensation.dtype == torch.bfloat16
                assert compensation.shape == p.shape
                assert compensation.abs().max() <= DIGIT / 2
                whole = p.detach().double() + compensation.double()
                torch.testing.assert_close(whole, q.detach().double(), rtol=0, atol=DIGIT / 64)

    @grid(cover=1, precision=["master", "kahan"])
    def test_float16(self, precision: Precision) -> None:
        ends = {}
        for each in ("nearest", precision):
            p = nn.Parameter(torch.ones(5, dtype=torch.float16))
            # An eighth of the distance to the next number below 1.
            optimizer = SGD([p], lr=2.0**-14, extras=Extras(precision=each))
            for _ in range(8):
                p.grad = torch.ones_like(p)
                optimizer.step()
            ends[each] = p.tolist()
        assert ends == {"nearest": [1.0] * 5, precision: [1 - 2.0**-11] * 5}

    def test_float16_at_random_is_refused(self) -> None:
        p = nn.Parameter(torch.ones(5, dtype=torch.float16))
        p.grad = torch.ones_like(p)
        with pytest.raises(TypeError, match=r"stochastic rounding is for bfloat16 parameters, got torch\.float16"):
            SGD([p], lr=0.1, extras=Extras(precision="stochastic")).step()
        assert p.tolist() == [1] * 5

    @grid(
        cover=1,
        precision=KEEPING,
        kind__dtype=[("adamw", torch.float32), ("sgd_momentum", torch.float32), ("sgd", torch.float64)],
    )
    def test_other_dtypes_are_left_alone(self, kind: str, dtype: torch.dtype, precision: Precision) -> None:
        ours = make(kind, parameters(dtype), Extras(precision=precision))
        plain = make(kind, parameters(dtype))
        for each in (ours, plain):
            train(each, range(1, 4))
        for p, q in zip(params_of(ours), params_of(plain), strict=True):
            assert torch.equal(p, q)
            assert set(ours.state[p]) == set(plain.state[q])

    @grid(cover=1, precision=KEEPING)
    def test_dtypes_side_by_side(self, precision: Precision) -> None:
        params = [parameters(torch.float32)[0], *parameters()]
        mixed = make("sgd", params, Extras(precision=precision))
        alone = [make("sgd", [p], Extras(precision=precision)) for p in copied(params)]
        names = {"master": {"master"}, "kahan": {"compensation"}, "stochastic": set()}[precision]
        for p in params:
            p.grad = torch.ones_like(p)
        for one in alone:
            params_of(one)[0].grad = torch.ones_like(params_of(one)[0])
            one.step()
        mixed.step()
        assert not names & set(mixed.state[params[0]])
        assert all(names <= set(mixed.state[p]) for p in params[1:])
        if precision != "stochastic":
            assert all(torch.equal(p, params_of(one)[0]) for p, one in zip(params, alone, strict=True))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"precision": "exact"}, "precision must be one of nearest, stochastic, master, kahan, got 'exact'"),
            ({"average": 1.0}, r"average must be None or a decay in \[0, 1\), got 1.0"),
            ({"average": -0.1}, "average must be None"),
            ({"average": float("nan")}, "average of .* must be a finite number"),
        ],
    )
    def test_options_out_of_range(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Extras(**options)


class TestRandomness:
    """Of stochastic rounding."""

    def ends(self, seed: int, steps: range = range(1, 9), kind: str = "adamw") -> list[Tensor]:
        optimizer = make(kind, parameters(), Extras(precision="stochastic", seed=seed))
        train(optimizer, steps)
        return [p.detach() for p in params_of(optimizer)]

    def test_same_seed_gives_same_bits_and_another_gives_others(self) -> None:
        first, second, other = self.ends(1), self.ends(1), self.ends(2)
        assert all(map(torch.equal, first, second))
        assert not torch.equal(first[0], other[0])

    @pytest.mark.parametrize("seed", [-1, 2**32, 2**63, 2**64 - 1])
    def test_seeds_have_64_bits(self, seed: int) -> None:
        """As those of `torch.manual_seed`."""
        first, second, other = (self.ends(each, range(1, 3), "sgd") for each in (seed, seed, seed ^ 1))
        assert all(map(torch.equal, first, second))
        assert not torch.equal(first[0], other[0])

    def test_torchs_generator_is_not_used(self) -> None:
        before = torch.get_rng_state()
        first = self.ends(1)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(99)
        assert all(map(torch.equal, first, self.ends(1)))
        torch.set_rng_state(before)

    def test_replicas_stay_equal(self) -> None:
        replicas = [make("adamw", parameters(), Extras(precision="stochastic", seed=7)) for _ in range(2)]
        for step in range(1, 17):
            for replica in replicas:
                train(replica, range(step, step + 1))
            assert all(map(torch.equal, *map(params_of, replicas)))

    def test_neither_steps_nor_parameters_nor_elements_are_rounded_alike(self) -> None:
        """Equal updates of equal numbers, a quarter of a digit each."""
        n, steps = 4096, 8
        params = [nn.Parameter(torch.full((n,), 0.75, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = SGD(params, lr=DIGIT / 4, extras=Extras(precision="stochastic"))
        moved = []
        for _ in range(steps):
            before = [p.detach().clone() for p in params]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            moved += [(b != p).numpy() for b, p in zip(before, params, strict=True)]
        for one in moved:
            assert abs(one.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
        for i, one in enumerate(moved):
            for other in moved[:i]:
                assert abs((one & other).mean() - 1 / 16) < 5 * np.sqrt(1 / 16 * 15 / 16 / n)
            for shift in (1, 2, 8):
                assert abs((one[shift:] & one[:-shift]).mean() - 1 / 16) < 5 * np.sqrt(1 / 16 * 15 / 16 / n)

    @pytest.mark.parametrize("steps", [4, 299])
    def test_training_that_is_interrupted_goes_on_with_the_same_bits(self, steps: int) -> None:
        """Also after more steps than a bfloat16 can count."""
        extras = Extras(precision="stochastic", seed=3)
        optimizer = make("sgd", parameters()[1:], extras)
        train(optimizer, range(steps))
        restored = make("sgd", copied(params_of(optimizer)), extras)
        restored.load_state_dict(through_a_file(optimizer.state_dict()))
        for each in (optimizer, restored):
            train(each, range(steps, steps + 4))
        assert all(map(torch.equal, params_of(optimizer), params_of(restored)))


class TestAverage:
    @grid(
        cover=1,
        kind__dtype=only(
            [
                ("adamw", torch.float32),
                ("adamw", torch.bfloat16),
                ("sgd", torch.float32),
                ("sgd", torch.float64),
                ("sgd_momentum", torch.bfloat16),
            ],
            *(("adamw", torch.float32), ("sgd", torch.float64), ("sgd_momentum", torch.bfloat16)),
        ),
    )
    def test_is_the_running_mean(self, kind: str, dtype: torch.dtype) -> None:
        decay = 0.875
        optimizer, plain = (make(kind, parameters(dtype), extras) for extras in (Extras(average=decay), None))
        means = [p.detach().double().numpy().copy() for p in params_of(optimizer)]
        for step in range(1, 9):
            for each in (optimizer, plain):
                train(each, range(step, step + 1))
            for i, (p, q) in enumerate(zip(params_of(optimizer), params_of(plain), strict=True)):
                assert torch.equal(p, q)
                means[i] = decay * means[i] + (1 - decay) * p.detach().double().numpy()
                average = optimizer.state[p]["average"]
                assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert average.shape == p.shape
                # The mean is of what the parameter was before it was rounded, at most half a digit away.
                atol = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: DIGIT / 2}[dtype]
                np.testing.assert_allclose(average.double().numpy(), means[i], rtol=0, atol=atol)

    @pytest.mark.parametrize("precision", only(["master", "kahan"], "kahan"))
    def test_is_of_all_digits(self, precision: Precision) -> None:
        decay = 0.875
        optimizer = make("sgd", parameters(), Extras(precision=precision, average=decay))
        exact = make("sgd", parameters(torch.float32), Extras(average=decay))
        for each in (optimizer, exact):
            train(each, range(1, 17))
        for p, q in zip(params_of(optimizer), params_of(exact), strict=True):
            got, wanted = optimizer.state[p]["average"], exact.state[q]["average"]
            torch.testing.assert_close(got, wanted, rtol=0, atol=DIGIT / 64)

    def test_starts_from_the_parameter_of_the_first_step(self) -> None:
        p = nn.Parameter(torch.ones(3))
        optimizer = SGD([p], lr=1.0, extras=Extras(average=0.5))
        with torch.no_grad():
            p.fill_(4.0)
        p.grad = torch.full((3,), 2.0)
        optimizer.step()
        assert optimizer.state[p]["average"].tolist() == [3.0] * 3

    def test_a_decay_of_zero_is_the_parameter(self) -> None:
        optimizer = make("adamw", parameters(torch.float32), Extras(average=0.0))
        train(optimizer, range(1, 4))
        for p in params_of(optimizer):
            torch.testing.assert_close(optimizer.state[p]["average"], p.detach(), rtol=1e-6, atol=0)

    def test_lies_as_the_parameter_does(self) -> None:
        p = nn.Parameter(torch.ones(4, 6).t())
        optimizer = SGD([p], lr=1.0, extras=Extras(average=0.5))
        p.grad = torch.arange(24.0).reshape(6, 4)
        optimizer.step()
        assert optimizer.state[p]["average"].stride() == p.stride()
        assert torch.equal(optimizer.state[p]["average"], 1 - p.grad / 2)

    def test_complex_parameters_are_refused(self) -> None:
        p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        p.grad = torch.ones_like(p)
        with pytest.raises(TypeError, match=r"of real parameters only, got torch\.complex64"):
            SGD([p], lr=0.1, extras=Extras(average=0.5)).step()

    def test_a_step_that_a_scaler_skips_does_not_count(self) -> None:
        p = nn.Parameter(torch.ones(3))
        optimizer = SGD([p], lr=0.5, extras=Extras(average=0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value, wanted in ((4.0, 0.75), (float("inf"), 0.75), (2.0, 0.375)):
            # The scale is halved by the second step.
            scaler.scale(p.sum())
            p.grad = torch.full((3,), value)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.state[p]["average"].tolist() == [wanted] * 3
        assert p.tolist() == [0.0] * 3
