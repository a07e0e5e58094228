"""The libraries that doors lead into, and the versions of them that were tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from typing import Any

# Of each package that doors import: its name for pip, the first tested version, and the first that is too new to be known.
TESTED = {
    "accelerate": ("accelerate", "1.15", "2"),
    "lightning": ("lightning", "2.6", "3"),
    "pytorch_lightning": ("pytorch-lightning", "2.6", "3"),
    "transformers": ("transformers", "5.23", "6"),
}


def library(module: str) -> Any:
    """Returns a module of another library, of which nothing is declared here.

    Args:
        module: its dotted name, such as "lightning.pytorch.strategies".

    Raises:
        ImportError: the library is not installed, or is older than what was tested.
    """
    package, first, end = TESTED[module.partition(".")[0]]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"{package} is not installed, which this module leads into: pip install '{package}>={first}'"
        ) from None
    if _numbers(found) < _numbers(first):
        raise ImportError(
            f"{package} {found} is older than what was tested, {first} and later: pip install '{package}>={first}'"
        )
    if _numbers(found) >= _numbers(end):
        warnings.warn(
            f"{package} {found} was not tested with this package, only {first} and later below {end}", stacklevel=2
        )
    return importlib.import_module(module)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
