"""Numba-CUDA compiles every kernel without a GPU, and the code is exact and free of local memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, RowSum
from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, MASTER, Variant
from bagua_kernels.rules.floats import NATURAL, fp8
from bagua_kernels.rules.gossip import ADDED, CHOCO, DCD, DCD_TOTAL
from bagua_kernels.rules.magnitude import absmax, euclidean
from bagua_kernels.rules.messages import FEEDBACK, MessageRule
from bagua_kernels.rules.optimizers import ADAM, LAMB_MOMENTS, RADAM, SGD, ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer, minmax
from bagua_kernels.rules.signs import SIGN_TWO_MEANS, two_magnitudes
from tests.ahead_of_time.ptx import count, opcodes, target, violations

pytest.importorskip("numba_cuda", reason="needs numba_cuda")
if knobs.CUDA_SIMULATOR.get():
    pytest.skip("Numba's CUDA simulator compiles nothing", allow_module_level=True)

# First, since it imports numba-cuda beside any NumPy.
from bagua_kernels.jit._numba_cuda_package import cuda  # isort: skip
from numba.cuda import types
from numba.cuda.cudadrv import nvvm
from numba.cuda.cudadrv.error import NvvmSupportError

from bagua_kernels.jit import _numba_cuda as jit
from bagua_kernels.launchers.blockwise import _numba_cuda as blockwise
from bagua_kernels.launchers.blockwise.fusion import _numba_cuda as fusion
from bagua_kernels.launchers.chunks import Record
from bagua_kernels.launchers.chunks import _numba_cuda as chunks
from bagua_kernels.launchers.elementwise import _numba_cuda as elementwise
from bagua_kernels.launchers.multitensor import _numba_cuda as multitensor
from tests.grids import grid, noted, only

try:
    nvvm.NVVM()
except NvvmSupportError as error:
    pytest.skip(f"needs libnvvm: {error}", allow_module_level=True)

RULES = (
    *(minmax(2), absmax(8, 127), euclidean(4, 7), absmax(2, 1), SIGN_TWO_MEANS, two_magnitudes(256), NATURAL),
    *(fp8(3, False), fp8(2, True)),
)
# One rule for each shape of a kernel: the words of a scale, what is searched and summed for it, and how blocks are split.
KINDS = list({(rule.words, rule.extremes, rule.sums, rule.splits): rule for rule in reversed(RULES)}.values())
FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# What a launcher passes for an element of a dtype: bfloat16 goes as its bits.
ELEMENTS = {FLOAT64: types.float64, FLOAT32: types.float32, FLOAT16: types.float16, BFLOAT16: types.uint16}
# Other dtypes differ in their loads and stores, so that one architecture shows them.
TARGETS = only(
    [(FLOAT32, 80), (FLOAT32, 90), (FLOAT32, 100), (FLOAT16, 90), (BFLOAT16, 90)],
    *[(FLOAT32, 90), (BFLOAT16, 90)],
)

# A form of the records of chunked top-k, and what its kernel may read beside a vector: a residual, and `start`.
WHOLE = Record(64, 4096)
SOURCES = only([(False, False), (True, False), (True, True)], (True, True))


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[SimpleNamespace]:
    """Stands in for the current GPU, whose architecture device functions are compiled for as a kernel meets them."""
    fake = SimpleNamespace(compute_capability=(9, 0))
    caches = (jit.compile_rule, blockwise.bound, blockwise.kernel, elementwise.kernel, multitensor.kernel)
    caches += (fusion.message_kernel, fusion.apply_kernel, chunks.kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba.cuda.dispatcher.get_current_device", lambda: fake)
        yield fake
    # What was compiled for another device than the one here, if there is one, must not be launched on it.
    for cache in caches:
        cache.cache_clear()


def compiled(kernel: Any, signature: tuple[Any, ...], sm: int, device: SimpleNamespace) -> str:
    device.compute_capability = divmod(sm, 10)
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=device.compute_capability)
    assert target(ptx) == f"sm_{sm}"
    return ptx


def blockwise_ptx(
    name: str,
    dtype: torch.dtype,
    sm: int,
    device: SimpleNamespace,
    *,
    stochastic: bool = False,
    block: int = 256,
    rule: BlockQuantizer | None = None,
) -> str:
    kernel = blockwise.kernel(name, rule or minmax(8), block, dtype, stochastic)
    arrays = {"x": ELEMENTS[dtype], "out": ELEMENTS[dtype], "words": types.int32, "out_words": types.int32}
    arrays |= {"weights": types.float32, "counts": types.int32}
    arrays |= {"codes": types.uint8, "out_codes": types.uint8}
    signature = []
    for argument in inspect.signature(kernel.py_func).parameters:
        if argument in arrays:
            signature.append(arrays[argument][::1])
        else:
            signature.append(types.float32 if argument in ("scale", "divisor") else types.int64)
    return compiled(kernel, tuple(signature), sm, device)


def fused_ptx(kernel: Any, dtypes: Mapping[int, torch.dtype], sm: int, device: SimpleNamespace) -> str:
    """The PTX of a kernel of a rule around a quantizer, with the dtypes of its arrays."""
    known = {"words": types.int32, "codes": types.uint8, "counts": types.int32}
    known |= {"weights": types.float32, "replicas": types.float32}
    known |= {f"a{i}": ELEMENTS[dtype] for i, dtype in dtypes.items()}
    signature = [
        known[argument][::1]
        if argument in known
        else types.float32
        if argument in ("scale", "divisor") or re.fullmatch(r"s\d", argument)
        else types.int64
        for argument in inspect.signature(kernel.py_func).parameters
    ]
    return compiled(kernel, tuple(signature), sm, device)


def elementwise_ptx(rule: ElementwiseRule, dtype: torch.dtype, sm: int, device: SimpleNamespace) -> str:
    scalars = len(inspect.signature(rule.function).parameters) - rule.arrays
    kernel = elementwise.kernel(rule, scalars, (dtype,) * rule.arrays)
    scalar = types.float64 if dtype == FLOAT64 else types.float32
    return compiled(kernel, (ELEMENTS[dtype][::1],) * rule.arrays + (scalar,) * scalars, sm, device)


@grid(stochastic={"nearest": False, "stochastic": True}, dtype__sm=TARGETS, cover=1, most=1)
def test_encode(dtype: torch.dtype, sm: int, stochastic: bool, device: SimpleNamespace) -> None:
    ptx = blockwise_ptx("encode", dtype, sm, device, stochastic=stochastic)
    assert violations(ptx, sums_are_marked=False) == []
    assert {"mul.rn.f32", "div.rn.f32"} <= set(opcodes(ptx))


@grid(name=["decode", "decode_sum"], dtype__sm=TARGETS, cover=1, most=1)
def test_decode(name: str, dtype: torch.dtype, sm: int, device: SimpleNamespace) -> None:
    ptx = blockwise_ptx(name, dtype, sm, device)
    assert violations(ptx, sums_are_marked=False) == []
    assert {"mul.rn.f32", "div.rn.f32"} <= set(opcodes(ptx))


@grid(stochastic=only([False, True], True), sm=only([80, 90, 100], 80), cover=1, most=1)
def test_reduce(sm: int, stochastic: bool, device: SimpleNamespace) -> None:
    assert violations(blockwise_ptx("reduce", FLOAT32, sm, device, stochastic=stochastic), sums_are_marked=False) == []


@pytest.mark.slow
@grid(name=only(["encode", "decode", "decode_sum", "reduce"], "encode", "decode_sum"), block=[32, 4096], cover=1)
def test_smallest_and_largest_block(name: str, block: int, device: SimpleNamespace) -> None:
    ptx = blockwise_ptx(name, FLOAT32, 90, device, stochastic=True, block=block)
    assert violations(ptx, sums_are_marked=False) == []


@pytest.mark.slow
@grid(message={message.name: message for message in [CHOCO, DCD_TOTAL]}, dtype=[FLOAT32, BFLOAT16], cover=1)
def test_rules_before_encoding(message: MessageRule, dtype: torch.dtype, device: SimpleNamespace) -> None:
    dtypes = (dtype, *(FLOAT32,) * (message.arrays - 1))
    kernel = fusion.message_kernel(minmax(8), 256, message, dtypes, True, False)
    assert violations(fused_ptx(kernel, dict(enumerate(dtypes)), 90, device), sums_are_marked=False) == []


@pytest.mark.slow
@grid(weighted__divided=only([(False, False), (False, True), (True, False), (True, True)], (True, False)))
def test_sums_of_replicas_before_encoding(weighted: bool, divided: bool, device: SimpleNamespace) -> None:
    rows = RowSum(weighted, divided)
    kernel = fusion.message_kernel(minmax(8), 256, DCD, (FLOAT32, FLOAT32), True, False, rows)
    assert violations(fused_ptx(kernel, {0: FLOAT32, 1: FLOAT32}, 90, device), sums_are_marked=False) == []


@grid(counted=[False, True], divided=[False, True], cover=1)
def test_rules_after_decoding(counted: bool, divided: bool, device: SimpleNamespace) -> None:
    mixture = Mixture(weighted=not divided, divided=divided, tracked=True, counted=counted)
    kernel = fusion.apply_kernel(minmax(4), 256, ADDED, 0, mixture, (FLOAT32,))
    assert violations(fused_ptx(kernel, {0: FLOAT32}, 90, device), sums_are_marked=False) == []


@pytest.mark.slow
@grid(rule={rule.name: rule for rule in RULES})
def test_every_rule(rule: BlockQuantizer, device: SimpleNamespace) -> None:
    """All kernels of one rule of each kind, and the two in which the other rules differ from it."""
    for name in ("encode", "feedback", "decode", "decode_sum", "reduce") if rule in KINDS else ("encode", "decode"):
        with noted(name):
            check_kernel(rule, name, device)


def check_kernel(rule: BlockQuantizer, name: str, device: SimpleNamespace) -> None:
    if name == "feedback":
        kernel = fusion.message_kernel(rule, 256, FEEDBACK, (FLOAT32, FLOAT32), rule.bits > 1, False)
        ptx = fused_ptx(kernel, {0: FLOAT32, 1: FLOAT32}, 90, device)
    else:
        ptx = blockwise_ptx(name, FLOAT32, 90, device, stochastic=rule.bits > 1, rule=rule)
    assert violations(ptx, sums_are_marked=False) == []


def multitensor_ptx(variant: Variant, sm: int, device: SimpleNamespace) -> str:
    real = types.float64 if variant.double else types.float32
    tables = (real[:, ::1], types.uint32[:, ::1], types.int64, types.float64[:, ::1])
    columns = (ELEMENTS[dtype][::1] for dtype in variant.dtypes)
    return compiled(multitensor.kernel(variant), (*tables, *columns), sm, device)


@pytest.mark.slow
@grid(residual__start=SOURCES, dtype__sm=TARGETS, cover=1, most=1)
def test_encoding_of_chunks(residual: bool, start: bool, dtype: torch.dtype, sm: int, device: SimpleNamespace) -> None:
    kernel = chunks.kernel("encode", WHOLE, dtype, residual, start)
    floats, counts = (types.float32[::1],) * 2, (types.int64,) * 2
    signature = (ELEMENTS[dtype][::1], *floats, types.uint32[:, ::1], types.float32, *counts)
    assert violations(compiled(kernel, signature, sm, device), sums_are_marked=False) == []


@grid(
    record=only([WHOLE, Record(1, 32), Record(4096, 4096)], WHOLE), counted=only([False, True], True), cover=1, most=1
)
def test_sums_of_chunks(record: Record, counted: bool, device: SimpleNamespace) -> None:
    kernel = chunks.kernel("add", record, FLOAT32, counted)
    floats, integers = types.float32[::1], types.int32[::1]
    signature = (types.uint32[:, ::1], floats, integers, integers, types.int64, types.int64)
    assert violations(compiled(kernel, signature, 90, device), sums_are_marked=False) == []


def uncontracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the compiler from contracting, for which Numba-CUDA itself has no switch, and forgets what it compiled."""
    compile_ir = nvvm.compile_ir
    monkeypatch.setattr(nvvm, "compile_ir", lambda ir, **options: compile_ir(ir, **options, fma=False))
    for cache in (jit.compile_rule, elementwise.kernel, multitensor.kernel):
        cache.cache_clear()


