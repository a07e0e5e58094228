"""What `import bagua_kernels` costs: nothing that a machine without a GPU would not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_kernels
from tests import limits

ROOT = Path(__file__).parents[1]
MODULES = [f"bagua_kernels{part}" for part in ("", ".compression", ".optim", ".comm", ".algorithms", ".data")]
PATIENCE = 500  # seconds; a busy machine takes minutes to import PyTorch
OPTIONAL_PACKAGES = ("triton", "cupy", "numba.cuda", "numba_cuda", "matplotlib")

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def run(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limits.seconds(PATIENCE),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_leaves_optional_packages_and_the_compiler_alone() -> None:
    """Numba takes half a second to import: it is loaded when the first kernel is needed. The package alone loads no part."""
    # torch itself may import some of them; what counts is what comes on top of it. Parts are imported one after the other.
    program = (
        "import importlib, json, sys, torch\n"
        "told, before = {}, set(sys.modules)\n"
        f"for module in {MODULES}:\n"
        "    importlib.import_module(module)\n"
        "    told[module] = sorted(set(sys.modules) - before)\n"
        "print(json.dumps(told))"
    )
    told = json.loads(run(program))
    assert told["bagua_kernels"] == ["bagua_kernels"]
    for module, loaded in told.items():
        assert module in loaded
        assert sorted({*loaded} & {*OPTIONAL_PACKAGES, "numba"}) == []


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
