"""Launches Triton kernels without a GPU, with CPU tensors: `python -m bench.gpu.fake_driver`.

The command prints the host's processor time per call and the number of compilations per call.

A launch passes through Triton's own code: binder, specialisation, compiler and assembler (ptxas). Only the last call is
replaced, which would put the kernel on a GPU. No kernel runs, so that outputs keep the values that they had.

    with fake_driver.active() as driver:
        MinMaxUInt8().encode(torch.zeros(1000))
    assert driver.compilations == 1
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from bagua_kernels import knobs
from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.jit import op
from bagua_kernels.jit._triton import EXACT
from bagua_kernels.launchers.elementwise import _triton as elementwise
from bagua_kernels.optim import AdamW
from bagua_kernels.optim.step import launch as step_launch
from bagua_kernels.rules.optimizers import ADAM
from bench import speed

TARGET = GPUTarget("cuda", 90, 32)
# CUDA's limits on the number of programs, by dimension ("Technical Specifications per Compute Capability" in its guide).
MOST_PROGRAMS = ((1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1)
# What an H100 offers one program: bytes of shared memory, registers, threads.
SHARED_BYTES, REGISTERS, THREADS = 227 << 10, 1 << 16, 1024
# Linux's flag for memory that counts only when it is touched; Python's `mmap` names it from 3.13 on.
MAP_NORESERVE = 0x4000


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel, as it would be loaded on a GPU.

    Attributes:
        name: the name of the template, such as "encode_kernel".
        signature: the type of each argument, such as "*fp32" or "i32"; "constexpr" if the value is part of the kernel.
        constants: the values of the arguments that are part of the kernel.
        aligned: the arguments that are multiples of 16, which the compiler relies on.
        warps: warps per program.
        shared: bytes of shared memory per program.
    """

    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]
    warps: int
    shared: int


class Launched(NamedTuple):
    """One launch.

    Attributes:
        kernel: the kernel.
        grid: the number of programs by dimension.
    """

    kernel: Kernel
    grid: tuple[int, int, int]


class FakeDriver(DriverBase):  # type: ignore[misc]
    """Stands in for Triton's driver of NVIDIA GPUs. Kernels are compiled for `TARGET` and launches are recorded.

    Attributes:
        kernels: the kernels that were compiled or read from the cache on disk, in order.
        launches: all launches, in order. Triton skips a launch without programs, so that it is in `skipped` instead.
        skipped: the launches without programs.
    """

    _devices = itertools.count(90_000)

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.launches: list[Launched] = []
        self.skipped: list[Launched] = []
        # Triton keeps compiled kernels by device. With a number of its own a driver neither sees kernels of another one, nor
        # leaves any for a GPU.
        self._device = next(self._devices)
        self.utils = self

    @property
    def compilations(self) -> int:
        """The number of kernels that Triton compiled, or read from its cache on disk."""
        return len(self.kernels)

    @property
    def launched(self) -> set[str]:
        """The names of all kernels that were launched."""
        return {launch.kernel.name for launch in self.launches}

    @classmethod
    def is_active(cls) -> bool:
        """False: Triton must not choose this driver by itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return TARGET

    def get_current_device(self) -> int:
        """A number that no GPU has."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of the tensors that launches get."""
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not used, since no launcher is compiled."""
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        """Not used, since no kernel runs."""
        raise NotImplementedError

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The limits that Triton checks a compiled kernel against."""
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Checks that there is machine code, and returns (module, function, registers, spills, most threads)."""
        if not binary.startswith(b"\x7fELF"):
            raise ValueError(f"kernel {name!r} must be an ELF file that ptxas made, got {binary[:16]!r}…")
        return object(), object(), REGISTERS // THREADS, 0, THREADS

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Returns what Triton calls to launch a compiled kernel."""
        names = source.fn.arg_names
        kernel = Kernel(
            name=source.fn.fn.__name__,
            signature=dict(source.signature),
            constants={names[path[0]]: value for path, value in source.constants.items()},
            aligned=frozenset(names[path[0]] for path, attributes in source.attrs.items() if attributes),
            warps=metadata.num_warps,
            shared=metadata.shared,
        )
        self.kernels.append(kernel)
        types = list(kernel.signature.values())
        pointers = [i for i, kind in enumerate(types) if kind.startswith("*")]
        checked = False

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            nonlocal checked
            grid = (x, y, z)
            check_grid(kernel.name, grid)
            if not checked:
                # Before the kernel's arguments are the stream, the function, two descriptions and two hooks.
                arguments = rest[6:]
                if len(arguments) != len(types):
                    raise TypeError(f"kernel {kernel.name!r} takes {len(types)} arguments, got {len(arguments)}")
                for i in pointers:
                    if not isinstance(arguments[i], torch.Tensor):
                        raise TypeError(
                            f"argument {names[i]!r} of kernel {kernel.name!r} must be a tensor, got {arguments[i]!r}"
                        )
                checked = True
            (self.launches if x and y and z else self.skipped).append(Launched(kernel, grid))

        return launch


