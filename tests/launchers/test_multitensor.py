"""Every backend maps an update over many tensors bit for bit as its rule, called as plain Python, says."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.launchers.multitensor import EXTRAS, FACTOR, SCALARS, SKIP, Table, Variant, launch
from bagua_kernels.rules import optimizers
from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.optimizers import ADAM, LAMB_MOMENTS, PLAIN_SGD, SGD, ElementwiseRule
from bagua_kernels.rules.random import random_bits, random_key
from bagua_kernels.rules.rounding import float_bfloat16_stochastic
from tests.conftest import EMULATED, Target
from tests.grids import grid, one_of_each, only

FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
BITS = {FLOAT64: torch.int64, FLOAT32: torch.int32, FLOAT16: torch.int16, BFLOAT16: torch.int16}
SIMULATED = knobs.CUDA_SIMULATOR.get()
SIZES = (1, 3, 0, 255) if SIMULATED else (1, 3, 0, 255, 1024, 4096, 5000)
RULES = [rule for rule in vars(optimizers).values() if isinstance(rule, ElementwiseRule)]
NAMED = [pytest.param(rule, id=rule.name) for rule in RULES]
# Of the launcher.
ONE_OF_EACH = one_of_each(NAMED, lambda case: (case.values[0].arrays, case.values[0].sums, case.values[0].writes))
SHOWN = ONE_OF_EACH if EMULATED else NAMED

# What a rule's scalars may be, by their names: with and without each term, and on both sides of each threshold.
VALUES = {
    "lr": (0.01, 0.3), "weight_decay": (0.1, 0.0, 0.02), "momentum": (0.9, 0.0, 0.3), "undamped": (1.0, 0.75),
    "nesterov": (0.0, 1.0), "decay": (0.999, 1.0), "beta1": (0.9,), "beta2": (0.999, 0.9), "rate1": (0.1, 0.7),
    "rate2": (0.001, 0.6), "rate": (0.01, 0.8, 1.0), "eps": (1e-8, 1e-3), "step_size": (0.02, 0.5), "bias1": (0.1, 0.99),
    "bias2": (0.002, 1.0), "root_bias2": (0.03, 1.0), "gradient_step": (0.05,), "momentum_step": (0.07,),
    "rectification": (0.0, 0.6), "rho": (0.9, 0.5), "alpha": (0.99, 0.5), "shrink": (0.5,), "grow": (1.2,),
    "least": (1e-6, 0.2), "most": (50.0, 0.9), "weight": (1.0, 0.25), "trust": (0.7, 0.02),
}  # fmt: skip

Columns = list[list[torch.Tensor]]


def variant_of(rule: ElementwiseRule, *dtypes: torch.dtype, extras: tuple[str, ...] = (), **options: Any) -> Variant:
    scalars = len(inspect.signature(rule.function).parameters) - rule.arrays
    return Variant(rule, dtypes or (FLOAT32,) * rule.arrays, scalars, extras, **options)


def rows_of(variant: Variant, tensors: int) -> Any:
    """Scalars of each tensor, none like the next one's."""
    names = list(inspect.signature(variant.rule.function).parameters)[variant.rule.arrays :]
    rows = np.zeros((tensors, variant.width), np.float64 if variant.double else np.float32)
    for i, row in enumerate(rows):
        row[FACTOR] = (1.0, -0.37, 0.0071)[i % 3]
        for position, name in enumerate(names):
            row[SCALARS + position] = VALUES[name][(i + position) % len(VALUES[name])]
        row[SCALARS + variant.scalars :] = 0.3  # the rate of an average
    return rows


def columns_of(variant: Variant, sizes: tuple[int, ...], special: bool = True) -> Columns:
    """Parameters, gradients (some of them special values) and states that the rule may meet."""
    generator = torch.Generator().manual_seed(len(sizes))
    names = list(inspect.signature(variant.rule.function).parameters)[: variant.rule.arrays]
    columns = []
    for i, dtype in enumerate(variant.dtypes):
        name = names[i] if i < len(names) else variant.extras[i - len(names)]
        column = [torch.randn(n, generator=generator) * (0.1 if name in ("mean", "compensation") else 1) for n in sizes]
        if name in ("v", "u", "total", "greatest", "size"):
            column = [t.abs() for t in column]
        if name == "g" and special:
            values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40])
            column = [torch.cat([values, t[5:]]) if len(t) >= 255 else t for t in column]
        columns.append([t.to(dtype) for t in column])
    if "master" in variant.extras:
        pairs = zip(columns[0], columns[variant.rule.arrays], strict=True)
        # Somebody has written to every fourth parameter since.
        columns[0] = [torch.where(torch.arange(len(p)) % 4 > 0, m.to(p.dtype), p) for p, m in pairs]
    return columns


