"""What `import bagua_kernels` costs: nothing that a machine without a GPU would not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_kernels

ROOT = Path(__file__).parents[1]
MODULES = [f"bagua_kernels{part}" for part in ("", ".compression", ".optim", ".comm", ".algorithms")]
OPTIONAL_PACKAGES = ("triton", "cupy", "numba.cuda", "numba_cuda", "matplotlib")


def run(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_leaves_optional_packages_and_the_compiler_alone() -> None:
    """Numba takes half a second to import: it is loaded when the first kernel is needed."""
    # torch itself may import some of them; what counts is what comes on top of it. Parts are imported one after the other.
    program = (
        "import importlib, json, sys, torch\n"
        "told, before = {}, set(sys.modules)\n"
        f"for module in {MODULES}:\n"
        "    importlib.import_module(module)\n"
        "    told[module] = sorted(set(sys.modules) - before)\n"
        "print(json.dumps(told))"
    )
    for module, loaded in json.loads(run(program)).items():
        assert module in loaded
        assert sorted({*loaded} & {*OPTIONAL_PACKAGES, "numba"}) == []


@pytest.mark.slow
def test_import_is_fast() -> None:
    program = (
        "import time, torch\nstart = time.process_time()\nimport bagua_kernels\nprint(time.process_time() - start)"
    )
    assert any(float(run(program)) < 0.3 for _ in range(3))


@pytest.mark.slow
def test_parts_are_there_after_importing_the_package_alone() -> None:
    program = "import bagua_kernels\nprint(*dir(bagua_kernels))\n"
    names = ("algorithms.ByteGrad", "comm.init", "compression.MinMaxUInt8", "optim.AdamW")
    parts, *classes = run(program + "".join(f"print(bagua_kernels.{name})\n" for name in names)).splitlines()
    for name, found in zip(names, classes, strict=True):
        assert name.split(".")[0] in parts.split()
        assert name.split(".")[1] in found


def test_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimizers'; its parts are algorithms, comm"):
        _ = bagua_kernels.optimizers
