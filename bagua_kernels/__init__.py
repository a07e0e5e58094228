"""JIT-compiled kernels for communication-relaxed distributed training, on Triton and Numba.

The parts are imported when they are first used: `import bagua_kernels`, then `bagua_kernels.optim.AdamW`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua_kernels import algorithms as algorithms
    from bagua_kernels import comm as comm
    from bagua_kernels import compression as compression
    from bagua_kernels import data as data
    from bagua_kernels import optim as optim

__version__ = "0.1.0"

_LEAST_TORCH = (2, 9)
_PARTS = ("algorithms", "comm", "compression", "data", "optim")


def _check_torch() -> None:
    """Raises if PyTorch is older than what this package is tested with; importing it takes a second, and is left to the parts."""
    loaded = sys.modules.get("torch")
    try:
        found = str(getattr(loaded, "__version__", "")) or importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # the import of a part fails, or finds one that was not installed as a package
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        raise ImportError(
            f"bagua_kernels needs PyTorch {least} or newer, got {found}: run pip install --upgrade 'torch>={least}'"
        )


_check_torch()


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its parts are {', '.join(_PARTS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