def stochastic(x: Any, key: Any) -> torch.Tensor:
    """The rules, as plain Python, on all elements of one tensor."""
    with np.errstate(over="ignore"):
        keys = random_key(np.uint32(key[0]), np.uint32(key[1]), np.uint32(0))
        noise = random_bits(np.arange(len(x), dtype=np.uint32), *keys)
    return torch.from_numpy(float_bfloat16_stochastic(x, noise).view(np.int16)).view(BFLOAT16)


def reference(variant: Variant, columns: list[torch.Tensor], row: Any, key: Any = None) -> Any:
    """What one tensor's columns hold afterwards, by NumPy's arithmetic and PyTorch's conversions, and its sums."""
    rule = variant.rule
    old = [c.to(FLOAT64 if variant.double else FLOAT32).numpy() for c in columns]
    master, compensation, average = (variant.column(extra) for extra in EXTRAS)
    values = old[: rule.arrays]
    with np.errstate(all="ignore"):
        values[min(1, rule.arrays - 1)] = values[min(1, rule.arrays - 1)] * row[FACTOR]
        if master is not None:
            image = torch.from_numpy(old[master]).to(variant.dtypes[0]).float().numpy()
            values[0] = np.where(values[0] == image, old[master], values[0])
        values[0] = values[0] if compensation is None else values[0] + old[compensation]
        found = rule.function(*values, *row[SCALARS : SCALARS + variant.scalars])
        results = found if isinstance(found, tuple) else (found,)
        new = {i: results[at] for at, i in enumerate(rule.writes)}
        stored = {i: torch.from_numpy(x).to(variant.dtypes[i]) for i, x in new.items()}
        stored |= {0: stochastic(new[0], key)} if variant.stochastic else {}
        if master is not None:
            stored[master] = torch.from_numpy(new[0])
        if compensation is not None:
            stored[compensation] = torch.from_numpy(new[0] - stored[0].float().numpy())
        if average is not None:
            stored[average] = torch.from_numpy(old[average] + (new[0] - old[average]) * row[-1])
    sums = [float(term.astype(np.float64).sum()) for term in results[len(rule.writes) :]]
    return [stored[i].to(c.dtype) if i in stored else c for i, c in enumerate(columns)], sums


def on(target: Target, columns: Columns) -> Columns:
    return [[t.clone().to(target.device) for t in column] for column in columns]


