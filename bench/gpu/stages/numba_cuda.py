"""Three codecs, elementwise rules and the selection of elements on the Numba-CUDA backend, against the CPU's digests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from bagua_kernels.jit import op
from bench.gpu import marks
from bench.gpu.cases import Case, cases_of
from bench.gpu.stage import Context
from bench.gpu.stages.compared import compare, run_groups
from bench.gpu.workers import cores

GROUPS = ("minmax_uint8", "sign", "qsgd, l2", "elementwise", "select")
SMALL_GROUPS = ("sign", "elementwise")
ENVIRONMENT = {"BAGUA_KERNELS_BACKEND": "numba_cuda"}


def chosen(group: str, small: bool) -> Iterator[Case]:
    """The cases in float32 with blocks of 256: each dtype and size of blocks takes seconds to compile."""
    if small:
        cases = (case for case in cases_of(group) if "float32 1" in case.name or "float32 16 " in f"{case.name} ")
        yield from islice(cases, 2)
        return
    for case in cases_of(group):
        if ("float32" in case.name and "block 32" not in case.name) or case.name.startswith("permuted"):
            yield case


def run(context: Context) -> None:
    """Starts a process per group, or is one of them."""
    backend = next(backend for backend in op.BACKENDS if backend.name == "numba_cuda")
    if reason := backend.refusal(context.place):
        raise marks.Refused(reason)
    if context.part:
        compare(context.part, chosen(context.part, context.small), context)
        return
    groups = SMALL_GROUPS if context.small else GROUPS
    run_groups("numba_cuda", groups, context, max(2, cores()), ENVIRONMENT)
