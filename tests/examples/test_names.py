"""Files of examples are not found in place of packages, for a program's folder comes first in the path of imports."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Beside what is installed for tests: what programs like these import, or the libraries in them.
MORE = {
    "datasets",
    "evaluate",
    "kubeflow",
    "sky",
    "submitit",
    "torchvision",
    "wandb",
    "tensorboard",
    "deepspeed",
    "mpi4py",
}
FILES = sorted((ROOT / "examples").rglob("*.py"))


def packages() -> set[str]:
    lines = [line for file in ROOT.glob("constraints*.txt") for line in file.read_text().splitlines()]
    listed = {line.partition("==")[0].strip().lower().replace("-", "_") for line in lines if "==" in line}
    return {
        *listed,
        *MORE,
        *sys.stdlib_module_names,
        "bagua_kernels",
        "bench",
        "tests",
        "torch",
        "triton",
        "numba",
        "cupy",
    }


def test_no_file_has_the_name_of_a_package() -> None:
    assert len(FILES) > 10
    taken = packages()
    for file in FILES:
        assert file.stem.lower() not in taken, f"rename {file}: programs beside it would import it instead"