def prepared(target: Target, variant: Variant, sizes: Any, special: bool = True) -> tuple[Columns, Columns, Any]:
    """Columns, a copy of them to be changed, and rows."""
    before = columns_of(variant, sizes, special)
    return before, on(target, before), rows_of(variant, len(sizes))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are equal, but for those of NaNs."""
    found, numbers, bits = found.cpu(), ~expected.isnan(), BITS[expected.dtype]
    equal = torch.equal(found[numbers].view(bits), expected[numbers].view(bits))
    return found.dtype == expected.dtype and torch.equal(~found.isnan(), numbers) and equal


def check(variant: Variant, before: Columns, after: Columns, rows: Any, keys: Any = None, sums: Any = None) -> None:
    for t in range(len(rows)):
        old, key = [column[t] for column in before], None if keys is None else keys[t]
        expected, totals = reference(variant, old, rows[t], key)
        for i, column in enumerate(expected):
            assert same(after[i][t], column), f"column {i} of tensor {t}, of {column.numel()} elements"
        if variant.rule.sums:
            assert sums[t].tolist() == pytest.approx(totals, rel=1e-9, abs=0)


@grid(cover=1, rule=SHOWN)
def test_every_rule(target: Target, rule: ElementwiseRule) -> None:
    variant = variant_of(rule)
    before, after, rows = prepared(target, variant, SIZES, special=not rule.sums)
    sums = launch(variant, Table(after), rows)
    check(variant, before, after, rows, sums=sums)
    assert (sums is None) == (rule.sums == 0)


MIXTURES = {
    "bfloat16": variant_of(ADAM, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32),
    "of all": variant_of(ADAM, FLOAT16, FLOAT32, BFLOAT16, FLOAT32),
    "master": variant_of(SGD, BFLOAT16, FLOAT16, FLOAT32, FLOAT32, extras=("master",)),
    "compensation": variant_of(SGD, BFLOAT16, BFLOAT16, FLOAT32, BFLOAT16, extras=("compensation",)),
    "average": variant_of(SGD, *[FLOAT32] * 4, extras=("average",)),
    "all extras": variant_of(SGD, BFLOAT16, FLOAT16, FLOAT32, FLOAT32, FLOAT32, BFLOAT16, extras=EXTRAS),
    "float16": variant_of(SGD, FLOAT16, FLOAT16, FLOAT16, FLOAT32, FLOAT16, extras=("master", "compensation")),
    "stochastic": variant_of(SGD, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32, extras=("average",), stochastic=True),
}


@pytest.mark.parametrize("name", only(MIXTURES, "of all", "all extras"))
def test_dtypes_and_extras(target: Target, name: str) -> None:
    variant = MIXTURES[name]
    before, after, rows = prepared(target, variant, SIZES)
    keys = np.random.default_rng(0).integers(0, 1 << 32, (len(SIZES), 2), np.uint32) if variant.stochastic else None
    launch(variant, Table(after), rows, keys)
    check(variant, before, after, rows, keys)


def test_float64(target: Target) -> None:
    variant = variant_of(ADAM, *[FLOAT64] * 4)
    before, after, rows = prepared(target, variant, SIZES, special=False)
    if target.backend == "triton":
        with pytest.raises(TypeError, match="numba_cuda"):
            launch(variant, Table(after), rows)
        return
    launch(variant, Table(after), rows)
    check(variant, before, after, rows)


def test_work_is_cut_anyhow(target: Target) -> None:
    """Tensors of several pieces; on the CPU, as many threads as there may be."""
    many, few = (40_000, 5, 16_384, 0, 20_001), (1_300, 5)
    sizes = {"numba_cpu": many, "triton": (9_001, 5), "numba_cuda": few, "numpy": many}[target.backend]
    variant, found, threads = variant_of(LAMB_MOMENTS), [], torch.get_num_threads()
    try:
        for count in (1, 2, 3) if target.backend == "numba_cpu" else (threads,):
            torch.set_num_threads(count)
            before, after, rows = prepared(target, variant, sizes, special=False)
            found.append(launch(variant, Table(after), rows))
            check(variant, before, after, rows, sums=found[-1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(sums, found[0]) for sums in found)


def test_skipped_tensors_stay_as_they_are(target: Target) -> None:
    variant = variant_of(LAMB_MOMENTS)
    before, after, rows = prepared(target, variant, (255, 255, 100), special=False)
    rows[1, SKIP] = 1.0
    sums = launch(variant, Table(after), rows)
    assert all(same(new[1], old[1]) for new, old in zip(after, before, strict=True))
    assert not sums[1].any()
    old, new = ([[column[t] for t in (0, 2)] for column in columns] for columns in (before, after))
    check(variant, old, new, rows[[0, 2]], sums=sums[[0, 2]])


def test_factor_and_rows_on_the_device(target: Target) -> None:
    columns = on(target, [[torch.arange(255.0), torch.ones(3)], [torch.full((255,), 8.0), torch.ones(3)]])
    rows = torch.tensor([[-0.5, 0.0, 0.25, 0.0], [2.0, 0.0, 4.0, 0.0]], device=target.device)
    launch(variant_of(PLAIN_SGD), Table(columns), rows)
    assert torch.equal(columns[0][0].cpu(), torch.arange(255.0) + 1)
    assert torch.equal(columns[0][1].cpu(), torch.full((3,), -7.0))


@pytest.mark.parametrize("variant", [MIXTURES["compensation"], variant_of(SGD)], ids=["bfloat16", "float32"])
def test_views_of_one_storage(target: Target, variant: Variant) -> None:
    """Tensors begin anywhere, and what lies between them is left alone."""
    starts, sizes, total = (1, 300, 403, 700), (255, 100, 3, 64), 800
    flat = columns_of(variant, (total,))
    storages = on(target, flat)
    places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    before = [[column[0][place] for place in places] for column in flat]
    after = [[column[0][place] for place in places] for column in storages]
    rows = rows_of(variant, len(sizes))
    launch(variant, Table(after), rows)
    check(variant, before, after, rows)
    between = sorted(set(range(total)).difference(*(range(place.start, place.stop) for place in places)))
    for storage, column in zip(storages, flat, strict=True):
        assert same(storage[0].cpu()[between], column[0][between])


def test_any_dense_layout_and_complex_numbers(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(7, 5, generator=generator).t() for _ in range(2)]
    imaginary = [torch.randn(11, dtype=torch.complex64, generator=generator) for _ in range(2)]
    columns = [[a.to(target.device), b.to(target.device)] for a, b in zip(dense, imaginary, strict=True)]
    expected = [(p.double() - 0.25 * g.double()) for p, g in (dense, [torch.view_as_real(z) for z in imaginary])]
    variant, table = variant_of(PLAIN_SGD), Table(columns)
    assert table.sizes.tolist() == [35, 22]
    launch(variant, table, np.array([[1, 0, 0.25, 0]] * 2, np.float32))
    found = columns[0][0].cpu(), torch.view_as_real(columns[0][1].cpu())
    assert all(torch.equal(a, b.float()) for a, b in zip(found, expected, strict=True))


def test_other_addresses(target: Target) -> None:
    """Gradients that moved, also to where no vector may be read; the first ones are not read any more."""
    variant = variant_of(SGD)
    before, after, rows = prepared(target, variant, (255, 3, 100))
    first = [torch.full_like(g, float("nan")) for g in after[1]]
    table = Table([after[0], first, after[2]])
    rows[:, SKIP] = 1.0
    launch(variant, table, rows)
    rows[:, SKIP] = 0.0
    moved = [torch.cat([g[:1], g])[1:] for g in after[1]]
    table.replace(1, [g.data_ptr() for g in moved])
    table.columns[1] = moved
    launch(variant, table, rows)
    check(variant, before, [after[0], moved, after[2]], rows)


def test_table_forgets_what_it_derived_from_addresses() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    table, made = Table([tensors]), []
    for addresses in (None, None, [t.data_ptr() for t in tensors], [t.data_ptr() + 4 for t in tensors]):
        if addresses:
            table.replace(0, addresses)
        for key in (("addresses", "x"), ("sizes",)):
            table.cached(key, lambda key=key: made.append(key))
    assert made == [("addresses", "x"), ("sizes",), ("addresses", "x")]


STOCHASTIC = variant_of(PLAIN_SGD, BFLOAT16, FLOAT32, stochastic=True)


def test_stochastic_rounding(target: Target) -> None:
    n = 300 if SIMULATED else 17_000
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(n, generator=generator).bfloat16()
    g = torch.randn(n, generator=generator)
    p[:3], g[:3] = torch.tensor([float("inf"), -float("inf"), float("nan")]), 0.0
    before = [[p, p[:200], p[:200], p[:200]], [g, g[:200], g[:200], g[:200]]]
    keys = np.array([[5, 6], [5, 6], [5, 7], [6, 6]], np.uint32)
    rows = np.array([[1, 0, 0.01, 0]] * 4, np.float32)
    after = on(target, before)
    launch(STOCHASTIC, Table(after), rows, keys)
    check(STOCHASTIC, before, after, rows, keys)
    results = [t.cpu() for t in after[0]]
    assert same(results[0][:3], p[:3])
    assert [same(t, results[0][:200]) for t in results[1:]] == [True, False, False]
    exact = torch.from_numpy(PLAIN_SGD.function(p.float().numpy(), g.numpy(), *rows[0, SCALARS:]))[3:]
    assert bool(((results[0][3:].float() - exact).abs() <= exact.abs() * 2.0**-7).all())
    assert not same(results[0][3:], exact.bfloat16())


TINY = {
    "to nearest": variant_of(PLAIN_SGD, BFLOAT16, FLOAT32),
    "master": variant_of(PLAIN_SGD, BFLOAT16, FLOAT32, FLOAT32, extras=("master",)),
    "compensation": variant_of(PLAIN_SGD, BFLOAT16, FLOAT32, BFLOAT16, extras=("compensation",)),
    "stochastic": STOCHASTIC,
}


@pytest.mark.parametrize("name", only(TINY, "to nearest", "stochastic"))
def test_tiny_updates(target: Target, name: str) -> None:
    """Updates below half of what bfloat16 can tell apart are lost by rounding to nearest, and arrive in every other way."""
    steps, total, n, ulp = (16, 0.05, 64, 2.0**-7) if EMULATED else (1000, 0.1, 512, 2.0**-7)
    generator = torch.Generator().manual_seed(2)
    start = (1 + torch.rand(n, generator=generator) / 2).bfloat16()
    gradient = -0.5 - 0.7 * torch.rand(n, generator=generator)
    variant = TINY[name]
    extra = {"master": start.float(), "compensation": torch.zeros_like(start)}.get(name)
    columns = on(target, [[start], [gradient]] + ([] if extra is None else [[extra]]))
    rows = np.array([[1, 0, total / steps, 0]], np.float32)
    table = Table(columns)
    for step in range(steps):
        launch(variant, table, rows, np.array([[7, step]], np.uint32) if variant.stochastic else None)
    after = columns[0][0].cpu()
    moved = -gradient.double() * float(rows[0, SCALARS]) * steps
    errors = (after.double() - start.double() - moved) / ulp
    assert float(moved.min()) > 3 * ulp
    if name == "to nearest":
        assert same(after, start)
    elif name == "stochastic":
        # A rounding errs by f (1 - f) in the square, f being the update in units of the last place.
        sigma = float((moved / ulp).mean() / n) ** 0.5
        assert abs(float(errors.mean())) < 5 * sigma < 2.5
    else:
        assert float(errors.abs().max()) < 1


def fused(x, y, z):
    return tl.fma(x, y, z)


FUSED = ElementwiseRule("fused", fused, arrays=3, writes=(2,))


def rounded(value: Fraction) -> float:
    """The nearest float32, ties to even, in whole numbers only."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    return float(round(value / unit) * unit)


