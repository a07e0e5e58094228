"""What a fused step does beside the update: digits that half precision loses, running means, clipping."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_
from torch.optim import Optimizer

from bagua_kernels import optim
from bagua_kernels.optim import SGD, AdamW, Extras
from bagua_kernels.optim.step.extras import Precision

F64 = npt.NDArray[np.float64]

# Steps of which each is less than half of the last digit of a bfloat16 between 1/2 and 1, 2^-8.
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 2.0**-11, "weight_decay": 0.01}),
    "sgd": (SGD, {"lr": 2.0**-11}),
    "sgd_momentum": (SGD, {"lr": 2.0**-13, "momentum": 0.75, "weight_decay": 0.01}),
}
KEEPING: tuple[Precision, ...] = ("stochastic", "master", "kahan")
SHAPES = [(40, 25), (300,), ()]
DIGIT = 2.0**-8

IN_TORCH = [
    name for name in sorted(optim.__all__) if hasattr(torch.optim, name) and issubclass(getattr(optim, name), Optimizer)
]
OTHERS = ["Lion", "LAMB", "LARS"]

every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, params: Any, extras: Extras | None = None, **options: Any) -> Optimizer:
    found, own = KINDS[kind]
    return found(params, **{**own, **options}, extras=extras)


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Multiples of 1/64, beginning near 1."""
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter((1 - torch.randint(1, 8, shape, generator=generator) / 64).to(dtype)) for shape in SHAPES]


