"""Every launch binds, specialises, compiles for a GPU and has a legal grid, through Triton's own path and without a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from bagua_kernels import knobs

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from bagua_kernels.optim import AdamW, Extras
from bench.gpu.ahead_of_time import CODECS, POINTERS
from bench.gpu.fake_driver import FakeDriver, Kernel
from tests.grids import grid, only
from tests.launch_path.calls import BFLOAT16, BLOCKWISE, FLOAT16, FLOAT32, LONG, ODD, OPTIMIZERS, OTHERS, Call, Shape

DTYPES = (FLOAT32, FLOAT16, BFLOAT16)
PLACES = {"one": (1, 0), "many": (1009, 0), "odd": (1009, ODD), "long": (LONG + 17, 0)}
NAMED_CODECS = {repr(codec).replace(" ", ""): codec for codec in CODECS}
CODEC = CODECS[0]
# Shared scales have the kernels of a rank's own ones, but fewer calls.
OWN_CODECS = {name: codec for name, codec in NAMED_CODECS.items() if not getattr(codec, "shared", False)}
# One call of each kernel that a block codec has beside those for `encode` and `decode`.
BLOCKWISE_ONCE = ("encode_pieces", "encode_feedback", "decode_sum", "decode_apply", "reduce")
# One call of each kernel of the other launchers; both paths of `place` are in one kernel.
OTHERS_ONCE = (
    "apply_adam",
    "select_write",
    "select_place",
    "select_permuted",
    "chunks_encode",
    "chunks_add",
    "update_many",
)


def launched(driver: FakeDriver, call: Call, *arguments: Any) -> list[Kernel]:
    """Makes a call twice, and returns the kernels of the first one, after checks that hold for any launch."""
    call.run(*arguments)
    launches = list(driver.launches)
    assert {launch.kernel.name for launch in launches} == set(call.kernels)
    assert not driver.skipped, "a launch had no programs"
    kernels = list(driver.kernels)
    for kernel in kernels:
        check_constants(kernel)
    call.run(*arguments)
    assert driver.kernels == kernels, "the same call once more compiled a kernel again"
    assert driver.launches[len(launches) :] == launches
    return kernels


def check_constants(kernel: Kernel) -> None:
    """Asserts that what templates name in capitals is part of the kernel, and that pointers and seeds are not."""
    capitals = {name for name in kernel.signature if name.isupper()}
    assert capitals, f"{kernel.name} has no constants"
    for name, kind in kernel.signature.items():
        if name in capitals:
            assert kind == "constexpr", f"{name} of {kernel.name} was passed as {kind}"
            assert name in kernel.constants
        if name.endswith("_ptr"):
            assert kind.startswith("*"), f"{name} of {kernel.name} was passed as {kind}"


@grid(codec=NAMED_CODECS)
def test_each_codec_encodes_and_decodes(driver, codec):
    for call in BLOCKWISE:
        if call.__name__ in ("encode", "decode"):
            call.run(codec, Shape())
    assert driver.launched == {"encode_kernel", "decode_kernel"}
    assert driver.compilations == 2
    for kernel in driver.kernels:
        check_constants(kernel)


@grid(call=[call for call in BLOCKWISE if call.__name__ in BLOCKWISE_ONCE])
def test_each_kernel_of_a_codec(driver, call):
    launched(driver, call, CODEC, Shape())


@grid(call=[call for call in OTHERS if call.__name__ in OTHERS_ONCE])
def test_each_kernel_of_other_launchers(driver, call):
    launched(driver, call, Shape())


@pytest.mark.slow
@grid(most=2, call=BLOCKWISE, codec=OWN_CODECS, dtype=DTYPES, place=PLACES, ranks=[1, 3])
def test_every_kernel_of_every_codec(driver, call, codec, dtype, place, ranks):
    shape = Shape(dtype, *place, ranks)
    check_types(launched(driver, call, codec, shape), call, shape)


@pytest.mark.slow
@grid(call=OTHERS, dtype=DTYPES, place=PLACES)
def test_every_kernel_of_other_launchers(driver, call, dtype, place):
    shape = Shape(dtype, *place)
    check_types(launched(driver, call, shape), call, shape)


def check_types(kernels: list[Kernel], call: Call, shape: Shape) -> None:
    """Asserts that kernels get pointers to the dtype, lengths of 64 bits where they need them, and no false alignment."""
    if call.typed:
        assert any(POINTERS[shape.dtype] in kernel.signature.values() for kernel in kernels)
    for kernel in kernels:
        if "n" in kernel.signature:
            expected = ("i64",) if shape.n >= LONG else ("i32", "constexpr") if shape.n == 1 else ("i32",)
            assert kernel.signature["n"] in expected
        vectors = {"x_ptr", "out_ptr", "a0_ptr"} & kernel.signature.keys()
        assert vectors.isdisjoint(kernel.aligned) if shape.odd else vectors <= kernel.aligned


@grid(name=only(OPTIMIZERS, "AdamW", "LAMB"))
def test_optimizers_step(driver, name):
    step_twice(driver, name, FLOAT32, 0)


@pytest.mark.slow
@grid(name=list(OPTIMIZERS), dtype=DTYPES, odd=[0, ODD])
def test_optimizers_step_with_each_dtype(driver, name, dtype, odd):
    step_twice(driver, name, dtype, odd)


def step_twice(driver: FakeDriver, name: str, dtype: torch.dtype, odd: int) -> None:
    sizes = (1, 16, 5000)
    parameters = [torch.nn.Parameter(torch.ones(size + odd, dtype=dtype)[odd:]) for size in sizes]
    optimizer = OPTIMIZERS[name](parameters)
    with warnings.catch_warnings():
        # PyTorch's own step would be used with a warning, which is an error here.
        warnings.simplefilter("error")
        step(optimizer, parameters, odd)
        compilations = driver.compilations
        assert {"over_pieces"} <= driver.launched <= {"over_pieces", "sum_pieces"}
        for kernel in driver.kernels:
            check_constants(kernel)
        step(optimizer, parameters, odd)
        assert driver.compilations == compilations, "a second step compiled a kernel"


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], odd: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.numel() + odd, dtype=parameter.dtype)[odd:]
    optimizer.step()


@pytest.mark.slow
@grid(precision=["nearest", "stochastic", "master", "kahan"], average=[None, 0.99])
def test_extras_of_optimizers(driver, precision, average):
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=BFLOAT16)) for size in (1, 5000)]
    optimizer = AdamW(parameters, extras=Extras(precision=precision, average=average))
    step(optimizer, parameters, 0)
    assert driver.launched == {"over_pieces"}


@pytest.mark.slow
def test_a_step_from_payloads_and_a_clipped_step(driver):
    parameters = [torch.nn.Parameter(torch.ones(5000))]
    optimizer = AdamW(parameters)
    payloads = torch.zeros(2, CODEC.payload_size(5000), dtype=torch.uint8)
    optimizer.step_from_encoded(CODEC, {parameters[0]: payloads}, scale=0.5)
    assert driver.launched == {"apply_kernel"}
    parameters[0].grad = torch.ones(5000)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert driver.launched >= {"over_pieces"}


@grid(call=only(BLOCKWISE, BLOCKWISE[0]))
def test_a_long_vector(driver, call):
    shape = Shape(FLOAT32, LONG + 17)
    check_types(launched(driver, call, CODEC, shape), call, shape)
