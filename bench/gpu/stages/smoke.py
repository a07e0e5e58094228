"""Each launcher once, in a process of its own, compared with the CPU's digests."""

from __future__ import annotations

import time

from bench.gpu import marks
from bench.gpu.stage import Context
from bench.gpu.workers import Worker, cores, judge, run_workers


def run(context: Context) -> None:
    """Starts a process per launcher, or is one of them."""
    from bench.gpu import cases

    if context.part:
        run_part(context)
        return

    def tell(workers: dict[str, Worker]) -> None:
        equal = sum(worker.figures.get("equal") is True for worker in workers.values())
        marks.headline(f"{equal} of {len(workers)} launchers equal the CPU")

    # Without results of kernels a selection has no length.
    chosen = [name for name in cases.SMOKE if not (context.fake and name == "select")]
    commands = {name: context.command("smoke", name) for name in chosen}
    workers = run_workers(commands, context.left - 3.0, max(2, cores()), on_figures=tell)
    first = {name: worker.figures.get("first s", "-") for name, worker in workers.items()}
    marks.row("first call in s: " + ", ".join(f"{name} {seconds}" for name, seconds in first.items()))
    judge(workers)


def run_part(context: Context) -> None:
    """One launcher: its first call compiles, and a second one does not."""
    from bench.gpu import cases, digests

    device = context.place
    case = cases.case_named(*cases.SMOKE[context.part])
    expected = digests.of_group(case.group)[case.name]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        found = case.digests(device)
        seconds.append(round(time.perf_counter() - start, 3))
    names = [name for name, a, b in zip(case.operations, found, expected, strict=True) if a != b]
    marks.figures({"first s": seconds[0], "second s": seconds[1], "equal": not names, "differ": names})
    if names and not context.fake:
        raise marks.Differs(f"{case.group}, {case.name}: {', '.join(names)} differ from the CPU's")
