"""Triton compiles every kernel without a GPU, and the code is exact, wide in memory and free of spills."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.rules.optimizers import ADAMW, SGD, ElementwiseRule
from bagua_kernels.rules.quantizers import MINMAX_UINT8
from tests.ahead_of_time.ptx import opcodes, target, violations, widths

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bagua_kernels.jit._triton import EXACT
from bagua_kernels.launchers.blockwise import _triton as blockwise
from bagua_kernels.launchers.elementwise import _triton as elementwise

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# What a launcher passes for a tensor of a dtype: bfloat16 goes as its bits.
POINTERS = {FLOAT32: "*fp32", FLOAT16: "*fp16", BFLOAT16: "*u16"}
# Other dtypes differ in their loads and stores, so that one architecture shows them.
TARGETS = [(FLOAT32, 80), (FLOAT32, 90), (FLOAT32, 100), (FLOAT16, 90), (BFLOAT16, 90)]
BLOCKWISE_ARGUMENTS = {
    "words_ptr": "*i32", "codes_ptr": "*u8", "out_words_ptr": "*i32", "out_codes_ptr": "*u8", "ranks": "i32",
    "size": "i32", "n": "i32", "scale": "fp32", "seed_low": "i32", "seed_high": "i32",
}  # fmt: skip
# A payload's size always is such a multiple, and its parts begin at such addresses.
MULTIPLES_OF_16 = ("n", "size")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for real every time, and leaves the user's cache alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    sm: int,
    *,
    multiples: tuple[str, ...] = MULTIPLES_OF_16,
    **options: Any,
) -> str:
    """The PTX of a kernel for an architecture, specialised as a launch would do it."""
    names = kernel.arg_names
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in multiples or signature.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]
    assert target(ptx).startswith(f"sm_{sm}")
    return ptx


def blockwise_ptx(
    name: str,
    dtype: torch.dtype,
    sm: int,
    *,
    stochastic: bool = False,
    block: int = 256,
    n: str = "i32",
    **options: Any,
) -> str:
    kernel = blockwise.kernel(name, MINMAX_UINT8, dtype)
    types = {**BLOCKWISE_ARGUMENTS, "n": n, "x_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype]}
    signature = {a: types[a] for a in kernel.arg_names if a in types}
    shape = blockwise.tile(block)
    warps = shape.pop("num_warps")
    constants = {**shape, **({"STOCHASTIC": stochastic} if "STOCHASTIC" in kernel.arg_names else {})}
    return compiled(kernel, signature, constants, sm, num_warps=warps, **EXACT, **options)


def elementwise_ptx(rule: ElementwiseRule, dtype: torch.dtype, sm: int, **options: Any) -> str:
    scalars = len(inspect.signature(rule.function).parameters) - rule.arrays
    kernel = elementwise.kernel(rule, scalars, (dtype,) * rule.arrays)
    signature = {f"a{i}_ptr": POINTERS[dtype] for i in range(rule.arrays)}
    signature |= {f"s{i}": "fp32" for i in range(scalars)} | {"n": "i32"}
    return compiled(kernel, signature, {"BLOCK": elementwise.BLOCK}, sm, num_warps=4, **EXACT, **options)


def spills(ptx: str, folder: Path) -> list[str]:
    """What ptxas, which allocates the registers, says of memory that it needed in their place."""
    arch = target(ptx)
    blackwell = int(re.sub(r"\D", "", arch)) >= 100
    ptxas = TOOLS / ("ptxas-blackwell" if blackwell else "ptxas")
    if not ptxas.is_file():
        pytest.skip(f"needs {ptxas.name} of triton, not found at {ptxas}")
    text = folder / "kernel.ptx"
    text.write_text(ptx)
    command = [ptxas, "-v", "--fmad=false", f"--gpu-name={arch}", text, "-o", folder / "kernel.cubin"]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    lines = re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads", log)
    assert lines, f"ptxas does not speak of spills: {log}"
    return [line for line in lines if re.search(r"[1-9]\d* bytes", line)]


def check(ptx: str, folder: Path) -> None:
    assert violations(ptx, sums_are_marked=True) == []
    assert spills(ptx, folder) == []


@pytest.mark.parametrize(("dtype", "sm"), TARGETS, ids=str)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_encode(dtype: torch.dtype, sm: int, stochastic: bool, tmp_path: Path) -> None:
    ptx = blockwise_ptx("encode", dtype, sm, stochastic=stochastic)
    check(ptx, tmp_path)
    assert min(widths(ptx, "ld.global")) >= 128
    # A scale has 32 bits, codes more.
    assert min(widths(ptx, "st.global")) >= 32
    assert max(widths(ptx, "st.global")) >= 128


@pytest.mark.parametrize(("dtype", "sm"), TARGETS, ids=str)
@pytest.mark.parametrize("name", ["decode", "decode_sum"])
def test_decode(name: str, dtype: torch.dtype, sm: int, tmp_path: Path) -> None:
    ptx = blockwise_ptx(name, dtype, sm)
    check(ptx, tmp_path)
    assert min(widths(ptx, "ld.global")) >= 32
    assert max(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "st.global")) >= 128


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_reduce(sm: int, stochastic: bool, tmp_path: Path) -> None:
    ptx = blockwise_ptx("reduce", FLOAT32, sm, stochastic=stochastic)
    check(ptx, tmp_path)
    for access in ("ld.global", "st.global"):
        assert min(widths(ptx, access)) >= 32
        assert max(widths(ptx, access)) >= 128


@pytest.mark.parametrize("block", [32, 4096])
@pytest.mark.parametrize("name", ["encode", "decode", "decode_sum", "reduce"])
def test_smallest_and_largest_block(name: str, block: int, tmp_path: Path) -> None:
    check(blockwise_ptx(name, FLOAT32, 90, stochastic=True, block=block), tmp_path)


@pytest.mark.parametrize("n", ["i32", "i64"])
@pytest.mark.parametrize("name", ["encode", "decode", "decode_sum", "reduce"])
def test_any_length(name: str, n: str, tmp_path: Path) -> None:
    """A length that is no multiple of 16, or one beyond 2^31, is specialised otherwise."""
    check(blockwise_ptx(name, FLOAT32, 90, stochastic=True, n=n, multiples=("size",)), tmp_path)


@pytest.mark.parametrize(("dtype", "sm"), TARGETS, ids=str)
@pytest.mark.parametrize("rule", [ADAMW, SGD], ids=lambda rule: rule.name)
def test_elementwise(rule: ElementwiseRule, dtype: torch.dtype, sm: int, tmp_path: Path) -> None:
    ptx = elementwise_ptx(rule, dtype, sm)
    check(ptx, tmp_path)
    assert min(widths(ptx, "ld.global")) >= 128
    assert min(widths(ptx, "st.global")) >= 128


def test_division_and_root_are_ieee() -> None:
    found = set(opcodes(elementwise_ptx(ADAMW, FLOAT32, 90)))
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


def test_float64_is_seen() -> None:
    assert any("f64" in line for line in violations(small_ptx(in_float64, **EXACT), sums_are_marked=True))


def test_narrow_access_is_seen() -> None:
    """A length that may be no multiple of 16 keeps a mask from covering several elements."""
    ptx = blockwise_ptx("encode", FLOAT32, 90, multiples=())
    assert min(widths(ptx, "ld.global")) == 32


def test_spill_is_seen(tmp_path: Path) -> None:
    assert spills(blockwise_ptx("reduce", FLOAT32, 90, maxnreg=24), tmp_path)
