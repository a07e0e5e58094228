"""All codecs and launchers, one process each, for all dtypes, lengths and kinds of input, against the CPU's digests."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.cases import Case, cases_of, group_names
from bench.gpu.stage import Context
from bench.gpu.stages.compared import compare, run_groups
from bench.gpu.workers import cores

# What an interpreter of kernels computes in a few seconds.
SMALL_GROUPS = ("minmax_uint8", "sign", "select", "inputs")


def sample(cases: Iterator[Case]) -> Iterator[Case]:
    """Three short cases of a group."""
    short = (case for case in cases if "float32 257" in case.name or "float32 255" in case.name)
    for _, case in zip(range(3), short, strict=False):
        yield case


def run(context: Context) -> None:
    """Starts a process per group, or is one of them."""
    if context.part:
        chosen = cases_of(context.part)
        compare(context.part, sample(chosen) if context.small else chosen, context)
        return
    groups = SMALL_GROUPS if context.small else group_names()
    # Without results of kernels a selection has no length.
    chosen_groups = [group for group in groups if not (context.fake and group == "select")]
    run_groups("bytes", chosen_groups, context, max(2, cores() - 4))
