"""JIT-compiled kernels for communication-relaxed distributed training, on Triton and Numba.

The parts are imported when they are first used: `import bagua_kernels`, then `bagua_kernels.optim.AdamW`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua_kernels import algorithms as algorithms
    from bagua_kernels import comm as comm
    from bagua_kernels import compression as compression
    from bagua_kernels import optim as optim

__version__ = "0.1.0"

_PARTS = ("algorithms", "comm", "compression", "optim")


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its parts are {', '.join(_PARTS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
