"""Triton compiles every kernel without a GPU, and the code is exact, wide in memory and free of spills."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.launchers.blockwise.fusion.sources import RowSum
from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, Variant
from bagua_kernels.rules import optimizers
from bagua_kernels.rules.gossip import ADDED, CHOCO, DCD, DCD_TOTAL
from bagua_kernels.rules.messages import FEEDBACK, MessageRule
from bagua_kernels.rules.optimizers import ADAM, SGD, ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer, minmax
from bagua_kernels.rules.signs import SIGN_TWO_MEANS
from tests.ahead_of_time.operations import operations
from tests.ahead_of_time.ptx import count, opcodes, target, violations, widths

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

from bagua_kernels.jit._triton import EXACT
from bagua_kernels.launchers.blockwise import _triton as blockwise
from bagua_kernels.launchers.elementwise import _triton as elementwise
from bagua_kernels.launchers.multitensor import _triton as multitensor
from bench.gpu.ahead_of_time import (
    BFLOAT16,
    BLOCKWISE,
    ELEMENTWISE_WARPS,
    FLOAT16,
    FLOAT32,
    GOSSIP,
    MESSAGES,
    MIXED,
    RULES,
    VARIANTS,
    apply_ptx,
    assembler,
    blockwise_ptx,
    compiled,
    elementwise_ptx,
    message_ptx,
    multitensor_ptx,
    resources,
    variant_of,
)
from tests.grids import grid, noted, one_of_each, only

# Other dtypes differ in their loads and stores, so that one architecture shows them.
TARGETS = only(
    [(FLOAT32, 80), (FLOAT32, 90), (FLOAT32, 100), (FLOAT16, 90), (BFLOAT16, 90)], (FLOAT32, 90), (BFLOAT16, 90)
)
ARCHITECTURES = only([80, 90, 100], 90)
MINMAX_UINT8 = minmax(8)
# Kernels of a rule around a quantizer.
FUSED = ("decode_apply", "gossip", *(message.name for message in MESSAGES))
# One rule for each shape of a kernel: the words of a scale, what is searched and summed for it, and how blocks are split.
KINDS = list({(rule.words, rule.extremes, rule.sums, rule.splits): rule for rule in reversed(RULES)}.values())
UPDATES = [rule for rule in vars(optimizers).values() if isinstance(rule, ElementwiseRule)]
# Elements that a thread works on at once.
ELEMENTWISE_ELEMENTS = elementwise.BLOCK // (32 * ELEMENTWISE_WARPS)
MULTITENSOR_ELEMENTS = multitensor.BLOCK // (32 * multitensor.WARPS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for real every time, and leaves the user's cache alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def spilled(ptx: str) -> int:
    """Bytes that a kernel keeps in memory for want of registers."""
    sm = int("".join(c for c in target(ptx) if c.isdigit()))
    if not assembler(sm).is_file():
        pytest.skip(f"needs {assembler(sm).name} of triton, not found at {assembler(sm)}")
    taken = resources(ptx, sm)
    return taken.spills + taken.stack


def check(ptx: str, *, fused: int | None = 0, summing: bool = False) -> None:
    assert violations(ptx, sums_are_marked=True, fused=fused, summing=summing) == []
    assert spilled(ptx) == 0


def check_update(ptx: str, variant: Variant) -> int:
    """Checks a kernel over many tensors, and tells how often it has the code of one element.

    It has one path for whole pieces, whose loop may be unrolled, and one with masks.
    """
    rule, extras = variant.rule, variant.dtypes[variant.rule.arrays :]
    stored = sum(8 * variant.dtypes[i].itemsize for i in rule.writes) + sum(8 * dtype.itemsize for dtype in extras)
    copies = 2 * MULTITENSOR_ELEMENTS
    if stored:
        bits = sum(width * times for width, times in widths(ptx, "st.global").items()) - 64 * rule.sums
        copies, rest = divmod(bits, stored)
        assert rest == 0
    assert copies >= 2 * MULTITENSOR_ELEMENTS
    assert copies % MULTITENSOR_ELEMENTS == 0
    wanted = operations(rule)
    # Code that is unrolled shares products, and may be there with and without weight decay.
    alike = copies == 2 * MULTITENSOR_ELEMENTS
    check(ptx, fused=copies * wanted["fma"] if alike else None, summing=rule.sums > 0)
    if stored and alike:
        # The gradient's factor, where there is a use for the gradient, and the running mean's rate.
        products = wanted["mul"] + (rule.name != "lamb") + (AVERAGE in variant.extras)
        assert count(ptx, "mul") == copies * products
        assert count(ptx, "div") == copies * wanted["div"]
    return copies


@grid(
    name=["encode", "encode_rows"],
    stochastic={"nearest": False, "stochastic": True},
    dtype__sm=TARGETS,
    cover=1,
    most=1,
)
def test_encode(dtype: torch.dtype, sm: int, name: str, stochastic: bool) -> None:
    ptx = blockwise_ptx(MINMAX_UINT8, name, dtype, sm, stochastic=stochastic)
    check(ptx)
    # The halves of a row's seed have 32 bits.
    assert min(widths(ptx, "ld.global")) >= (32 if stochastic and name == "encode_rows" else 128)
    assert max(widths(ptx, "ld.global")) >= 128
    # A scale has 32 bits, codes more.
    assert min(widths(ptx, "st.global")) >= 32
    assert max(widths(ptx, "st.global")) >= 128


@grid(name=["decode", "decode_sum", "decode_rows"], dtype__sm=TARGETS, cover=1, most=1)
def test_decode(name: str, dtype: torch.dtype, sm: int) -> None:
    ptx = blockwise_ptx(MINMAX_UINT8, name, dtype, sm)
    check(ptx)
    assert min(widths(ptx, "ld.global")) >= 32
    assert max(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "st.global")) >= 128


@grid(stochastic=only([False, True], True), sm=ARCHITECTURES, cover=1, most=1)
def test_reduce(sm: int, stochastic: bool) -> None:
    ptx = blockwise_ptx(MINMAX_UINT8, "reduce", FLOAT32, sm, stochastic=stochastic)
    check(ptx)
    for access in ("ld.global", "st.global"):
        assert min(widths(ptx, access)) >= 32
        assert max(widths(ptx, access)) >= 128


@pytest.mark.slow
@grid(name=only(["encode", "decode", "decode_sum", "reduce"], "encode", "decode_sum"), block=[32, 4096], cover=1)
def test_smallest_and_largest_block(name: str, block: int) -> None:
    check(blockwise_ptx(MINMAX_UINT8, name, FLOAT32, 90, stochastic=True, block=block))
    check(blockwise_ptx(SIGN_TWO_MEANS, name, FLOAT32, 90, block=block))


@pytest.mark.slow
@grid(name=only(["encode", "decode", "decode_sum", "reduce"], "decode", "reduce"), n=["i32", "i64"], cover=1)
def test_any_length(name: str, n: str) -> None:
    """A length that is no multiple of 16, or one beyond 2^31, is specialised otherwise."""
    check(blockwise_ptx(MINMAX_UINT8, name, FLOAT32, 90, stochastic=True, n=n, multiples=("size",)))


@pytest.mark.slow
@grid(rule={rule.name: rule for rule in RULES})
def test_every_rule(rule: BlockQuantizer) -> None:
    """All kernels of one rule of each kind, and the two in which the other rules differ from it.

    For one architecture: what differs between them, `test_encode` and the table of registers show.
    """
    for name in (*BLOCKWISE, *FUSED) if rule in KINDS else ("encode", "decode"):
        with noted(name):
            check_kernel(rule, name)


def check_kernel(rule: BlockQuantizer, name: str) -> None:
    block = RULES[rule]
    if name == "decode_apply":
        ptx = apply_ptx(rule, ADAM, FLOAT32, 90, block=block)
        tile = blockwise.tile(rule, block)
        elements = tile["ROWS"] * tile["BLOCK"] // (32 * tile["num_warps"])
        check(ptx, fused=elements * operations(ADAM)["fma"])
    elif name == "gossip":
        ptx = apply_ptx(rule, ADDED, FLOAT32, 90, block=block, mixture=GOSSIP)
        check(ptx)
    elif name in FUSED:
        message = next(message for message in MESSAGES if message.name == name)
        dtypes = (FLOAT32,) * message.arrays
        ptx = message_ptx(rule, message, dtypes, 90, block=block, stochastic=rule.bits > 1)
        check(ptx)
    else:
        stochastic = rule.bits > 1 and name != "encode_pieces"
        ptx = blockwise_ptx(rule, name, FLOAT32, 90, block=block, stochastic=stochastic)
        check(ptx)
    if name == "encode" or name in FUSED:
        assert max(widths(ptx, "ld.global")) >= 128
    if name in ("decode", "decode_sum") or name in FUSED:
        assert max(widths(ptx, "st.global")) >= 128


@pytest.mark.slow
@grid(
    message={message.name: message for message in [DCD_TOTAL, CHOCO]},
    dtype=only([FLOAT32, BFLOAT16], BFLOAT16),
    cover=1,
)
def test_rules_before_encoding(message: MessageRule, dtype: torch.dtype) -> None:
    """Replicas are float32 beside a parameter of any dtype; nothing but scales is accessed in less than 128 bits."""
    dtypes = (dtype, *(FLOAT32,) * (message.arrays - 1))
    ptx = message_ptx(MINMAX_UINT8, message, dtypes, 90, stochastic=True)
    check(ptx)
    assert min(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "st.global")) >= 32


@pytest.mark.slow
@grid(weighted__divided=only([(False, False), (False, True), (True, False), (True, True)], (True, False)))
def test_sums_of_replicas_before_encoding(weighted: bool, divided: bool) -> None:
    ptx = message_ptx(MINMAX_UINT8, DCD, (FLOAT32, FLOAT32), 90, stochastic=True, rows=RowSum(weighted, divided))
    check(ptx)
    assert max(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "ld.global")) >= 32


@grid(counted=[False, True], divided=[False, True], cover=1)
def test_rules_after_decoding(counted: bool, divided: bool) -> None:
    mixture = replace(GOSSIP, counted=counted, weighted=not divided, divided=divided)
    ptx = apply_ptx(MINMAX_UINT8, ADDED, FLOAT32, 90, mixture=mixture)
    check(ptx)
    # Replicas and the total are written.
    assert min(widths(ptx, "st.global")) >= 128


@pytest.mark.slow
@grid(
    rule={rule.name: rule for rule in [MINMAX_UINT8, SIGN_TWO_MEANS]},
    name=only(["encode", "feedback", "reduce"], "encode", "feedback"),
    cover=1,
)
def test_blocks_of_many_tensors(rule: BlockQuantizer, name: str) -> None:
    """Knowing which elements are a block's own makes no access narrower."""
    make = functools.partial(blockwise_ptx, rule, name, FLOAT32, 90)
    if name == "feedback":
        make = functools.partial(message_ptx, rule, FEEDBACK, (FLOAT32, FLOAT32), 90)
    plain, counted = (make(block=RULES[rule], counted=many) for many in (False, True))
    check(counted)
    for access in ("ld.global", "st.global"):
        assert widths(counted, access)[128] == widths(plain, access)[128]
    # What is read more are counts, of 32 bits, one a row, in one or two layouts of the tile.
    more = widths(counted, "ld.global") - widths(plain, "ld.global")
    assert set(more) <= {32}
    assert more[32] <= 2 * blockwise.tile(rule, RULES[rule])["ROWS"]


