"""What the machine is, how fast it copies, and how it divides."""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import marks
from bench.gpu.stage import Context, check_gpu

MODULES = ("numpy", "torch", "triton", "numba", "llvmlite", "numba_cuda", "cupy", "pytest", "xdist", "pytest_timeout")
MORE_MODULES = ("hypothesis", "pytest_benchmark", "rich", "expecttest")


def version(name: str) -> str:
    """The version of a module, or why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return str(getattr(module, "__version__", "there"))


def output(*command: str, lines: int = 1) -> str:
    """The first lines of a command's output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join((done.stdout or done.stderr).strip().splitlines()[:lines])


def libnvvm() -> str:
    """Where Numba-CUDA finds libnvvm."""
    roots = ["/usr/local/cuda", *os.environ.get("CUDA_HOME", "").split()]
    found = [str(path) for root in roots for path in Path(root).glob("nvvm/lib64/libnvvm.so*")]
    return found[0] if found else output("sh", "-c", "ldconfig -p | grep libnvvm") or "not found"


def copy_roof(device: str, elements: int, rounds: int) -> float:
    """GB/s of a copy, counting what is read and what is written."""
    import torch

    x = torch.ones(elements, device=device)
    out = torch.empty_like(x)
    seconds = []
    for _ in range(rounds + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out.copy_(x)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(seconds[3:]) / 1e9


def quotients(device: str) -> dict[str, int]:
    """How many elements of a quotient by 3 differ from the CPU's: by a number, and by a tensor on the device."""
    import torch

    x = torch.arange(1.0, 1e6)
    expected = x / 3
    on_device = x.to(device)
    return {
        "by a number": int(((on_device / 3).cpu() != expected).sum()),
        "by a tensor": int(((on_device / torch.tensor(3.0, device=device)).cpu() != expected).sum()),
    }


def watch() -> str:
    """Returns "on" if optimizers find moved tensors by reading PyTorch's objects in memory, else "off"."""
    from bagua_kernels.optim.watch import sweep

    return "off" if sweep.fields() is None else "on"


def attempt(name: str, look: Callable[[], Any]) -> Any:
    """A figure, or the error that it raised; the other facts do not depend on it."""
    try:
        value = look()
    except Exception as error:
        value = f"{type(error).__name__}: {error}"[:300]
    marks.figures({name: value})
    return value


def run(context: Context) -> None:
    """Prints all facts; nothing here is required but the GPU."""
    versions = {name: version(name) for name in (*MODULES, *MORE_MODULES)}
    marks.figures({"versions": versions})
    print(versions, flush=True)
    if context.on_gpu:
        check_gpu()
        import torch

        properties = torch.cuda.get_device_properties(0)
        card = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        card = "no GPU"
    marks.headline(card)
    attempt("card", lambda: card)
    print(output("nvidia-smi", "-q", lines=30), flush=True)
    attempt("driver", lambda: output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    attempt("gcc", lambda: output("gcc", "--version"))
    attempt("nvcc", lambda: (output("nvcc", "--version", lines=4) or "not found").splitlines()[-1])
    attempt("compute-sanitizer", lambda: shutil.which("compute-sanitizer") or "not found")
    attempt("libnvvm", libnvvm)
    attempt("CUDA_HOME", lambda: os.environ.get("CUDA_HOME", ""))
    attempt("cores", lambda: len(os.sched_getaffinity(0)))
    looks = attempt("watch", watch)
    elements, rounds = (1 << 14, 2) if context.small else (1 << 28, 20)
    roof = attempt("copy GB/s", lambda: round(copy_roof(context.device, elements, rounds), 1))
    divided = attempt("quotients that differ", lambda: quotients(context.device))
    marks.row(
        ", ".join(
            f"{name} {versions[name][:40]}" for name in ("torch", "triton", "numba", "numba_cuda", "cupy", "numpy")
        )
    )
    marks.row(
        f"copy of {4 * elements / 2**20:.0f} MiB: {roof} GB/s; watch of optimizers: {looks}; quotients that differ: {divided}"
    )
    marks.headline(f"{card}; copy {roof} GB/s")
    if looks != "on":
        raise marks.Differs(f"the watch of optimizers is {looks}: no step of many tensors is fast")
