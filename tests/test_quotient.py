"""Quotients: correctly rounded, by tensors on every device but a CPU, and nowhere by the reciprocal of a number."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec, names
from bagua_kernels.optim import muon_with_adamw
from bagua_kernels.quotient import by_tensor, divide_, divided
from tests.grids import folded, only

ROOT = Path(__file__).parents[1]
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALVES)
DIVISORS = (3, 7, 0.3, -9.0, 257, 1e-5)
# Words for a division of a tensor, and where each of them is right.
WORDS = re.compile(r"^(div_?|true_divide_?|divide|mean|_foreach_div_?)$")
RIGHT = {
    "bagua_kernels/quotient.py": "what all others call",
    "bagua_kernels/warmup.py": "a loss on the CPU, whose value is not used",
    "bagua_kernels/launchers/chunks/__init__.py": "by a tensor",
    "bagua_kernels/compression/powersgd/orthonormal.py": "by a tensor",
    "algorithms/gossip/consensus_step.py": "a simulation on the CPU",
    "algorithms/gossip/mixing.py": "a statistic",
    "algorithms/exchanges/gathered.py": "a codec's method",
}


@folded(dtype=DTYPES, divisor=DIVISORS, function=[divided, by_tensor])
def test_elements_are_rounded_once(dtype: torch.dtype, divisor: float, function: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4099, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = np.float64 if dtype == torch.float64 else np.float32
    by = np.float64(wide(divisor))
    if dtype == torch.float64:
        expected = torch.from_numpy(x.numpy() / by)
    else:
        # A quotient of two float32 in float64, rounded to float32, is the one that is rounded once.
        expected = torch.from_numpy((x.double().numpy() / by).astype(np.float32)).to(dtype)
    assert torch.equal(function(x, divisor), expected)
    out = torch.empty_like(x)
    assert function(x, divisor, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(divide_(x, divisor), expected)


def test_results_of_autograd_are_divided_in_place() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert divide_(weight * 6.0, 3).tolist() == [2.0] * 3


class Divisors(TorchDispatchMode):
    """Keeps what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@folded(dtype=DTYPES, divisor=DIVISORS)
def test_other_devices_divide_by_a_tensor_of_theirs(dtype: torch.dtype, divisor: float) -> None:
    x = torch.empty(5, dtype=dtype, device="meta")
    with Divisors() as divisors:
        assert divided(x, divisor).dtype == dtype
    (by,) = divisors.found
    assert isinstance(by, torch.Tensor)
    assert by.shape == ()
    assert by.device == x.device


def test_powers_of_two_take_no_tensor() -> None:
    with Divisors() as divisors:
        divided(torch.empty(5, device="meta"), 4.0)
    assert divisors.found == [4.0]


def divisions() -> Iterator[tuple[str, int, str]]:
    """Calls in the three floors whose name is a word for a division."""
    for floor in ("bagua_kernels", "comm", "algorithms"):
        for path in sorted((ROOT / floor).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("bagua_kernels/comm/", "bagua_kernels/algorithms/", "bagua_kernels/rules/")):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                called = node.func if isinstance(node, ast.Call) else None
                word = called.attr if isinstance(called, ast.Attribute) else ""
                if WORDS.match(word):
                    yield name, node.lineno, word


def test_tensors_are_divided_in_one_place() -> None:
    wrong = [f"{name}:{line}: {word}" for name, line, word in divisions() if name not in RIGHT]
    assert not wrong, f"expected `bagua_kernels.quotient.divided`, which has the same bits on a GPU: {wrong}"
    assert set(RIGHT) == {name for name, _, _ in divisions()} & set(RIGHT)


class DividedByNumberError(AssertionError):
    """A tensor was divided by a Python number."""


@pytest.fixture
def only_quotients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a division of a tensor's elements by a number raise, but for powers of two; `divided` goes another way."""

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        def division(tensor: torch.Tensor, other: Any, **options: Any) -> Any:
            number = isinstance(other, (int, float)) and not isinstance(other, bool)
            caller = sys._getframe(1).f_globals["__name__"]
            if (
                caller != "bagua_kernels.quotient"
                and number
                and tensor.numel() > 1
                and math.frexp(other)[0] not in (0.5, -0.5)
            ):
                raise DividedByNumberError(f"a tensor of shape {tuple(tensor.shape)} was divided by {other}")
            return original(tensor, other, **options)

        return division

    for name in ("__truediv__", "__itruediv__", "div", "div_"):
        monkeypatch.setattr(torch.Tensor, name, checked(getattr(torch.Tensor, name)))


def test_the_fixture_sees_a_division(only_quotients: None) -> None:
    with pytest.raises(DividedByNumberError):
        torch.ones(3) / 3
    torch.ones(3) / torch.tensor(3.0)
    divided(torch.ones(3), 3)


@pytest.mark.parametrize(
    "name", only(sorted(names()), "allreduce", "dgc", "powersgd", "sgp", "decentralized", "wagma", "diloco", "qadam")
)
def test_algorithms_divide_by_no_number(only_quotients: None, name: str) -> None:
    def train(communicator: comm.Communicator) -> None:
        torch.manual_seed(communicator.rank)
        model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Linear(17, 3))
        given: torch.optim.Optimizer | None = torch.optim.SGD(model.parameters(), lr=0.01)
        if name == "mu_loco":
            given = muon_with_adamw(model)
        if name in ("qadam", "onebit_adam"):
            given = None
        wrapped: Any = from_spec(name, model, given, communicator=communicator)
        optimizer = given or wrapped.optimizer
        for _ in range(3):
            wrapped(torch.randn(4, 9)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped.algorithm_state_dict()
        wrapped.close()

    comm.run_ranks(3, train)