def copied(params: Any) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer: Optimizer, steps: range) -> None:
    """With gradients between 1/2 and 3/2 that are a function of step and parameter."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params_of(optimizer):
            p.grad = (torch.randint(64, 193, p.shape, generator=generator) / 128).to(p.dtype)
        optimizer.step()


def all_of(params: Any) -> F64:
    return torch.cat([p.detach().double().reshape(-1) for p in params]).numpy()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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

    @pytest.mark.parametrize("precision", ["master", "kahan"])
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

    @pytest.mark.parametrize("precision", KEEPING)
    @pytest.mark.parametrize(
        ("kind", "dtype"), [("adamw", torch.float32), ("sgd_momentum", torch.float32), ("sgd", torch.float64)], ids=str
    )
    def test_other_dtypes_are_left_alone(self, kind: str, dtype: torch.dtype, precision: Precision) -> None:
        ours = make(kind, parameters(dtype), Extras(precision=precision))
        plain = make(kind, parameters(dtype))
        for each in (ours, plain):
            train(each, range(1, 4))
        for p, q in zip(params_of(ours), params_of(plain), strict=True):
            assert torch.equal(p, q)
            assert set(ours.state[p]) == set(plain.state[q])

    @pytest.mark.parametrize("precision", KEEPING)
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
            ({"average": float("nan")}, "average must be None"),
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
    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            ("adamw", torch.float32),
            ("adamw", torch.bfloat16),
            ("sgd", torch.float32),
            ("sgd", torch.float64),
            ("sgd_momentum", torch.bfloat16),
        ],
        ids=str,
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

    @pytest.mark.parametrize("precision", ["master", "kahan"])
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


class TestCheckpoints:
    CASES: tuple[tuple[str, Extras], ...] = (
        ("adamw", Extras(precision="master", average=0.9)),
        ("sgd", Extras(precision="master")),
        ("sgd_momentum", Extras(precision="kahan", average=0.5)),
        ("adamw", Extras(precision="stochastic", average=0.5, seed=5)),
    )

    @staticmethod
    def same(one: Optimizer, other: Optimizer) -> bool:
        return all(
            torch.equal(p, q)
            and set(one.state[p]) == set(other.state[q])
            and all(
                torch.equal(value, other.state[q][name]) and value.dtype == other.state[q][name].dtype
                for name, value in one.state[p].items()
            )
            for p, q in zip(params_of(one), params_of(other), strict=True)
        )

    @pytest.mark.parametrize(("kind", "extras"), CASES, ids=lambda value: getattr(value, "precision", value))
    def test_through_a_file(self, kind: str, extras: Extras) -> None:
        optimizer = make(kind, parameters(), extras)
        train(optimizer, range(1, 5))
        restored = make(kind, copied(params_of(optimizer)), extras, lr=1.0)
        saved = through_a_file(optimizer.state_dict())
        restored.load_state_dict(saved)
        for p, kept in zip(params_of(restored), saved["state"].values(), strict=True):
            for name in {"master", "average"} & set(kept):
                assert restored.state[p][name].dtype == torch.float32
                assert torch.equal(restored.state[p][name], kept[name])
                # What was loaded is not written to.
                assert restored.state[p][name].data_ptr() != kept[name].data_ptr()
        assert self.same(optimizer, restored)
        for each in (optimizer, restored):
            train(each, range(5, 9))
        assert self.same(optimizer, restored)

    @pytest.mark.parametrize(("kind", "extras"), CASES, ids=lambda value: getattr(value, "precision", value))
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
    )
    def test_copies(self, kind: str, extras: Extras, duplicate: Any) -> None:
        optimizer = make(kind, parameters(), extras)
        train(optimizer, range(1, 5))
        other = duplicate(optimizer)
        assert self.same(optimizer, other)
        train(optimizer, range(5, 9))
        assert not self.same(optimizer, other)
        train(other, range(5, 9))
        assert self.same(optimizer, other)

    def test_double_means_stay_double(self) -> None:
        optimizer = make("sgd", parameters(torch.float64), Extras(average=0.9))
        train(optimizer, range(1, 3))
        restored = make("sgd", copied(params_of(optimizer)), Extras(average=0.9))
        restored.load_state_dict(through_a_file(optimizer.state_dict()))
        assert all(restored.state[p]["average"].dtype == torch.float64 for p in params_of(restored))
        assert self.same(optimizer, restored)

    @pytest.mark.parametrize("stepped", [False, True])
    @pytest.mark.parametrize("kind", ["adamw", "sgd_momentum"])
    def test_without_extras_they_start_from_the_parameters(self, kind: str, stepped: bool) -> None:
        found, options = KINDS[kind]
        theirs = getattr(torch.optim, found.__name__)(parameters(), **options)
        train(theirs, range(1, 5))
        ours = make(kind, copied(params_of(theirs)), Extras(precision="master", average=0.5))
        if stepped:
            # Extras of a history that the checkpoint replaces.
            train(ours, range(20, 24))
            with torch.no_grad():
                for p, q in zip(params_of(ours), params_of(theirs), strict=True):
                    p.copy_(q)
        ours.load_state_dict(through_a_file(theirs.state_dict()))
        starts = [p.detach().float() for p in params_of(ours)]
        train(ours, range(5, 6))
        for p, start in zip(params_of(ours), starts, strict=True):
            state = ours.state[p]
            assert state["master"].dtype == state["average"].dtype == torch.float32
            assert 0 < (start - state["master"]).abs().max() <= DIGIT
            torch.testing.assert_close(state["average"], (start + state["master"]) / 2, rtol=0, atol=1e-6)
        if kind == "adamw":
            assert all(ours.state[p]["step"] == 5 for p in params_of(ours))

    def test_torch_loads_a_checkpoint_with_extras(self) -> None:
        ours = make("adamw", parameters(), Extras(precision="master", average=0.5))
        train(ours, range(1, 4))
        theirs = torch.optim.AdamW(copied(params_of(ours)), lr=1e-3)
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        train(theirs, range(4, 6))
        assert all(theirs.state[p]["step"] == 5 for p in params_of(theirs))

    def test_a_checkpoint_from_before_the_first_step(self) -> None:
        optimizer = make("adamw", parameters(), Extras(precision="master"))
        optimizer.load_state_dict(through_a_file(make("adamw", parameters()).state_dict()))
        train(optimizer, range(1, 2))
        assert all("master" in optimizer.state[p] for p in params_of(optimizer))


class TestSignatures:
    @pytest.mark.parametrize("name", OTHERS)
    def test_own_optimizers_have_it_too(self, name: str) -> None:
        assert inspect.signature(getattr(optim, name)).parameters["extras"].kind is inspect.Parameter.KEYWORD_ONLY

    def test_a_subclass_has_that_of_its_own_constructor(self) -> None:
        class Halved(AdamW):
            def __init__(self, params: Any, rate: float) -> None:
                super().__init__(params, lr=rate / 2)

        assert list(inspect.signature(Halved).parameters) == ["params", "rate"]

    @pytest.mark.parametrize("name", [*OTHERS, *(["Muon"] if "Muon" in IN_TORCH else [])])
    def test_optimizers_of_several_passes_keep_digits_and_a_mean(self, name: str) -> None:
        p = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
        optimizer = getattr(optim, name)([p], lr=1e-3, extras=Extras(precision="master", average=0.5))
        for _ in range(2):
            p.grad = torch.arange(1.0, 25).reshape(4, 6).bfloat16()
            optimizer.step()
        state = optimizer.state[p]
        assert (state["master"] != 1).any()
        assert torch.equal(p.detach(), state["master"].bfloat16())
        # Between where it began and where it is.
        assert ((state["average"] - 1).abs() <= (state["master"] - 1).abs().max() + 1e-6).all()


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
    @pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
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

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("kind", ["adamw", "sgd"])
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

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
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
    @pytest.mark.parametrize("extras", [Extras(average=0.5), Extras(precision="master"), Extras(seed=1)])
    def test_steps_that_are_left_to_torch_are_refused_with_extras(self, extras: Extras) -> None:
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3).to_sparse()
        with pytest.raises(RuntimeError, match=r"SGD cannot take this step with Extras\(.*sparse"):
            SGD([p], lr=0.1, extras=extras).step()
        assert p.tolist() == [1] * 3
