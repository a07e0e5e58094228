"""Checks the kernels on this machine's GPU: contract tests, bytes compared with the CPU's, and speed beside a copy.

From the repository root: `make gpu-check`, or `PYTHONPATH=. python bench/gpu_check.py`. Ends with status 1 if there is no
GPU, a test fails or a comparison differs. `--device cpu` tries the program itself without a GPU, at tiny sizes, with one of
the emulators: TRITON_INTERPRET=1 or NUMBA_ENABLE_CUDASIM=1.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels import knobs
from bagua_kernels.compression import (
    FP8,
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    Codec,
    MinMaxUInt2,
    MinMaxUInt4,
    MinMaxUInt8,
    Natural,
    RandomK,
    Sign,
    TernGrad,
    ThresholdTopK,
    TopK,
    TwoMagnitudes,
)
from bagua_kernels.jit import op
from bench import optimizers, speed
from bench.workloads import groups as workloads

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/compression",
    "tests/launchers",
    "tests/optim/test_cuda.py",
    "tests/comm/backends/nccl/test_nccl_cuda.py",
)
# What the repository's pytest settings name, and an image with a PyTorch of its own may lack.
PLUGINS = ("pytest_timeout", "pytest_benchmark")

CPU = torch.device("cpu")
REFERENCE = "numba_cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RANKS = 3
SEED = 0xFEDC_BA98_7654_3210

# (elements, elements a block): around the pads of 16 bytes and the ends of blocks, and more than one wave of programs.
SHAPES = (
    *((n, 256) for n in (1, 15, 16, 17, 255, 256, 257, 1009, 16_387, 150_001, 4_000_037)),
    (1009, 32),
    (16_389, 4096),
)
TINY_SHAPES = ((75, 32),)
# Four times the second-level cache of the largest GPU so far, and more.
ELEMENTS = 64 << 20
TINY_ELEMENTS = workloads.BLOCK + 3
# Rows are launched while the GPU is kept waiting for this many cycles, so that launches cost no time between the events.
WAIT_CYCLES = 10_000_000


def values(kind: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector on the CPU, the same for every backend."""
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator, dtype=torch.float64)
    at = int(torch.randint(n, (), generator=generator))
    limits = torch.finfo(dtype)
    match kind:
        case "heavy":
            x = normal.sign() * (3 * torch.randn(n, generator=generator, dtype=torch.float64)).exp() * 1e-2
        case "offset":
            x = 1000 + normal
        case "equal":
            x = torch.full_like(normal, -0.3)
        case "tiny":
            x = normal * limits.tiny / 8
        case "huge":
            x = normal.clamp(-1, 1) * limits.max
        case "inf":
            x = normal.index_fill(0, torch.tensor([at]), -torch.inf)
        case "nan":
            x = normal.index_fill(0, torch.tensor([at]), torch.nan)
        case _:
            raise ValueError(f"unknown {kind=}")
    return x.to(dtype)


KINDS = ("heavy", "offset", "equal", "tiny", "huge", "inf", "nan")


@dataclass(frozen=True)
class Case:
    """One input of all operations."""

    kind: str
    dtype: torch.dtype
    n: int
    block: int

    def __str__(self) -> str:
        return f"{self.kind}, {name_of(self.dtype)}, n={self.n}, block={self.block}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def codecs(block: int) -> Iterator[tuple[str, Codec]]:
    """Every codec that has bytes of its own; the sparsifiers, which have no blocks, once."""
    yield from (
        ("minmax_uint8", MinMaxUInt8(block)),
        ("minmax_uint8, stochastic", MinMaxUInt8(block, stochastic=True)),
        ("minmax_uint4, stochastic", MinMaxUInt4(block, stochastic=True)),
        ("minmax_uint2", MinMaxUInt2(block)),
        ("absmax_int8", AbsMaxInt8(block)),
        ("absmax_int4", AbsMaxInt4(block)),
        ("qsgd, l2", QSGD(norm="l2", block=block)),
        ("terngrad", TernGrad(block)),
        ("sign", Sign(block)),
        ("sign, two means", Sign(block, two_means=True)),
        ("two_magnitudes", TwoMagnitudes(block)),
        ("natural", Natural(block)),
        ("fp8 e4m3", FP8("e4m3", block)),
        ("fp8 e5m2, stochastic", FP8("e5m2", block, stochastic=True)),
    )
    if block == SHAPES[0][1] or block == TINY_SHAPES[0][1]:
        yield "topk", TopK(0.05)
        yield "threshold_topk", ThresholdTopK(0.05)
        yield "randomk", RandomK(0.05)


