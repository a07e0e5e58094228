"""Optimizers against `torch.optim` bit by bit, and against the equations in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels import optim
from tests.grids import grid, one_of_each
from tests.optim.cases import CASES, SLACK, TORCH_CASES, Case
from tests.oracles import optimizers as oracle

SHAPES = ((1,), (3,), (1000,), (5000,), (17, 31), (2, 3, 5, 7))
# All lengths but the first fill a vector register in 16 bits.
COARSE_SHAPES = ((7,), (64,), (1001,), (9, 8))

# By the number of the parameter, and "parameter" or the name of the state.
Tensors = dict[tuple[int, str], torch.Tensor]

# Distances are counted in units in the last place. The square of a quotient of two roots amplifies their bits.
NEAR = {"acc_delta": 8.0 * SLACK}
# After many steps an element may be further away: momentum adds up one bit of a root, weight decay takes it round a loop.
FURTHER, SHARE_FURTHER = 16.0, 1 / 500

# Each optimizer, each set of arguments of some optimizer, and for each what adds a term to it; the equations, below, are
# followed in all cases.
SAMPLE = one_of_each(
    TORCH_CASES,
    lambda case: case.optimizer,
    lambda case: case.name,
    lambda case: (case.optimizer, "weight_decay" in case.arguments, "amsgrad" in case.arguments),
    cover=1,
)
by_name = grid(cover=1, case=SAMPLE)


class Run:
    """An optimizer and its parameters, in two groups of which the second learns at half the rate."""

    def __init__(self, library: Any, case: Case, values: Sequence[torch.Tensor], **arguments: Any) -> None:
        options = case.options()
        self.parameters = [torch.nn.Parameter(value.clone()) for value in values]
        self.groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": options["lr"] * 0.5}]
        self.optimizer = getattr(library, case.optimizer)(self.groups, **options, **arguments)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def load_from(self, other: Run) -> None:
        for parameter, theirs in zip(self.parameters, other.parameters, strict=True):
            parameter.data.copy_(theirs.data)
        state = copy.deepcopy(other.optimizer.state_dict()["state"])
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def copy_from(self, other: Run) -> None:
        """As `load_from`, but without the casts: torch's `load_state_dict` gives all states the parameter's dtype."""
        for parameter, theirs in zip(self.parameters, other.parameters, strict=True):
            parameter.data.copy_(theirs.data)
            state = other.optimizer.state.get(theirs, {})
            self.optimizer.state[parameter] = {name: copy.deepcopy(value) for name, value in state.items()}

    def tensors(self) -> Tensors:
        """Returns copies of the parameters and of every state."""
        found: Tensors = {}
        for i, parameter in enumerate(self.parameters):
            found[i, "parameter"] = parameter.detach().clone()
            state = self.optimizer.state.get(parameter, {})
            found |= {(i, name): value.clone() for name, value in state.items() if value is not None}
        return found


class Magnitudes:
    """The largest magnitude that every element has had."""

    def __init__(self, tensors: Tensors) -> None:
        self.largest: Tensors = {}
        self.update(tensors)

    def update(self, tensors: Tensors) -> None:
        for key, value in tensors.items():
            before = self.largest.get(key)
            self.largest[key] = value.abs() if before is None else torch.maximum(before, value.abs())

    def spacing(self, key: tuple[int, str]) -> torch.Tensor:
        """Returns the distance of neighbouring floats there: a parameter that crosses zero has no finer unit."""
        return torch.from_numpy(np.asarray(np.spacing(self.largest[key].numpy())))


def assert_within(
    actual: Tensors,
    expected: Tensors,
    magnitudes: Magnitudes,
    rounded: Collection[str],
    units: float,
    share_further: float = 0.0,
) -> None:
    """Asserts a distance of a few units in the last place for what `rounded` names, and equal bits for the rest.

    Of the rounded, the given share of elements may be further away.
    """
    assert actual.keys() == expected.keys()
    distances: dict[str, list[torch.Tensor]] = {name: [] for _, name in expected}
    for key, theirs in expected.items():
        ours = actual[key]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), key
        distances[key[1]].append(((ours - theirs).abs() / magnitudes.spacing(key)).flatten())
    for name, parts in distances.items():
        distance = torch.cat(parts)
        near = max(units, NEAR.get(name, 0.0)) if name in rounded else 0.0
        further = int((~(distance <= near)).sum())  # counts NaN
        allowed = share_further * distance.numel() if name in rounded else 0
        summary = f"{name}: {further} of {distance.numel()} are more than {near} from torch's, one {distance.max()}"
        assert further <= allowed, summary
        assert not further or distance.max() <= FURTHER, summary


def random(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def random_gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns gradients whose size differs from element to element; one in fifty is zero."""
    gradients = []
    for gradient, scale in zip(random(SHAPES, seed, dtype), random(SHAPES, 1, dtype), strict=True):
        dense = gradient * torch.exp2(scale.clamp(-2, 2))
        gradients.append(torch.where(gradient.abs() * 100 % 1 < 0.02, 0.0, dense))
    return gradients