@grid(rule={rule.name: rule for rule in [ADAM, SGD]}, dtype__sm=TARGETS, cover=1, most=1)
def test_elementwise(rule: ElementwiseRule, dtype: torch.dtype, sm: int) -> None:
    ptx = elementwise_ptx(rule, dtype, sm)
    wanted = operations(rule)
    check(ptx, fused=ELEMENTWISE_ELEMENTS * wanted["fma"])
    assert count(ptx, "mul") == ELEMENTWISE_ELEMENTS * wanted["mul"]
    assert min(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "st.global")) >= 128


def vectors(dtypes: Sequence[torch.dtype]) -> Counter[int]:
    """How many accesses of how many bits take a thread's elements of each column, if all are as wide as can be."""
    found: Counter[int] = Counter()
    for dtype in dtypes:
        bits = MULTITENSOR_ELEMENTS * dtype.itemsize * 8
        found[min(bits, 128)] += bits // min(bits, 128)
    return found


def vectors_of(ptx: str, access: str) -> Counter[int]:
    """Those that take several elements; 64 bits are also an address."""
    return widths("\n".join(line for line in ptx.splitlines() if re.search(r"\.v\d", line)), access)


@pytest.mark.slow
@grid(name=list(VARIANTS), sm=ARCHITECTURES, cover=1, most=1)
def test_multitensor(name: str, sm: int) -> None:
    variant = VARIANTS[name]
    ptx = multitensor_ptx(variant, sm)
    assert check_update(ptx, variant) == 2 * MULTITENSOR_ELEMENTS
    writes = [dtype for i, dtype in enumerate(variant.dtypes) if i in variant.rule.writes or i >= variant.rule.arrays]
    # The path of tensors that are not aligned, and of shorter pieces, goes element by element.
    assert vectors_of(ptx, "ld.global") == vectors(variant.dtypes)
    assert vectors_of(ptx, "st.global") == vectors(writes)


