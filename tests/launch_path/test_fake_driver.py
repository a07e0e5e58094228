"""The fake driver: what it refuses, what it restores, and that it sees a kernel whose constants lost their annotation."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from triton.compiler.errors import CompilationError

from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.jit import _triton as jit
from bagua_kernels.jit.rule import rebuilt
from bagua_kernels.launchers import blockwise, elementwise
from bagua_kernels.launchers.blockwise import _triton_kernels
from bagua_kernels.launchers.elementwise import _triton as elementwise_triton
from bagua_kernels.rules.optimizers import ADAM
from bench.gpu import fake_driver
from tests.launch_path.calls import Shape, scalars

TEMPLATES = list(_triton_kernels.TEMPLATES.values())


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
def test_a_rebuilt_template_keeps_its_annotations(template):
    assert rebuilt(template, {}).__annotations__ == template.__annotations__ != {}


def test_a_kernel_without_annotations_is_refused(driver, monkeypatch):
    def forgetful(*arguments, **options):
        copy = rebuilt(*arguments, **options)
        copy.__annotations__ = {}
        return copy

    monkeypatch.setattr(jit, "rebuilt", forgetful)
    # Kernels made before have their annotations.
    monkeypatch.setattr(elementwise_triton, "kernel", elementwise_triton.kernel.__wrapped__)
    arrays = [Shape().vector() for _ in range(ADAM.arrays)]
    with pytest.raises(CompilationError) as caught:
        elementwise.apply(ADAM, arrays, [0.5] * scalars(ADAM))
    assert "constexpr" in str(caught.value.__cause__ or caught.value)


def test_backends_and_driver_are_restored():
    cpu, before = torch.device("cpu"), triton.runtime.driver._active
    inside = []

    def fail():
        with fake_driver.active() as driver:
            inside.append((blockwise.OP.backend(cpu).__name__, triton.runtime.driver.active is driver))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [("bagua_kernels.launchers.blockwise._triton", True)]
    assert triton.runtime.driver._active is before
    assert blockwise.OP.backend(cpu).__name__ == "bagua_kernels.launchers.blockwise._numba_cpu"


def test_drivers_share_no_kernels():
    compilations = []
    for _ in range(2):
        with fake_driver.active() as driver:
            MinMaxUInt8().encode(torch.zeros(1009))
        compilations.append(driver.compilations)
    assert compilations == [1, 1]


def test_nothing_is_launched_for_nothing(driver):
    codec = MinMaxUInt8()
    payload = codec.encode(torch.zeros(0))
    codec.decode(payload, torch.zeros(0))
    assert not driver.launches
    assert not driver.skipped


@pytest.mark.parametrize("grid", [(1 << 31, 1, 1), (-1, 1, 1), (1, 1 << 16, 1), (1, 1, 1 << 16), (1.0, 1, 1)])
def test_illegal_grids(grid):
    with pytest.raises(ValueError, match="grid of kernel 'some'"):
        fake_driver.check_grid("some", grid)


@pytest.mark.parametrize("grid", [((1 << 31) - 1, 65_535, 65_535), (0, 1, 1), (1, 1, 1)])
def test_legal_grids(grid):
    fake_driver.check_grid("some", grid)


def test_a_launch_without_programs_is_skipped(driver):
    arrays = [Shape().vector() for _ in range(ADAM.arrays)]
    run = elementwise_triton.kernel(ADAM, scalars(ADAM), (torch.float32,) * ADAM.arrays)
    options = {"BLOCK": elementwise_triton.BLOCK, "num_warps": 4, **jit.EXACT}
    run[(0,)](*arrays, *[0.5] * scalars(ADAM), 1009, **options)
    assert [skipped.grid for skipped in driver.skipped] == [(0, 1, 1)]
    assert not driver.launches
    with pytest.raises(ValueError, match="got"):
        run[(1 << 31,)](*arrays, *[0.5] * scalars(ADAM), 1009, **options)