@pytest.mark.slow
@by_name
@grid(cover=1, steps=[20, pytest.param(100, marks=pytest.mark.beyond)])
def test_many_steps_end_where_torch_does(case: Case, steps: int) -> None:
    ours, theirs = Run(optim, case, random(SHAPES, 0)), Run(torch.optim, case, random(SHAPES, 0), foreach=False)
    magnitudes = Magnitudes(theirs.tensors())
    for step in range(steps):
        for run in (ours, theirs):
            run.step(random_gradients(100 + step))
        magnitudes.update(theirs.tensors())
    expected = theirs.tensors()
    # Weight decay carries a bit from the parameters to the states.
    names = () if case.exact else {name for _, name in expected}
    assert_within(ours.tensors(), expected, magnitudes, names, case.units, SHARE_FURTHER)


@by_name
def test_every_single_step_is_torchs(case: Case) -> None:
    ours, theirs = Run(optim, case, random(SHAPES, 0)), Run(torch.optim, case, random(SHAPES, 0), foreach=False)
    magnitudes = Magnitudes(theirs.tensors())
    for step in range(20):
        ours.load_from(theirs)
        for run in (ours, theirs):
            run.step(random_gradients(100 + step))
        expected = theirs.tensors()
        magnitudes.update(expected)
        assert_within(ours.tensors(), expected, magnitudes, case.rounded, case.units)


class OracleRun:
    """The equations, with the parameters in the same two groups."""

    def __init__(self, case: Case, values: Sequence[torch.Tensor]) -> None:
        self.parameters = [value.double().numpy() for value in values]
        self.states: list[oracle.State] = [{} for _ in values]
        options = {name: as_numbers(value) for name, value in case.options().items()}
        self.options = [{**options, "lr": options["lr"] * (0.5 if i % 2 else 1.0)} for i in range(len(values))]
        self.update = oracle.STEPS[case.optimizer]
        self.steps = 0

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        for i, gradient in enumerate(gradients):
            self.parameters[i] = self.update(
                self.parameters[i], gradient.double().numpy(), self.states[i], self.steps, **self.options[i]
            )

    def copy_from(self, other: Run) -> None:
        for i, parameter in enumerate(other.parameters):
            self.parameters[i] = parameter.detach().double().numpy()
            state = other.optimizer.state.get(parameter, {})
            self.states[i] = {name: value.double().numpy() for name, value in state.items() if name != "step"}

    def tensors(self) -> Tensors:
        found: Tensors = {}
        for i, (parameter, state) in enumerate(zip(self.parameters, self.states, strict=True)):
            values = {"parameter": parameter, **state}
            found |= {(i, name): torch.from_numpy(np.array(value)) for name, value in values.items()}
        return found