def check_grid(name: str, grid: tuple[int, int, int]) -> None:
    """Raises ValueError if CUDA would refuse a grid, or if Triton would drop it because of a negative number."""
    for size, most in zip(grid, MOST_PROGRAMS, strict=True):
        if not isinstance(size, int) or not 0 <= size <= most:
            raise ValueError(f"the grid of kernel {name!r} must be whole numbers from 0 to {MOST_PROGRAMS}, got {grid}")


@contextlib.contextmanager
def active() -> Iterator[FakeDriver]:
    """Sends the launches of all public functions through Triton to a fake driver, for the length of a `with` block.

    CPU tensors then take the path of CUDA tensors, from the checks of a launcher to Triton's launch. The driver and the
    choice of backends are those of before at the end. Objects that a launcher has filled, such as optimizers, must not be used
    both inside and outside.
    """
    if knobs.TRITON_INTERPRET.get():
        raise RuntimeError(f"Triton's interpreter compiles nothing: unset {knobs.TRITON_INTERPRET.variable}")
    original = op._backend_module

    @functools.cache
    def through_triton(package: str, device_type: str, choice: str, off: bool) -> ModuleType:
        if choice in ("auto", "triton"):
            return importlib.import_module(f"{package}._triton")
        # A launcher that has no kernel of Triton.
        return original(package, device_type, choice, off)

    config = triton.runtime.driver
    # The property `active` would raise an error where there is no GPU.
    before = config._active
    driver = FakeDriver()
    config.set_active(driver)
    try:
        with mock.patch.object(op, "_backend_module", through_triton), knobs.override(knobs.BACKEND, "triton"):
            yield driver
    finally:
        config.set_active(before)


