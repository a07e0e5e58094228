"""What docs/optimizers.md says: its code runs, and its optimizer follows its equations on every backend."""

from __future__ import annotations

import copy
import importlib.util
import io
import math
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.optim import Extras
from tests.conftest import EMULATED, Target

F64 = npt.NDArray[np.float64]

FILE = Path(__file__).parents[2] / "docs" / "optimizers.md"
PAGE = FILE.read_text()
USING, EXTRAS, OWN = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHAPES = [(70,), (3, 4), ()] if EMULATED else [(5003,), (7, 11), ()]
DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-12, "weight_decay": 0.0}
STEPS = 4
# The oracle has no roundings; a step is as large as lr.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's optimizer in a file of its own."""
    file = tmp_path_factory.mktemp("page") / "adabelief.py"
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("adabelief_of_the_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def values(step: int, index: int, shape: tuple[int, ...]) -> F64:
    """The parameter's first values (step 0), or its gradient; exact in bfloat16."""
    numbers = np.random.default_rng([step, index]).standard_normal(shape)
    return torch.tensor(numbers).bfloat16().double().numpy()


def made(target: Target, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor(values(0, i, shape), dtype=dtype, device=target.device))
        for i, shape in enumerate(SHAPES)
    ]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        for i, p in enumerate(params):
            p.grad = torch.tensor(values(step, i, tuple(p.shape)), dtype=p.dtype, device=p.device)
        optimizer.step()


class Oracle:
    """AdaBelief with decoupled weight decay, in float64, for one parameter."""

    def __init__(self, index: int, **options: Any) -> None:
        self.index = index
        self.options = {**DEFAULTS, "maximize": False, **options}
        self.p = values(0, index, SHAPES[index])
        self.m = np.zeros_like(self.p)
        self.s = np.zeros_like(self.p)

    def train(self, steps: range, lrs: list[float] | None = None) -> Oracle:
        o = self.options
        beta1, beta2 = o["betas"]
        for number, t in enumerate(steps):
            lr = o["lr"] if lrs is None else lrs[number]
            g = values(t, self.index, SHAPES[self.index]) * (-1 if o["maximize"] else 1)
            self.m = beta1 * self.m + (1 - beta1) * g
            self.s = beta2 * self.s + (1 - beta2) * (g - self.m) ** 2 + o["eps"]
            corrected_m, corrected_s = self.m / (1 - beta1**t), self.s / (1 - beta2**t)
            self.p = self.p - lr * o["weight_decay"] * self.p - lr * corrected_m / (np.sqrt(corrected_s) + o["eps"])
        return self