def outputs(case: Case, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(operation, its result on the CPU) for the backend in force."""
    x = values(case.kind, case.n, case.dtype).to(device)
    for name, codec in codecs(case.block):
        payload = codec.encode(x, seed=SEED)
        yield f"encode, {name}", payload.cpu()
        out = torch.empty(case.n, dtype=case.dtype, device=device)
        yield f"decode, {name}", codec.decode(payload, out).cpu()
        payloads = torch.stack([payload, *(codec.encode(x.flip(0), seed=rank) for rank in range(1, RANKS))])
        yield f"decode_sum, {name}", codec.decode_sum(payloads, out, 1 / RANKS).cpu()
        yield f"reduce, {name}", codec.reduce(payloads, case.n, scale=1 / RANKS, seed=SEED).cpu()
        if isinstance(codec, BlockCodec):
            residual = x.float().flip(0) * 0.25
            yield f"feedback, {name}", codec.encode_feedback(x, residual, seed=SEED).cpu()
            yield f"residual, {name}", residual.cpu()
            pieces = (x, x[: case.n // 3])
            yield f"pieces, {name}", codec.encode_pieces(pieces, seed=SEED).cpu()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all: which NaN a decoder makes is not fixed, the bytes of payloads are."""
    if not x.is_floating_point():
        return x
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def compare(
    backends: list[str], device: torch.device, shapes: tuple[tuple[int, int], ...]
) -> tuple[dict[tuple[str, str], dict[str, Counter[bool]]], list[str], dict[str, str]]:
    """Runs every case on the reference and on every backend.

    Returns:
        For each operation and dtype and each backend the number of equal (True) and different cases. A line for each
        difference. The error of each backend that raised one; its other cases were skipped.
    """
    counts: dict[tuple[str, str], dict[str, Counter[bool]]] = {}
    differences: list[str] = []
    broken: dict[str, str] = {}
    for case in (Case(kind, dtype, *shape) for dtype in DTYPES for kind in KINDS for shape in shapes):
        with knobs.override(knobs.BACKEND, REFERENCE):
            expected = dict(outputs(case, CPU))
        for backend in backends:
            if backend in broken:
                continue
            try:
                with knobs.override(knobs.BACKEND, backend):
                    found = dict(outputs(case, device))
            except Exception as error:
                # One backend that does not run on this machine must not hide what the others do.
                broken[backend] = f"{case}: {type(error).__name__}: {error}"
                continue
            for operation, result in found.items():
                where = bits(result) != bits(expected[operation])
                same = not bool(where.any())
                row = counts.setdefault((operation, name_of(case.dtype)), {b: Counter() for b in backends})
                row[backend][same] += 1
                if not same:
                    first = int(where.nonzero()[0])
                    differences.append(
                        f"{backend}, {operation}: {case}: {int(where.sum())} of {where.numel()} differ, first at {first}: "
                        f"{result[first].item()}, {REFERENCE} has {expected[operation][first].item()}"
                    )
    return counts, differences, broken


def comparison_table(counts: dict[tuple[str, str], dict[str, Counter[bool]]], backends: list[str]) -> Table:
    grid = Table("operation", "dtype", *backends, title=f"Cases with the bits of {REFERENCE}", title_justify="left")
    for (operation, dtype), row in sorted(counts.items(), key=lambda item: item[0][0]):
        grid.add_row(operation, dtype, *(f"{row[b][True]} of {row[b].total()}" for b in backends))
    return grid


def test_command() -> list[str] | None:
    """The command that runs the contract tests; None where they cannot be imported."""
    if not all(find_spec(package) for package in ("pytest", "hypothesis")):
        return None
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-k", "cuda"]
    if not all(find_spec(plugin) for plugin in PLUGINS):
        # pytest refuses settings of plugins that it lacks, so it goes without the repository's settings.
        command += ["-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return command


def run_tests(console: Console) -> str:
    """Runs the contract tests; returns "passed", "failed" or "skipped"."""
    command = test_command()
    if command is None:
        console.print(
            "Contract tests: skipped, since pytest or hypothesis is missing; the comparison below stands alone.\n"
        )
        return "skipped"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Numba warns of small grids, which the tests' short vectors make, and the tests turn warnings into errors.
    environment = os.environ | {"PYTHONPATH": path, "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0"}
    shown = " ".join(["python", *command[1:]])
    console.print(f"Contract tests: {shown}", markup=False, highlight=False, soft_wrap=True)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = done.stdout.splitlines()
    # All of a failure, the summary of a success.
    for line in lines if done.returncode else lines[-1:]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    return "failed" if done.returncode else "passed"


def cuda_clock(device: torch.device) -> speed.Clock:
    """A clock of GPU time, from a cold second-level cache."""
    flushed = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def clock(run: Callable[[], object]) -> float:
        flushed.zero_()
        torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return clock


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"gpu": "none"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described = {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    packages = {name: package_version(name) for name in ("torch", "triton", "numba", "numba-cuda", "cupy-cuda13x")}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return described | {"packages": packages, "date": now}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--output", type=Path, help="JSON file, and beside it .txt; bench/results/gpu_<name>.json unless given"
    )
    parser.add_argument("--rounds", type=int, default=50)
    return parser.parse_args()


def main() -> int:
    options = parse()
    console = speed.console(record=True)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print(
            f"No CUDA GPU: torch.cuda.is_available() is False with torch {torch.__version__}. Nothing was checked.",
            soft_wrap=True,
        )
        return 1

    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else CPU
    backends = [name for name in op.available(device) if name != REFERENCE]
    if not backends:
        console.print("No backend to compare: set TRITON_INTERPRET=1 or NUMBA_ENABLE_CUDASIM=1 with --device cpu, and")
        console.print("install triton or numba-cuda with --device cuda.")
        return 1
    described = machine(device)
    console.print(described, soft_wrap=True)
    console.print(f"Backends: {', '.join(backends)}, compared with {REFERENCE}\n")

    tests = run_tests(console) if on_gpu else "skipped"
    counts, differences, broken = compare(backends, device, SHAPES if on_gpu else TINY_SHAPES)
    console.print(comparison_table(counts, backends))
    for line in differences[:40]:
        console.print(line, markup=False, soft_wrap=True)
    for backend, error in broken.items():
        console.print(f"{backend} failed: {error}", markup=False, soft_wrap=True)
    verdict = f"{len(differences)} comparisons differ" if differences else "no comparison differs"
    console.print(f"Bytes: {verdict}\n")

    n, rounds, clock = (
        (ELEMENTS, options.rounds, cuda_clock(device)) if on_gpu else (TINY_ELEMENTS, 1, speed.host_clock)
    )
    groups = [*workloads.codec_groups(device, n), *workloads.elementwise_groups(device, n)]
    groups = [[row for row in group if row.name not in broken] for group in groups]
    if on_gpu:
        groups += optimizers.gpu_groups(device)
    rows = speed.measure(groups, rounds, clock, warmup=5 if on_gpu else 1)
    console.print(speed.table(rows, f"{described['gpu']}: {n:,} float32, medians of {rounds} rounds in turns"))

    slug = re.sub(r"[^a-z0-9]+", "_", described["gpu"].lower()).strip("_")
    output = options.output or (ROOT / "bench" / "results" / f"gpu_{slug}.json" if on_gpu else None)
    if output:
        compared = [
            {"operation": operation, "dtype": dtype, "backend": backend, "same": count[True], "different": count[False]}
            for (operation, dtype), row in counts.items()
            for backend, count in row.items()
        ]
        report = {
            "machine": described,
            "contract_tests": tests,
            "comparisons": compared,
            "differences": differences,
            "broken": broken,
        }
        speed.write(output, report | {"elements": n, "rounds": rounds, "rows": rows})
        output.with_suffix(".txt").write_text(console.export_text(clear=False))
    return 1 if differences or broken or tests == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