def untouched(n: int, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of `n` elements in memory that is not there before it is touched: 2^31 elements cost nothing."""
    size = max(1, n * dtype.itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype, count=n)


def host_microseconds(call: Callable[[], object], seconds: float = 0.5) -> tuple[float, float]:
    """The median and the least processor time of a call, in microseconds, of at least 5 calls and about `seconds`.

    The time is that of the calling thread, so that other work of the machine does not count.
    """
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e6, min(taken) * 1e6


class Measured(NamedTuple):
    """The costs of one kind of call.

    Attributes:
        name: the call.
        compilations: kernels compiled by the first call.
        first_seconds: the duration of the first call.
        first_cpu_seconds: the processor time of the first call, with that of ptxas.
        launches: launches per later call.
        microseconds: the median of the host's time per later call, without the launches themselves.
        least_microseconds: the least such time, for machines that have other work.
        again: kernels compiled by later calls.
    """

    name: str
    compilations: int
    first_seconds: float
    first_cpu_seconds: float
    launches: float
    microseconds: float
    least_microseconds: float
    again: int


def measured(name: str, driver: FakeDriver, call: Callable[[], object]) -> Measured:
    """Measures the first call and later ones."""
    before, wall, processor = driver.compilations, time.perf_counter(), sum(os.times()[:4])
    call()
    wall, processor = time.perf_counter() - wall, sum(os.times()[:4]) - processor
    compiled = driver.compilations
    driver.launches.clear()
    calls = itertools.count()

    def counted() -> None:
        next(calls)
        call()

    microseconds = host_microseconds(counted)
    launches = len(driver.launches) / next(calls)
    driver.launches.clear()
    return Measured(name, compiled - before, wall, processor, launches, *microseconds, driver.compilations - compiled)


def codec_calls(n: int = 4096, ranks: int = 2) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of a codec with their outputs given."""
    codec = MinMaxUInt8()
    x = torch.zeros(n)
    payloads = torch.zeros(ranks, codec.payload_size(n), dtype=torch.uint8)
    yield "MinMaxUInt8.encode", lambda: codec.encode(x, out=payloads[0])
    yield "MinMaxUInt8.decode", lambda: codec.decode(payloads[0], x)
    yield f"MinMaxUInt8.decode_sum, {ranks} payloads", lambda: codec.decode_sum(payloads, x)
    yield f"MinMaxUInt8.reduce, {ranks} payloads", lambda: codec.reduce(payloads, n, out=payloads[0])
    residual = torch.zeros(n)
    yield "MinMaxUInt8.encode_feedback", lambda: codec.encode_feedback(x, residual, out=payloads[0])


def bare_call() -> tuple[str, Callable[[], object]]:
    """Triton's launch of one kernel, without a launcher."""
    scalars = len(inspect.signature(ADAM.function).parameters) - ADAM.arrays
    kernel = elementwise.kernel(ADAM, scalars, (torch.float32,) * ADAM.arrays)
    arrays = [torch.zeros(elementwise.BLOCK) for _ in range(ADAM.arrays)]
    arguments = [*arrays, *[0.5] * scalars, elementwise.BLOCK]
    options = {"BLOCK": elementwise.BLOCK, "num_warps": 4, **EXACT}
    return f"JITFunction.run, {len(arguments) + 1} arguments", lambda: kernel[(1,)](*arguments, **options)


def optimizer_call(tensors: int, *, new_gradients: bool = False) -> Callable[[], object]:
    """A step of AdamW over small tensors."""
    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
    optimizer = AdamW(parameters, lr=1e-3)
    # Two sets are enough for gradients that are elsewhere in each step.
    sets = itertools.cycle([[torch.zeros(64) for _ in parameters] for _ in range(2)])
    for parameter, gradient in zip(parameters, next(sets), strict=True):
        parameter.grad = gradient

    def step() -> None:
        optimizer.step()

    def step_with_others() -> None:
        for parameter, gradient in zip(parameters, next(sets), strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step_with_others if new_gradients else step


def kernels_of_a_codec() -> None:
    """All kernels of a codec for two dtypes and two lengths."""
    codec = MinMaxUInt8()
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (1, 1009)):
        x, residual = torch.zeros(n, dtype=dtype), torch.zeros(n)
        payloads = torch.zeros(2, codec.payload_size(n), dtype=torch.uint8)
        codec.encode(x, out=payloads[0])
        codec.decode(payloads[0], x)
        codec.decode_sum(payloads, x)
        codec.reduce(payloads, n, out=payloads[0])
        codec.encode_feedback(x, residual, out=payloads[0])


def rows() -> Iterator[Measured]:
    """Measures all calls of the table, each with kernels of its own."""
    for name, call in (bare_call(), *codec_calls()):
        with active() as driver:
            yield measured(name, driver, call)
    for tensors in (10, 400, 2000):
        with active() as driver, mock.patch.object(step_launch, "watch", return_value=None):
            yield measured(f"AdamW, {tensors} tensors, without the watch", driver, optimizer_call(tensors))
        with active() as driver:
            yield measured(f"AdamW, {tensors} tensors", driver, optimizer_call(tensors))
        with active() as driver:
            name = f"AdamW, {tensors} tensors, other gradients"
            yield measured(name, driver, optimizer_call(tensors, new_gradients=True))
    with active() as driver:
        yield measured("MinMaxUInt8, 5 calls, 2 dtypes, n = 1 and 1009", driver, kernels_of_a_codec)


def table(results: Iterable[Measured], launch_microseconds: float) -> Table:
    """One row per call."""
    title = f"Triton {triton.__version__}, torch {torch.__version__}, no GPU: processor time of the host per call"
    grid = Table("call", title=title, title_justify="left")
    for heading in ("compiled", "first s", "first CPU s", "compiled later", "launches", "host µs", "least"):
        grid.add_column(heading, justify="right")
    grid.add_column(f"least and {launch_microseconds:g} µs per launch", justify="right")
    for row in results:
        numbers = (row.compilations, f"{row.first_seconds:.2f}", f"{row.first_cpu_seconds:.2f}", row.again)
        whole = row.least_microseconds + launch_microseconds * row.launches
        times = (row.microseconds, row.least_microseconds, whole)
        grid.add_row(row.name, *map(str, numbers), f"{row.launches:g}", *(f"{each:.0f}" for each in times))
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--launch-microseconds", type=float, default=4.0, help="what a real launch takes (default: 4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        results = list(rows())
    speed.console().print(table(results, options.launch_microseconds))
    if options.output:
        described = {"machine": speed.machine(), "triton": triton.__version__}
        speed.write(options.output, {**described, "rows": [row._asdict() for row in results]})


if __name__ == "__main__":
    main()