def hard_products() -> tuple[Any, Any, Any]:
    """Ties that something tiny decides, sums that cancel all but the rounding, results without all of their bits."""
    rng = np.random.default_rng(4)
    cases = []
    for scale in (0, -73, -70, 30):
        x = y = (1 + 2.0**-12) * 2.0**scale
        cases += [(x, s * y, z * x * y) for s in (1, -1) for z in (0, 1, 2.0**-24, 2.0**-60, -(2.0**-60), -1, -0.5)]
    cases += [(2.0**-75, 2.0**-75, z * 2.0**-149) for z in (0, 1, -1, 2, 3)]
    cases += [((1 + 2.0**-23) * 2.0**-75, y * 2.0**-75, z * 2.0**-149) for y in (1, 3, -5) for z in (0, 1, -1, 2)]
    x, y = (rng.standard_normal(60) * 2.0 ** rng.integers(-60, 30, 60) for _ in range(2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    product = x.astype(np.float64) * y
    cases += zip(x, y, -product.astype(np.float32), strict=True)
    cases += zip(x, y, product * 2.0 ** rng.integers(-50, 50, 60), strict=True)
    return tuple(np.array(column, np.float64).astype(np.float32) for column in zip(*cases, strict=True))


def test_fma_is_rounded_once(target: Target) -> None:
    x, y, z = hard_products()
    fractions = ([Fraction(float(number)) for number in column] for column in (x, y, z))
    expected = np.array([rounded(a * b + c) for a, b, c in zip(*fractions, strict=True)], np.float32)
    columns = on(target, [[torch.from_numpy(a)] for a in (x, y, z)])
    launch(variant_of(FUSED), Table(columns), rows_of(variant_of(FUSED), 1))
    assert np.array_equal(columns[2][0].cpu().numpy(), expected)
    # Neither two roundings nor those to float64 and from there to float32 would do.
    with np.errstate(under="ignore"):
        assert not np.array_equal(x * y + z, expected)
        assert not np.array_equal((x.astype(np.float64) * y + z).astype(np.float32), expected)


def test_number_of_columns_and_shape_of_rows(target: Target) -> None:
    ones = [torch.ones(3, device=target.device)]
    with pytest.raises(ValueError, match=r"'sgd' takes 3 columns and 7 values.*got 2 columns"):
        launch(variant_of(SGD), Table([ones, ones]), np.ones((1, 7), np.float32))
    for shape in ((1, 6), (2, 7), (7,)):
        with pytest.raises(ValueError, match=r"7 values for each of 1 tensors, got 3 columns and shape \("):
            launch(variant_of(SGD), Table([ones] * 3), np.ones(shape, np.float32))


def test_dtypes_that_cannot_be() -> None:
    with pytest.raises(TypeError, match=r"'sgd' takes float32, .* got torch\.int32"):
        variant_of(SGD, FLOAT32, torch.int32, FLOAT32)
    with pytest.raises(TypeError, match="cannot be mixed"):
        variant_of(SGD, FLOAT32, FLOAT64, FLOAT32)
    with pytest.raises(TypeError, match=r"bfloat16 parameters, got torch\.float32"):
        variant_of(SGD, FLOAT32, BFLOAT16, FLOAT32, stochastic=True)
