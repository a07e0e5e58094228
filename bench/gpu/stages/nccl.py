"""Two ranks on one GPU: the tests of NCCL through CuPy, the contract over PyTorch's NCCL, a rank that is lost, and members."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from bagua_kernels import comm
from bench.gpu import marks
from bench.gpu.pair import environments, joined, rank
from bench.gpu.stage import Context
from bench.gpu.tests_of import run_tests, verdict
from bench.gpu.workers import run_workers

TESTS = "tests/comm/backends/nccl/test_nccl_cuda.py"
# Contracts of more ranks take long where ranks share a GPU by slices of time.
CHOSEN = "contract[2] or test_program"
# What each pair runs, and what drives NCCL there.
PAIRS = {"contract": "torch", "lost": "torch", "shrink": "cupy"}
TRIAL = "tests/comm/backends/nccl/test_nccl_binding.py"


def run(context: Context) -> None:
    """Runs the tests through CuPy, then two pairs over PyTorch's NCCL and one of an elastic job; or is a rank of one of them."""
    if context.part == "contract":
        contract(context)
        return
    if context.part == "lost":
        lost(context)
        return
    if context.part == "shrink":
        shrink(context)
        return
    results: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # NCCL_HOSTID is set by the tests themselves, to the rank.
        tests = [TESTS] if context.on_gpu else [TRIAL]
        more = ["-k", CHOSEN] if context.on_gpu else ["-k", "test_"]
        results["cupy"] = run_tests(
            "cupy",
            tests,
            0.6 * context.left,
            Path(folder) / "cupy.xml",
            jobs=5 if context.on_gpu else 1,
            timeout=60,
            more=more,
        )
    for part, nccl in PAIRS.items():
        results[f"{nccl}, {part}"] = run_pair(context, part, min(context.left - 2.0, 35.0))
    verdict(results)


def run_pair(context: Context, part: str, limit: float) -> Counter[str]:
    """Runs both ranks of a part; returns the number of cases by outcome."""
    commands, own = {}, {}
    for number, variables in enumerate(environments(PAIRS[part])):
        name = f"{part} {number}"
        commands[name], own[name] = context.command("nccl", part), variables
    workers = run_workers(commands, limit, environment=own)
    counts: Counter[str] = Counter()
    for worker in workers.values():
        cases = {name: outcome for name, outcome in worker.figures.items() if name != "ms"}
        counts.update("passed" if outcome == "passed" else "failed" for outcome in cases.values())
        marks.figures(
            {f"{PAIRS[part]}, {worker.name}": {**worker.figures, "outcome": worker.outcome, "seconds": worker.seconds}}
        )
        if worker.bad:
            counts["missing"] = 1
            marks.row(f"{PAIRS[part]}, {worker.name}: {worker.outcome}: {worker.reason}")
    return counts


def contract(context: Context) -> None:
    """One rank of the contract of communicators, whose tensors are copied to the GPU and back."""
    from tests.comm.backends.nccl.test_nccl_cuda import Staged
    from tests.comm.contract import CASES

    communicator = joined(context)
    staged = Staged(communicator)
    for case in CASES[:3] if context.small else CASES:
        start = time.perf_counter()
        try:
            case(staged)
        except BaseException as error:
            traceback.print_exc()
            marks.figures({case.__name__: f"{type(error).__name__}: {error}"[:500]})
            communicator.abort()
            # The ranks no longer agree on what comes next.
            raise marks.Differs(f"{case.__name__}: {type(error).__name__}: {error}") from None
        marks.figures({case.__name__: "passed"})
        print(f"{case.__name__}: {time.perf_counter() - start:.2f} s", flush=True)
    x = torch.ones(1, device=communicator.device)
    start = time.perf_counter()
    for _ in range(20):
        communicator.all_reduce(x).wait()
        if context.on_gpu:
            torch.cuda.synchronize()
    marks.figures({"ms": round((time.perf_counter() - start) / 20 * 1e3, 2)})
    # A large reduction under way must not suffer from the end.
    large = torch.full((1 << 12 if context.small else 1 << 26,), 1.0, device=communicator.device)
    work = communicator.all_reduce(large)
    work.wait()
    communicator.close()
    right = bool((large == communicator.size).all())
    marks.figures({"all_reduce before close": "passed" if right else "another sum"})
    if not right:
        raise marks.Differs("close() ended an all_reduce that was under way")


def lost(context: Context) -> None:
    """Rank 1 ends without a word; rank 0 gets an error that names it."""
    from bagua_kernels.errors import CommunicationError

    communicator = joined(context, timeout=6.0)
    x = torch.ones(1000, device=communicator.device)
    communicator.all_reduce(x).wait()
    if context.on_gpu:
        torch.cuda.synchronize()
    if rank() == 1:
        marks.figures({"left": "passed"})
        os._exit(0)
    raised = ""
    for _ in range(40):
        try:
            communicator.all_reduce(x).wait()
            if context.on_gpu:
                torch.cuda.synchronize()
        except CommunicationError as error:
            raised = f"{type(error).__name__}: {error}"
            break
        time.sleep(0.25)
    print(raised, flush=True)
    marks.figures({"error names rank 1": "passed" if "rank 1" in raised else raised or "no error"})
    communicator.abort()
    if "rank 1" not in raised:
        raise marks.Differs(f"expected an error that names rank 1, got {raised or 'none'}")


def shrink(context: Context) -> None:
    """The verbs of members: NCCL's communicator is aborted within an operation, and made anew, with both ranks and with one."""
    from bagua_kernels.errors import CommunicationError

    communicator = comm.init(timeout=20.0, device="cuda:0" if context.on_gpu else "cpu", elastic=True)
    members = communicator.members
    check("sum", total(communicator), 2.0)
    if rank() == 0:
        # It never ends: rank 1 does not take part.
        communicator.all_reduce(torch.ones(1000, device=communicator.device))
        members.revoke("to see what becomes of it")
    while not communicator.is_ended():
        time.sleep(0.01)  # until the letter has come; the stage has a limit
    start = time.perf_counter()
    communicator = members.shrink()
    marks.figures({"ms": round((time.perf_counter() - start) * 1e3, 1)})
    check("sum after revoke", total(communicator), 2.0)
    check("sum of a copy", total(communicator.duplicate()), 2.0)
    check("agreement", members.agree(0b100 | rank()), 0b100)
    if rank() == 1:
        os._exit(0)
    try:
        while True:
            total(communicator)
    except CommunicationError as error:
        print(error, flush=True)
    check("sum alone", total(members.shrink()), 1.0)
    check("members", members.ranks, (0,))
    comm.shutdown()


def total(communicator: comm.Communicator) -> float:
    """The sum of one for each rank, once it is there."""
    x = torch.ones(1000, device=communicator.device)
    communicator.all_reduce(x).wait()
    communicator.drain()
    return float(x[0])


def check(what: str, got: object, expected: object) -> None:
    """Reports whether a value is the expected one.

    Raises:
        Differs: it is another one.
    """
    marks.figures({what: "passed" if got == expected else f"expected {expected}, got {got}"})
    if got != expected:
        raise marks.Differs(f"{what}: expected {expected}, got {got}")