def as_numbers(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(as_numbers(part) for part in value)
    return value.item() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def scalars_of(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """torch keeps the scalars among the states in float64 only if that is the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


# torch itself is tested against the oracle too: that tests the oracle.
IN_LIBRARIES = one_of_each(
    [
        *(pytest.param(torch.optim, case, id=f"torch-{case}") for case in TORCH_CASES),
        *(pytest.param(optim, case, id=str(case)) for case in CASES),
    ],
    lambda given: (given.values[0] is torch.optim, given.values[1].optimizer),
)


@grid(library__case=IN_LIBRARIES, scalars_of=[torch.float32, torch.float64], indirect=["scalars_of"], cover=1)
def test_twenty_steps_follow_the_equations(library: Any, case: Case, scalars_of: torch.dtype) -> None:
    """To a few roundings a step, relative to the largest magnitude that the element has had."""
    steps, dtype = 20, scalars_of
    tolerance = 4 * steps * torch.finfo(dtype).eps
    values = random(SHAPES, 0, dtype)
    run, equations = Run(library, case, values), OracleRun(case, values)
    magnitudes = Magnitudes(equations.tensors())
    for step in range(steps):
        gradients = random_gradients(100 + step, dtype)
        run.step(gradients)
        equations.step(gradients)
        magnitudes.update(equations.tensors())
    actual = run.tensors()
    for key, expected in equations.tensors().items():
        error = (actual[key].double() - expected).abs() / magnitudes.largest[key].clamp(min=1e-300)
        assert float(error.max()) <= tolerance, f"{key}: {float(error.max()):.3g} > {tolerance:.3g}"


@grid(cover=1, case=[case for case in CASES if case.optimizer in ("LAMB", "LARS")])
def test_layers_without_a_norm_are_trusted(case: Case) -> None:
    """A parameter of zeros moves, a gradient of zeros is not divided by."""
    values = [torch.zeros(100), torch.ones(100), torch.zeros(100)]
    gradients = [torch.linspace(-1, 1, 100), torch.zeros(100), torch.zeros(100)]
    run, equations = Run(optim, case, values), OracleRun(case, values)
    run.step(gradients)
    equations.step(gradients)
    assert run.parameters[0].abs().sum() > 0
    for parameter, expected in zip(run.parameters, equations.parameters, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.from_numpy(expected).float())


def coarse_case(case: Case) -> Case:
    """Returns the case with a learning rate that moves the parameters by a tenth, so that a missed update is seen."""
    special = {"Adadelta": {"lr": 1.0, "eps": 1e-3}, "LARS": {"lr": 50.0}}.get(case.optimizer, {"lr": 0.05})
    return dataclasses.replace(case, arguments={**case.arguments, **special})


# A selection: each dtype of each rule is compiled. With --all, every optimizer.
COARSE_CASES = one_of_each(
    [
        coarse_case(case)
        for case in CASES
        if case.name
        in ("default", "plain", "momentum", "nesterov", "amsgrad", "centered_momentum", "averaging", "maximize")
    ],
    lambda case: case.name,
)


def coarse_data(case: Case, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns parameters and gradients without cancellation: parameters grow, gradients keep their sign.

    A small difference of large numbers has no correct digits in 16 bits, and torch rounds to them between its operations.
    """
    generator = torch.Generator().manual_seed(seed)
    values = [0.5 + torch.rand(shape, generator=generator) for shape in COARSE_SHAPES]
    signs = [torch.sign(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in COARSE_SHAPES]
    uphill = 1.0 if case.arguments.get("maximize") else -1.0
    parameters = [(sign * value).to(dtype) for sign, value in zip(signs, values, strict=True)]
    return parameters, [uphill * parameter for parameter in parameters]


@grid(case=COARSE_CASES, dtype=[torch.bfloat16, torch.float16], cover=1)
class TestSixteenBits:
    def test_every_single_step_is_the_equations_rounded(self, case: Case, dtype: torch.dtype) -> None:
        """By the tolerances that `torch.testing.assert_close` has for the dtype."""
        parameters, _ = coarse_data(case, dtype, 0)
        run, equations = Run(optim, case, parameters), OracleRun(case, parameters)
        for step in range(8):
            _, gradients = coarse_data(case, dtype, 100 + step)
            equations.copy_from(run)
            run.step(gradients)
            equations.step(gradients)
            actual = run.tensors()
            expected = {key: value.to(actual[key].dtype) for key, value in equations.tensors().items()}
            torch.testing.assert_close({key: actual[key] for key in expected}, expected)

    def test_every_single_step_is_that_of_torchs_loop(self, case: Case, dtype: torch.dtype) -> None:
        """The states more loosely: that loop rounds the gradient after the penalty is added, then squares it."""
        if not case.in_torch:
            pytest.skip("torch has no such class")
        parameters, _ = coarse_data(case, dtype, 0)
        ours, theirs = Run(optim, case, parameters), Run(torch.optim, case, parameters, foreach=False)
        for step in range(8):
            _, gradients = coarse_data(case, dtype, 100 + step)
            theirs.copy_from(ours)
            for run in (ours, theirs):
                run.step(gradients)
            actual, expected = ours.tensors(), theirs.tensors()
            assert actual.keys() == expected.keys()
            torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
            for mine, theirs_rounded in zip(ours.parameters, theirs.parameters, strict=True):
                torch.testing.assert_close(mine, theirs_rounded)

    def test_five_steps_follow_the_equations(self, case: Case, dtype: torch.dtype) -> None:
        steps = 5
        parameters, _ = coarse_data(case, dtype, 0)
        run, equations = Run(optim, case, parameters), OracleRun(case, parameters)
        for step in range(steps):
            _, gradients = coarse_data(case, dtype, 100 + step)
            run.step(gradients)
            equations.step(gradients)
        for parameter, expected in zip(run.parameters, equations.parameters, strict=True):
            error = np.abs(parameter.detach().double().numpy() - expected) / np.abs(expected)
            assert error.max() <= steps * torch.finfo(dtype).eps