def check(optimizer: torch.optim.Optimizer, oracles: list[Oracle], steps: int = STEPS) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, oracle in zip(params, oracles, strict=True):
        tolerance = TOLERANCES[p.dtype]
        state = optimizer.state[p]
        assert list(state) == ["exp_avg", "exp_avg_var", "step"]
        assert state["step"] == steps
        for got, wanted in ((p, oracle.p), (state["exp_avg"], oracle.m), (state["exp_avg_var"], oracle.s)):
            np.testing.assert_allclose(got.detach().cpu().double().numpy(), wanted, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_own_optimizer_follows_its_equations(target: Target, page: ModuleType, dtype: torch.dtype) -> None:
    optimizer = page.AdaBelief(made(target, dtype), lr=0.01)
    if target.backend == "triton" and dtype == torch.float64:
        with pytest.raises(RuntimeError, match="numba_cuda"):
            train(optimizer, range(1, 2))
        return
    train(optimizer, range(1, STEPS + 1))
    check(optimizer, [Oracle(i, lr=0.01).train(range(1, STEPS + 1)) for i in range(len(SHAPES))])


def test_own_optimizer_with_groups_of_different_options(target: Target, page: ModuleType) -> None:
    options: list[dict[str, Any]] = [
        {"lr": 0.02, "betas": (0.8, 0.99), "weight_decay": 0.1},
        {"maximize": True},
        {"lr": 0.005, "eps": 1e-3, "maximize": True, "weight_decay": 0.2},
    ]
    groups = [{"params": [p], **own} for p, own in zip(made(target), options, strict=True)]
    optimizer = page.AdaBelief(groups)
    train(optimizer, range(1, STEPS + 1))
    check(optimizer, [Oracle(i, **own).train(range(1, STEPS + 1)) for i, own in enumerate(options)])


def test_own_optimizer_with_a_scheduler(target: Target, page: ModuleType) -> None:
    optimizer = page.AdaBelief(made(target), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(1, STEPS + 1):
        train(optimizer, range(step, step + 1))
        scheduler.step()
    lrs = [0.02 * 0.5**k for k in range(STEPS)]
    check(optimizer, [Oracle(i).train(range(1, STEPS + 1), lrs) for i in range(len(SHAPES))])


def through_a_file(page: ModuleType, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Into a new optimizer of copies, with options that the checkpoint overrules."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    params = [nn.Parameter(p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    restored = page.AdaBelief(params, lr=1.0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    return restored


@pytest.mark.parametrize("carrier", ["file"] if EMULATED else ["file", "pickle", "deepcopy"])
def test_own_optimizer_goes_on_after_a_checkpoint(target: Target, page: ModuleType, carrier: str) -> None:
    optimizer = page.AdaBelief(made(target), lr=0.01, weight_decay=0.1)
    train(optimizer, range(1, 3))
    if carrier == "file":
        other = through_a_file(page, optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer)) if carrier == "pickle" else copy.deepcopy(optimizer)
    assert type(other) is page.AdaBelief
    for each in (optimizer, other):
        train(each, range(3, STEPS + 1))
        check(each, [Oracle(i, lr=0.01, weight_decay=0.1).train(range(1, STEPS + 1)) for i in range(len(SHAPES))])


def test_own_optimizer_keeps_small_updates_and_a_mean(target: Target, page: ModuleType) -> None:
    ends, means = {}, {}
    for precision in ("float32", "nearest", "kahan", "master"):
        half = precision != "float32"
        p = nn.Parameter(torch.full((40,), 1.5, dtype=torch.bfloat16 if half else torch.float32, device=target.device))
        extras = Extras(precision=precision if half else "nearest", average=0.5)
        # An update is between an eighth and a quarter of a bfloat16's last digit, which is 2^-7 here.
        optimizer = page.AdaBelief([p], lr=2.0**-10, extras=extras)
        for _ in range(16):
            p.grad = torch.ones_like(p)
            optimizer.step()
        mean = optimizer.state[p]["average"]
        assert mean.dtype == torch.float32
        ends[precision], means[precision] = (t.detach().double().mean().item() for t in (p, mean))
    assert ends["float32"] < 1.5 - 2.0**-6
    assert ends["nearest"] == 1.5
    for precision in ("kahan", "master"):
        assert abs(ends[precision] - ends["float32"]) <= 2.0**-7
        assert abs(means[precision] - means["float32"]) <= 2.0**-8


def test_own_optimizer_does_as_the_text_says(page: ModuleType) -> None:
    optimizer = page.AdaBelief([nn.Parameter(torch.ones(3))], lr=3e-4, extras=Extras(average=0.999))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == {
        **DEFAULTS,
        "lr": 3e-4,
        "maximize": False,
    }
    with pytest.raises(TypeError, match="momentum"):
        page.AdaBelief([nn.Parameter(torch.ones(3))], momentum=0.9)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="PyTorch has no other way"):
        page.AdaBelief([p]).step()


def test_code_of_the_other_sections_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(USING, "docs/optimizers.md", "exec"), names)
    assert names["norm"] > 0
    assert math.isclose(names["optimizer"].param_groups[0]["lr"], 0, abs_tol=1e-9)
    exec(compile(EXTRAS, "docs/optimizers.md", "exec"), names)
    for mean, p in zip(names["means"], names["model"].parameters(), strict=True):
        assert mean.dtype == torch.float32
        assert mean.shape == p.shape
        assert not torch.equal(mean, p.float())


def test_every_optimizer_is_listed_and_no_other() -> None:
    first, second = (
        re.findall(r"`(\w+)`", line) for line in PAGE.splitlines() if re.match(r"\| (as|not) in `torch.optim`", line)
    )
    classes = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    # A chain is no optimizer of its own.
    found = {name for name in classes if issubclass(getattr(optim, name), torch.optim.Optimizer)} - {"ChainedOptimizer"}
    in_torch = {name for name in found if hasattr(torch.optim, name)}
    assert set(first) - {"Muon"} == in_torch - {"Muon"}
    assert set(second) == found - in_torch
    for name in in_torch:
        assert issubclass(getattr(optim, name), getattr(torch.optim, name))


def test_links_to_pages_and_headings_lead_somewhere() -> None:
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGE):
        if link.startswith("../bench/results/"):
            continue
        file = FILE.parent / link if link else FILE
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs
