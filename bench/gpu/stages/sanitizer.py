"""One kernel of each launcher under compute-sanitizer: accesses outside of memory, and races in shared memory."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from bench.gpu import marks
from bench.gpu.stage import Context
from bench.gpu.workers import Worker, run_workers

TOOLS = ("memcheck", "racecheck")
# Of `cases.SMOKE`.
LAUNCHERS = ("encode", "elementwise", "select", "chunks", "multitensor")
REFUSALS = ("Device not supported", "not supported on this", "error 999", "Unable to", "Failed to initialize")


def binary() -> str | None:
    """The path of compute-sanitizer."""
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def run(context: Context) -> None:
    """Runs both tools at once, each around a process that launches the kernels."""
    if context.part:
        kernels(context)
        return
    program = binary()
    if context.on_gpu and program is None:
        raise marks.Refused("no compute-sanitizer")
    commands = {}
    for tool in TOOLS if context.on_gpu else TOOLS[:1]:
        around = [str(program), "--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
        # PyTorch asks the driver for functions that may be missing, which is no fault of a kernel.
        around += ["--report-api-errors", "no"] if tool == "memcheck" else []
        commands[tool] = [*(around if context.on_gpu else []), *context.command("sanitizer", "kernels")]
    # Blocks of PyTorch's allocator would hide accesses outside of a tensor.
    own = {tool: {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} for tool in commands}
    workers = run_workers(commands, context.left - 3.0, environment=own)
    results = {tool: result(worker) for tool, worker in workers.items()}
    marks.figures({tool: {"result": results[tool], "seconds": worker.seconds} for tool, worker in workers.items()})
    marks.headline("; ".join(f"{tool}: {text}" for tool, text in results.items()))
    wrong = [tool for tool, text in results.items() if text.startswith(("errors", "ended"))]
    if wrong:
        raise marks.Differs("; ".join(f"{tool}: {results[tool]}" for tool in wrong))
    if not any(text.startswith("no error") for text in results.values()):
        raise marks.Refused("; ".join(results.values()))


def result(worker: Worker) -> str:
    """What a tool has found."""
    output = "\n".join(worker.last)
    if any(refusal in output for refusal in REFUSALS):
        return f"refused: {next(line for line in worker.last if any(refusal in line for refusal in REFUSALS))}"[:200]
    if worker.outcome == "refused":
        return f"refused: {worker.reason}"[:200]
    if worker.outcome == "timed out":
        return f"refused: {worker.reason}, which such a tool may need"
    found = re.search(r"(ERROR|RACECHECK) SUMMARY: (.*)", output)
    if worker.status == 0:
        return f"no error{f' ({found[2]})' if found else ''}"
    if worker.status == 9:
        return f"errors: {found[2] if found else worker.reason}"[:300]
    return f"ended with status {worker.status}: {worker.reason}"[:300]


def kernels(context: Context) -> None:
    """Launches one case of each launcher; results are not compared here."""
    import torch

    from bench.gpu import cases

    for name in LAUNCHERS:
        case = cases.case_named(*cases.SMOKE[name])
        for _ in case.outputs(context.place):
            pass
        if context.on_gpu:
            torch.cuda.synchronize()
        print(f"{name}: launched", flush=True)