@grid(
    cover=1,
    rule=one_of_each(
        [pytest.param(rule, id=rule.name) for rule in UPDATES],
        lambda case: (case.values[0].arrays, case.values[0].sums, case.values[0].writes),
    ),
)
def test_every_update(rule: ElementwiseRule) -> None:
    variant = variant_of(rule)
    check_update(multitensor_ptx(variant, 90), variant)


def test_extras_of_an_update_are_exact() -> None:
    variant = variant_of(ADAM, (*MIXED, BFLOAT16, FLOAT32), (COMPENSATION, AVERAGE))
    check_update(multitensor_ptx(variant, 90), variant)


def test_division_and_root_are_ieee() -> None:
    found = set(opcodes(elementwise_ptx(ADAM, FLOAT32, 90)))
    assert {"div.rn.f32", "sqrt.rn.f32"} <= found


@triton.jit
def product_and_sum(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * x + x)


@triton.jit
def in_float64(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.float64)
    tl.store(y_ptr + at, (x * x + 0.1).to(tl.float32))


def small_ptx(kernel: Any, **options: Any) -> str:
    return compiled(kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 512}, 90, **options)


def test_contraction_is_seen() -> None:
    assert violations(small_ptx(product_and_sum, **EXACT), sums_are_marked=True) == []
    assert violations(small_ptx(product_and_sum, enable_fp_fusion=True), sums_are_marked=True)


def test_contraction_beside_fused_products_is_seen() -> None:
    wanted = operations(ADAM)["fma"]
    ptx = elementwise_ptx(ADAM, FLOAT32, 90, enable_fp_fusion=True)
    assert count(ptx, "fma") > ELEMENTWISE_ELEMENTS * wanted
    ptx = multitensor_ptx(VARIANTS["adam"], 90, enable_fp_fusion=True)
    assert count(ptx, "fma") > 2 * MULTITENSOR_ELEMENTS * wanted


def test_float64_is_seen() -> None:
    assert any("f64" in line for line in violations(small_ptx(in_float64, **EXACT), sums_are_marked=True))


def test_narrow_access_is_seen() -> None:
    """A length that may be no multiple of 16 keeps a mask from covering several elements."""
    ptx = blockwise_ptx(MINMAX_UINT8, "encode", FLOAT32, 90, multiples=())
    assert min(widths(ptx, "ld.global")) == 32


def test_spill_is_seen() -> None:
    assert spilled(blockwise_ptx(MINMAX_UINT8, "reduce", FLOAT32, 90, maxnreg=24))