def check_update(make: Callable[[], str], real: str, monkeypatch: pytest.MonkeyPatch, *, summing: bool = False) -> None:
    """Only what a rule asks to be rounded once is: as much as where contracting is forbidden."""
    ptx = make()
    with monkeypatch.context() as patch:
        uncontracted(patch)
        plain = make()
    assert count(plain, "fma", real) > 0
    fused = count(plain, "fma", real)
    assert violations(ptx, sums_are_marked=False, real=real, fused=fused, summing=summing) == []
    for name in ("mul", "div", "sqrt"):
        assert count(ptx, name, real) == count(plain, name, real)


@pytest.mark.slow
@grid(rule={rule.name: rule for rule in [ADAM, SGD]}, dtype__sm=[*TARGETS, (FLOAT64, 90)], cover=1, most=1)
def test_elementwise(
    rule: ElementwiseRule, dtype: torch.dtype, sm: int, device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = "f64" if dtype == FLOAT64 else "f32"
    check_update(lambda: elementwise_ptx(rule, dtype, sm, device), real, monkeypatch)
    if rule is ADAM:
        found = opcodes(elementwise_ptx(rule, dtype, sm, device))
        assert {f"{name}.rn.{real}" for name in ("mul", "div", "sqrt")} <= set(found)


VARIANTS = {
    "adam": Variant(ADAM, (FLOAT32,) * 4, 8),
    "adam, float64": Variant(ADAM, (FLOAT64,) * 4, 8),
    "adam, stochastic": Variant(ADAM, (BFLOAT16, BFLOAT16, FLOAT32, FLOAT32), 8, (), True),
    "adam, extras": Variant(
        ADAM,
        (BFLOAT16, FLOAT16, FLOAT32, FLOAT32, FLOAT32, BFLOAT16, FLOAT32),
        8,
        (MASTER, COMPENSATION, AVERAGE),
    ),
    "radam": Variant(RADAM, (FLOAT32,) * 4, 10),
    "lamb_moments": Variant(LAMB_MOMENTS, (FLOAT32,) * 4, 7),
}


MULTITENSOR = only(
    [("adam", 80), ("adam", 100), *((name, 90) for name in VARIANTS)],
    *[("adam, float64", 90), ("adam, stochastic", 90), ("lamb_moments", 90)],
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sm"), MULTITENSOR, ids=str)
def test_multitensor(name: str, sm: int, device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS[name]
    real = "f64" if variant.double else "f32"
    check_update(lambda: multitensor_ptx(variant, sm, device), real, monkeypatch, summing=variant.rule.sums > 0)


def in_place(x, y):
    x *= y
    return x + y


def test_products_in_place_are_not_contracted(device: SimpleNamespace) -> None:
    rule = jit.compile_rule(in_place)

    def kernel(x, y):
        y[0] = rule(x[0], x[1])

    array = types.float32[::1]
    ptx = compiled(cuda.jit(kernel), (array, array), 90, device)
    assert violations(ptx, sums_are_marked=False) == []
    assert "mul.rn.f32" in opcodes(ptx)


def test_contraction_is_seen(device: SimpleNamespace) -> None:
    def product_and_sum(x, y):
        y[0] = x[0] * x[0] + x[0]

    array = types.float32[::1]
    assert violations(compiled(cuda.jit(product_and_sum), (array, array), 90, device), sums_are_marked=False)


def test_float64_is_seen(device: SimpleNamespace) -> None:
    def promoted(x, y):
        y[0] = x[0] + 0.1

    array = types.float32[::1]
    found = violations(compiled(cuda.jit(promoted), (array, array), 90, device), sums_are_marked=False)
    assert any("f64" in line for line in found)


def test_local_memory_is_seen(device: SimpleNamespace) -> None:
    def indexed(x, y):
        held = cuda.local.array(64, types.float32)
        for i in range(64):
            held[i] = x[i]
        y[0] = held[int(x[64])]

    array = types.float32[::1]
    found = violations(compiled(cuda.jit(indexed), (array, array), 90, device), sums_are_marked=False)
    assert any("local" in line for line in found)
