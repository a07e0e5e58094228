"""Versions of this package and of those that it uses, and the devices of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

import bagua_kernels
from bagua_kernels.command.output import show_json, show_rows

# By the name of each package, the distributions that may have it.
_PACKAGES = {
    "torch": ("torch",),
    "numba": ("numba",),
    "triton": ("triton", "pytorch-triton"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
}


def versions() -> dict[str, str | None]:
    """Returns versions by name; None for what is not installed."""
    found: dict[str, str | None] = {"bagua-kernels": bagua_kernels.__version__, "python": platform.python_version()}
    return found | {name: _installed(distributions) for name, distributions in _PACKAGES.items()}


def devices() -> dict[str, str]:
    """Returns the devices that tensors can be on, with what they are."""
    found = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        found[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    return found


def show(as_json: bool) -> None:
    """Prints both."""
    found: dict[str, dict[str, Any]] = {"versions": versions(), "devices": devices()}
    if as_json:
        show_json(found)
        return
    lines = [(name, version or "not installed") for name, version in found["versions"].items()]
    lines += found["devices"].items()
    show_rows("Versions and devices", [{"name": name, "found": text} for name, text in lines])


def _installed(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
