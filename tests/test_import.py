"""What `import bagua_kernels` costs: nothing that a machine without a GPU would not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_kernels

ROOT = Path(__file__).parents[1]
OPTIONAL_PACKAGES = ("triton", "cupy", "numba.cuda", "numba_cuda", "matplotlib")


def run(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("module", ["bagua_kernels", "bagua_kernels.comm", "bagua_kernels.algorithms"])
def test_import_leaves_optional_packages_alone(module: str) -> None:
    # torch itself may import some of them; what counts is what comes on top of it.
    program = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        f"import {module}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = set(json.loads(run(program)))
    assert module in loaded
    assert sorted(loaded & set(OPTIONAL_PACKAGES)) == []


@pytest.mark.parametrize("module", ["comm", "compression", "optim", "algorithms"])
def test_import_leaves_the_compiler_alone(module: str) -> None:
    """Numba takes half a second to import: it is loaded when the first kernel is needed."""
    assert run(f"import sys, torch\nimport bagua_kernels.{module}\nprint('numba' in sys.modules)") == "False\n"


def test_import_is_fast() -> None:
    program = (
        "import time, torch\nstart = time.process_time()\nimport bagua_kernels\nprint(time.process_time() - start)"
    )
    assert min(float(run(program)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("name", ["algorithms.ByteGrad", "comm.init", "compression.MinMaxUInt8", "optim.AdamW"])
def test_parts_are_there_after_importing_the_package_alone(name: str) -> None:
    output = run(
        f"import bagua_kernels\nassert {name.split('.')[0]!r} in dir(bagua_kernels)\nprint(bagua_kernels.{name})"
    )
    assert name.split(".")[1] in output


def test_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'optimizers'; its parts are algorithms, comm"):
        _ = bagua_kernels.optimizers
