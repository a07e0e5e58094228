"""Public names stay where they are, and names of one object stay names of one object."""

import importlib
import json
import warnings
from pathlib import Path
from types import ModuleType

import pytest

ALIASES = Path(__file__).parent / "public_names.json"
NAMES = Path(__file__).parent / "public_names.txt"
PACKAGES = [f"bagua_kernels.{part}" for part in ("algorithms", "comm", "compression", "data", "optim")]
WARNS = " warns"


def found(path: str) -> object:
    """Imports a module, or something in a module, by its dotted name."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(path)


def listed() -> list[str]:
    return [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]


def public(package: ModuleType) -> list[str]:
    own = [name for name, value in vars(package).items() if not isinstance(value, ModuleType)]
    return getattr(package, "__all__", [name for name in own if not name.startswith("_")])


def test_public_names_are_where_they_were() -> None:
    for names in json.loads(ALIASES.read_text()):
        first, *others = [found(name) for name in names]  # an ImportError names the module
        assert all(other is first for other in others), names


def test_listed_names_are_importable() -> None:
    """A warning is an error, but of the names that are marked."""
    for line in listed():
        with warnings.catch_warnings():
            if line.endswith(WARNS):
                warnings.simplefilter("ignore", DeprecationWarning)
            found(line.removesuffix(WARNS))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_listed(package: str) -> None:
    names = {line.removesuffix(WARNS) for line in listed()}
    exported = [f"{package}.{name}" for name in public(importlib.import_module(package))]
    assert [name for name in exported if name not in names] == [], f"add them to {NAMES.name}"


def test_a_name_that_is_gone_is_an_error() -> None:
    with pytest.raises(ImportError, match="LocalDescent"):
        found("bagua_kernels.algorithms.LocalDescent")
