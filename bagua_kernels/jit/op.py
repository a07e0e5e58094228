"""Chooses the backend of a launcher: by the tensor's device, or by `BAGUA_KERNELS_BACKEND`."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch

from bagua_kernels import knobs
from bagua_kernels.errors import BackendUnavailableError
from bagua_kernels.jit import compiling
from bagua_kernels.jit.log import warn_once

logger = logging.getLogger(__name__)

CUDA_EXTRA = "pip install 'bagua-kernels[cuda13]' (or [cuda12], after the driver's CUDA version)"


@dataclass(frozen=True)
class Backend:
    """One way to run a kernel.

    Attributes:
        name: as in `BAGUA_KERNELS_BACKEND`, and, with an underscore before it, the file in each launcher's folder.
        device_type: the tensors it serves, "cpu" or "cuda".
        package: what it needs to be importable.
        install: the command that installs the package.
        emulator: the switch that makes it run on CPU tensors, in Python, for tests.
        off: the switch that takes its compiler away.
    """

    name: str
    device_type: str
    package: str
    install: str
    emulator: knobs.Knob[bool] | None = None
    off: knobs.Knob[bool] | None = None

    def refusal(self, device: torch.device) -> str | None:
        """Why this backend cannot serve tensors on `device`; None if it can."""
        if self.emulator is not None and self.emulator.get():
            serves: tuple[str, ...] = ("cpu", self.device_type) if self.name == "triton" else ("cpu",)
        else:
            serves = (self.device_type,)
        if device.type not in serves:
            return f"{self.name} serves {' and '.join(serves)} tensors, got one on {device}"
        if self.off is not None and self.off.get():
            return f"{self.name} compiles nothing where {self.off.variable}=1"
        if not _found(self.package):
            return f"{self.name} needs the package {self.package!r}: {self.install}"
        return None


@functools.cache
def _found(package: str) -> bool:
    # A search of all folders of packages, which some callers would start at each step.
    return find_spec(package) is not None


# In order of preference for a device.
BACKENDS = (
    Backend("numba_cpu", "cpu", "numba", "pip install numba", off=knobs.NUMBA_DISABLE_JIT),
    Backend("triton", "cuda", "triton", CUDA_EXTRA, knobs.TRITON_INTERPRET),
    Backend("numba_cuda", "cuda", "numba_cuda", CUDA_EXTRA, knobs.CUDA_SIMULATOR),
    # Rules as they are, which needs no compiler: the last resort on a CPU.
    Backend("numpy", "cpu", "numpy", "pip install numpy"),
)
_NUMBA_CPU, _CPU = BACKENDS[0], torch.device("cpu")


@dataclass(frozen=True)
class Op:
    """A launcher's door to its backends: the modules `_triton`, `_numba_cuda`, `_numba_cpu` and `_numpy` of one package.

    Attributes:
        package: the launcher's full module name.
        only: the name of the one backend that the launcher has, whatever `BAGUA_KERNELS_BACKEND` is; None if it has all.
    """

    package: str
    only: str | None = None

    def backend(self, device: torch.device) -> ModuleType:
        """The module that serves tensors on `device`, imported on first use.

        Raises:
            BackendUnavailableError: no backend can, or the one asked for cannot; the message has every reason.
        """
        choice = self.only or knobs.BACKEND.get()
        return _backend_module(self.package, device.type, choice, knobs.NUMBA_DISABLE_JIT.get())


def available(device: torch.device) -> list[str]:
    """The names of the backends that can serve tensors on `device`."""
    return [b.name for b in BACKENDS if b.refusal(device) is None]


def compiles_for_cpu() -> bool:
    """True if functions are compiled for the CPU: Numba is there and not off, and `BAGUA_KERNELS_BACKEND` is not numpy."""
    return knobs.BACKEND.get() != "numpy" and _NUMBA_CPU.refusal(_CPU) is None


@functools.cache
def _backend_module(package: str, device_type: str, choice: str, off: bool) -> ModuleType:
    # `off` is what refusals depend on beside the rest: the switch of Numba's compiler.
    device = torch.device(device_type)
    reasons: list[str] = []
    for backend in BACKENDS:
        if choice not in ("auto", backend.name):
            continue
        refusal = backend.refusal(device)
        if refusal is None:
            if backend.name == "numpy":
                _log_slow("; ".join(reasons))
            elif reasons and device_type == backend.device_type and choice == "auto":
                warn_once(logger, "kernels on %s use %s, because %s", device_type, backend.name, "; ".join(reasons))
            with compiling.loading():
                return importlib.import_module(f"{package}._{backend.name}")
        if device_type == backend.device_type or choice == backend.name:
            reasons.append(refusal)
    asked = "" if choice == "auto" else f" as {knobs.BACKEND.variable}={choice} asks"
    listed = "; ".join(reasons) or f"there are backends for cpu and cuda only, got {device_type}"
    raise BackendUnavailableError(f"no kernel backend for {device_type} tensors{asked}: {listed}")


def _log_slow(reasons: str) -> None:
    # Of all ranks one logs it; a process without a launcher is one by itself.
    if not knobs.RANK.get():
        warn_once(
            logger,
            "kernels on cpu are NumPy functions, which are many times as slow as compiled kernels and meant for debugging, "
            "because %s",
            reasons or f"{knobs.BACKEND.variable}=numpy",
        )
