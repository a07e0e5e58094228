"""Faults of one line each, two in each room of the project, and the tests that have to notice them.

    python -m tests.mutations [--tier default|all] [--only N ...] [--list] [--jobs N]

A sample of tests is worth what it notices. Each fault is applied to a copy of the project, in which a test then has to fail: one
that `make test` runs, or `make test-all` if the fault's tier is "all". First the unchanged copy has to pass all of these tests.
The exit status is 1 if a fault is not noticed, and 2 if an unchanged test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tests import limits

ROOT = Path(__file__).parents[1]
FOLDERS = ("bagua_kernels", "comm", "algorithms", "bench", "examples", "tests", "docs", ".ci")
LIMIT = 300.0  # seconds that the tests of one fault may take, see `tests.limits`
LONGEST = 1800.0  # seconds that all unchanged tests may take
# Prints where the floors are imported from, in a process and in one that it starts.
PLACES = """
import subprocess, sys
from bagua_kernels import algorithms, comm
print(algorithms.__file__, comm.__file__, sep="\\n", flush=True)
len(sys.argv) > 1 or subprocess.run([sys.executable, "-c", sys.orig_argv[2], "again"], check=True)
"""

Tier = Literal["default", "all"]
TIERS: tuple[Tier, ...] = get_args(Tier)
MISSED = "NOT NOTICED"


@dataclass(frozen=True)
class Fault:
    """A change of one line after which a user loses something.

    Attributes:
        room: the part of the project; each has two faults in `FAULTS`.
        file: the changed file, below the root.
        old: a text that occurs once in the file, within a line.
        new: what replaces it.
        why: what a user would lose.
        tests: files of tests that notice it, seconds each; with the tier "all" they may name functions.
        tier: "default" if `make test` notices it, "all" if only `make test-all` does.
    """

    room: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    tier: Tier = "default"

    def applied(self, text: str) -> str:
        """Returns the text of the file with the fault."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, expected once")
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "rules",
        "bagua_kernels/rules/random.py",
        "mix(tl.cast(seed_high ^ second, tl.uint32))",
        "mix(tl.cast(seed_low ^ second, tl.uint32))",
        "Payloads have other bits than the wire format promises, and half of a seed counts less.",
        ("tests/compression/test_minmax_uint8.py",),
    ),
    Fault(
        "rules",
        "bagua_kernels/rules/signs.py",
        "tl.div_rn(others, count - k)",
        "tl.div_rn(others, count)",
        "Positive elements decode to too small a mean, and training with signs is slower.",
        ("tests/compression/test_block_codecs.py::test_same_bytes_as_the_oracle",),
        "all",
    ),
    Fault(
        "jit",
        "bagua_kernels/jit/kernel_folder.py",
        "if found.st_mode & 0o022:",
        "if found.st_mode & 0o002:",
        "Another user of the group can put code into the folder from which this process loads kernels.",
        ("tests/jit/test_kernel_folder.py",),
    ),
    Fault(
        "jit",
        "bagua_kernels/jit/rule.py",
        "feed((name, callee))",
        "feed(name)",
        "A kernel on disk outlives a change of a constant that it was compiled with.",
        ("tests/jit/test_rule.py",),
    ),
    Fault(
        "launchers/blockwise",
        "bagua_kernels/launchers/blockwise/rows.py",
        "counts[begin : begin + form.blocks]",
        "counts[: form.blocks]",
        "Chunks behind the first one leave elements out by the counts of other blocks.",
        ("tests/launchers/test_rows.py",),
    ),
    Fault(
        "launchers/blockwise",
        "bagua_kernels/launchers/blockwise/_numba_cpu_loops.py",
        "start + own_size(counts, block, min(BLOCK, x.size - start)))",
        "min(start + BLOCK, x.size))",
        "What fills a tensor's last block up changes the scales of the tensor.",
        ("tests/compression/test_block_codecs.py",),
    ),
    Fault(
        "launchers",
        "bagua_kernels/launchers/multitensor/__init__.py",
        "(approached(mean, r0, rate))",
        "(approached(mean, v0, rate))",
        "The running mean of a parameter lags behind by one step.",
        ("tests/optim/step/test_extras.py",),
    ),
    Fault(
        "launchers",
        "bagua_kernels/launchers/chunks/_numba_cpu.py",
        "if index <= before or index",
        "if index < before or index",
        "A damaged payload that names an element twice is decoded without an error.",
        ("tests/compression/sparse/test_chunked_damage.py",),
    ),
    Fault(
        "compression",
        "bagua_kernels/compression/error_feedback.py",
        "named = dict(self._loose)",
        "named = dict[str, torch.Tensor]()",
        "A checkpoint lacks the residuals of vectors that were not encoded after another one was loaded.",
        ("tests/compression/test_error_feedback.py",),
    ),
    Fault(
        "compression",
        "bagua_kernels/compression/sparse/randomk.py",
        "rest = rest + _rest(values)",
        "rest = _rest(values)",
        "The NaN of a rank is lost in a sum, unless the rank is the last one.",
        ("tests/compression/sparse/test_sparse.py",),
    ),
    Fault(
        "optim",
        "bagua_kernels/optim/step/states.py",
        "for name in (MASTER, AVERAGE, DRAWS):",
        "for name in (MASTER, DRAWS):",
        "A running mean of parameters is rounded to bfloat16 when a checkpoint is loaded.",
        ("tests/optim/step/test_extras.py",),
    ),
    Fault(
        "optim",
        "bagua_kernels/optim/step/scalars.py",
        "counters[DRAWS] = draws + 1",
        "counters[DRAWS] = draws",
        "Each step rounds by the same random numbers, so that small updates are never made.",
        ("tests/optim/step/test_precision.py",),
    ),
    Fault(
        "bagua_kernels",
        "bagua_kernels/bucket.py",
        "max(0, bisect_right(self._starts, part.start) - 1)",
        "max(0, bisect_right(self._starts, part.start))",
        "A part of a bucket that begins within a tensor is sent without that tensor's elements.",
        ("tests/algorithms/engine/test_engine.py",),
    ),
    Fault(
        "bagua_kernels",
        "bagua_kernels/bucket.py",
        "target = min(bucket_bytes, _GROWTH * target)",
        "target = min(bucket_bytes, target)",
        "All buckets stay as small as the first one, and the network's latency is paid for each.",
        ("tests/algorithms/engine/test_engine.py",),
    ),
    Fault(
        "comm/sockets",
        "comm/backends/sockets/schedules/other.py",
        "reduced = own if ranks.rank == root else rows[0]",
        "reduced = own",
        "A reduce to one rank overwrites the tensors of the other ranks.",
        ("tests/comm/backends/sockets/test_schedules.py",),
    ),
    Fault(
        "comm/sockets",
        "comm/backends/sockets/inbox.py",
        "self._ahead[transfer.peer] -= len(arrival.data)",
        "pass",
        "The count of bytes that came early only grows, so that a long training receives none at last.",
        ("tests/comm/backends/sockets/test_loop.py",),
    ),
    Fault(
        "comm/backends",
        "comm/backends/local/mailbox.py",
        "(max(earlier, clock.now() + clock.latency()), self.rank, letter)",
        "(clock.now() + clock.latency(), self.rank, letter)",
        "A letter overtakes an earlier one of the same sender.",
        ("tests/comm/backends/local/test_late_letters.py",),
    ),
    Fault(
        "comm/backends",
        "comm/backends/nccl/queue.py",
        "stream.wait_event(event)",
        "pass",
        "NCCL's stream reads a tensor before the caller's stream has written it.",
        ("tests/comm/backends/nccl/test_nccl.py",),
    ),
    Fault(
        "comm/compressed",
        "comm/compressed/residuals.py",
        "            residuals.reset()",
        "            pass",
        "After a checkpoint without residuals, those of before it are added to other gradients.",
        ("tests/comm/compressed/test_residuals.py",),
    ),
    Fault(
        "comm/compressed",
        "comm/hierarchical/tiered.py",
        "fold_seed(seed, piece, s)",
        "fold_seed(seed, s)",
        "All pieces of a vector round by the same random numbers, and their errors add up.",
        ("tests/comm/hierarchical/test_hierarchical_compressed.py",),
    ),
    Fault(
        "comm/failures",
        "comm/failures/board.py",
        "gap = dict(self.seen), now - self._seen_at > 2.5 * self._period",
        "gap = dict(self.seen), False",
        "A process that was paused takes other ranks for lost.",
        ("tests/comm/failures/test_liveness.py",),
    ),
    Fault(
        "comm/failures",
        "comm/failures/heartbeat.py",
        "not 0 <= rank < size for",
        "not 0 <= rank <= size for",
        "A report of a rank that does not exist is believed, and names it.",
        ("tests/comm/failures/test_heartbeats.py",),
    ),
    Fault(
        "comm/joining",
        "comm/joining/gate.py",
        "elif nonce in self._nonces or not",
        "elif not",
        "A stranger that repeats an opening from the network passes the first check.",
        ("tests/comm/joining/test_hello.py",),
    ),
    Fault(
        "comm/joining",
        "comm/joining/seal.py",
        'derive("objects", operation, str(next(self._numbers)))',
        'derive("objects", operation)',
        "An object that was sent before is accepted once more as the object of a later operation.",
        ("tests/comm/test_objects.py",),
    ),
    Fault(
        "comm/mailbox",
        "comm/mailbox/groups.py",
        "1 << (version * taken + place) % bits",
        "1 << (version + place) % bits",
        "Groups of four ranks keep half of their members, so that models mix more slowly.",
        ("tests/comm/mailbox/test_groups.py",),
    ),
    Fault(
        "comm/mailbox",
        "comm/mailbox/pairwise.py",
        "number = self._count * self._mailbox.size + self._mailbox.rank",
        "number = self._count * self._mailbox.size",
        "Two ranks ask with the same number, and their models are mixed up.",
        ("tests/comm/mailbox/test_pairwise.py",),
    ),
    Fault(
        "comm/topology",
        "comm/topology/changing.py",
        'f"{self.seed} {step} {r}"',
        'f"{step} {r}"',
        "Each seed gives the same pairs, so that runs which should differ do not.",
        ("tests/comm/test_topology.py",),
    ),
    Fault(
        "comm/topology",
        "comm/topology/average.py",
        "wide = torch.float32 if dtype in HALF else dtype",
        "wide = dtype",
        "A gossip step of half-precision parameters rounds at each term.",
        ("tests/comm/test_topology.py",),
    ),
    Fault(
        "algorithms/engine",
        "algorithms/wrapping/buffers.py",
        "if before is buffer and version == _version(buffer):",
        "if before is buffer:",
        "A change of a buffer by the module itself goes unseen by autograd, and backward uses wrong values.",
        ("tests/algorithms/wrapping/test_buffers.py",),
    ),
    Fault(
        "algorithms/engine",
        "algorithms/engine/buckets.py",
        "lendable = lends and weight == 1.0 and",
        "lendable = lends and",
        "A gradient that is read in place is exchanged without its weight.",
        ("tests/algorithms/engine/test_lending.py",),
    ),
    Fault(
        "algorithms/gossip",
        "algorithms/gossip/sgp.py",
        'self.weight.vector.fill_(numbers.get("weight", 1.0))',
        "pass",
        "Push-sum goes on with a weight of one after a checkpoint, and parameters jump.",
        ("tests/algorithms/gossip/test_resume.py",),
    ),
    Fault(
        "algorithms/gossip",
        "algorithms/gossip/d2.py",
        "if least <= -1 / 3 + _TOLERANCE:",
        "if least < -1 / 3 - _TOLERANCE:",
        "A topology with which D2 does not converge is accepted.",
        ("tests/algorithms/gossip/test_refusals.py",),
    ),
    Fault(
        "algorithms/local_steps",
        "algorithms/local_steps/slow_mo.py",
        "ratio = self.rate / before if before else 0.0",
        "ratio = before / self.rate if self.rate else 0.0",
        "A learning rate that falls makes the slow momentum grow instead of shrink.",
        ("tests/algorithms/local_steps/test_simulation.py",),
    ),
    Fault(
        "algorithms/local_steps",
        "algorithms/local_steps/outer_nesterov.py",
        'self.steps = int(state["steps"])',
        "self.steps = 0",
        "After a checkpoint the next outer step comes too late, unless a round has just ended.",
        ("tests/algorithms/local_steps/test_loops.py",),
    ),
    Fault(
        "algorithms/asynchronous",
        "algorithms/asynchronous/published_model.py",
        "torch.add(source, self._debt(place), out=copy)",
        "copy.copy_(source)",
        "A courier sends a model without the changes that it is owed, and steps of other ranks are lost.",
        ("tests/algorithms/asynchronous/test_fuzz.py",),
    ),
    Fault(
        "algorithms/asynchronous",
        "algorithms/asynchronous/published_model.py",
        "self._writing = True",
        "pass",
        "A courier reads a model in the middle of an optimizer's step.",
        ("tests/algorithms/asynchronous/test_replay.py",),
    ),
    Fault(
        "algorithms/adam",
        "algorithms/exchanges/momentum.py",
        "of.go_on(view, 1 / scale)",
        "of.go_on(view, 1.0)",
        "Under a gradient scaler, momentum goes on with gradients that are too large by the scale.",
        ("tests/algorithms/adam/test_gradients.py",),
    ),
    Fault(
        "algorithms/adam",
        "algorithms/sparse/dgc.py",
        "divided(self._velocity, self.loss_scale)",
        "self._velocity",
        "A velocity is saved with the loss scale of its moment, which differs when it is loaded.",
        ("tests/algorithms/test_features.py",),
    ),
    Fault(
        "algorithms/data",
        "algorithms/data/balanced_sampler.py",
        "np.random.default_rng((self.seed, epoch))",
        "np.random.default_rng(self.seed)",
        "Each epoch has the samples in the same order.",
        ("tests/algorithms/data/test_sampler.py",),
    ),
    Fault(
        "algorithms/data",
        "algorithms/exchanges/repaying.py",
        "if paid and not all(each.isfinite() for each in bucket.whole.aminmax()):",
        "if False:",
        "What is owed counts as paid though no optimizer takes the step that pays it.",
        ("tests/algorithms/choosing/test_auto_tune.py",),
    ),
)


class Copy:
    """A copy of the project in which tests run.

    Attributes:
        root: its folder.
    """

    def __init__(self, root: Path, kernels: Path) -> None:
        """Makes the copy.

        Args:
            root: a folder that does not exist.
            kernels: the folder of compiled kernels, which copies may share: the name of a kernel depends on its code.
        """
        self.root = root
        self.changes = 0
        root.mkdir()
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy2(file, root / file.name)
        self.environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(kernels)}
        # Bytecode is kept: `changed` sets another date, at which Python looks.
        self.environment["PYTHONDONTWRITEBYTECODE"] = ""

    def check(self) -> None:
        """Raises unless the copy is what is imported in it, in processes that tests start, too.

        Raises:
            RuntimeError: something else is imported.
        """
        status, output = self.run(["-c", PLACES], LIMIT)
        places = output.split()
        if status or len(places) != 4 or not all(Path(place).is_relative_to(self.root) for place in places):
            raise RuntimeError(f"expected imports from {self.root}, got exit status {status} and:\n{output}")

    def pytest(self, tests: Sequence[str], tier: Tier, limit: float) -> tuple[int | None, str]:
        """Runs tests of a tier up to the first failure; returns the exit status, None at the limit, and the output."""
        every = ["--all"] if tier == "all" else []
        return self.run(["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *every, *tests], limit)

    def run(self, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Runs Python in the copy; returns the exit status, None at the limit, and the output."""
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.root,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                status = process.wait(limits.seconds(limit))
            except subprocess.TimeoutExpired:
                pass
            finally:
                # All that it has started, which is in its session.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(0)
            return status, file.read()

    @contextlib.contextmanager
    def changed(self, fault: Fault) -> Iterator[None]:
        """The copy with a fault, within the block."""
        file = self.root / fault.file
        text, date = file.read_text(), file.stat().st_mtime
        file.write_text(fault.applied(text))
        # Another second than that of the bytecode, which would otherwise count for a text of the same length.
        self.changes += 1
        os.utime(file, (date + 10 * self.changes, date + 10 * self.changes))
        try:
            yield
        finally:
            file.write_text(text)
            os.utime(file, (date, date))


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        noticed: True if a test failed.
        text: which test, or what happened instead.
        seconds: that its tests took.
    """

    noticed: bool
    text: str
    seconds: float


def judged(status: int | None, output: str) -> tuple[bool, str]:
    """Returns True if a test failed, and which; False if none did, with what happened.

    Args:
        status: pytest's exit status; None if it was stopped.
        output: what it printed.
    """
    if status is None:
        return False, f"nothing failed within {limits.seconds(LIMIT):g} s"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status == 1 and found:
        return True, found[1]
    if status == 1 and "+ Timeout +" in output:
        return True, "a test's limit of time"
    return False, "all tests passed" if status == 0 else f"exit status {status}: {output[-2000:]}"


def tried(fault: Fault, copy: Copy) -> Result:
    """Runs the tests of a fault in a copy that has it."""
    begin = time.monotonic()
    with copy.changed(fault):
        noticed, text = judged(*copy.pytest(fault.tests, fault.tier, LIMIT))
    return Result(noticed, text, time.monotonic() - begin)


def failing(faults: Sequence[Fault], copies: Sequence[Copy]) -> str:
    """Runs all tests of some faults without a fault, a share in each copy; returns what failed, empty if all pass."""

    def share(number: int) -> str:
        for tier in TIERS:
            tests = sorted({test for fault in faults if fault.tier == tier for test in fault.tests})[
                number :: len(copies)
            ]
            status, output = copies[number].pytest(tests, tier, LONGEST) if tests else (0, "")
            if status != 0:
                return f"{output}\nexit status {status} of {' '.join(tests)} in the tier {tier}"
        return ""

    with ThreadPoolExecutor(len(copies)) as pool:
        return "\n".join(filter(None, pool.map(share, range(len(copies)))))


def fill(kernels: Path) -> None:
    """Copies the compiled kernels that this process would load into a new folder for `NUMBA_CACHE_DIR`."""
    from bagua_kernels.jit.kernel_folder import folders

    loading, _ = folders(os.environ.get("NUMBA_CACHE_DIR", ""))
    (kernels / "bagua_kernels").mkdir(mode=0o755, parents=True)
    for entry in [entry for folder in loading for entry in folder.path.glob("*.nbc")]:
        with contextlib.suppress(FileNotFoundError):  # other processes remove entries
            shutil.copy2(entry, kernels / "bagua_kernels")


def run(faults: Mapping[int, Fault], jobs: int) -> int:
    """Tries faults, given with their numbers, in as many copies at a time; returns the exit status."""
    begin = time.monotonic()
    limits.factor()  # which the processes inherit
    with tempfile.TemporaryDirectory(prefix="mutations") as name:
        folder = Path(name).resolve()
        fill(folder / "kernels")
        copies = [Copy(folder / f"{job}", folder / "kernels") for job in range(min(jobs, len(faults)))]
        for copy in copies:
            copy.check()
        if failed := failing([*faults.values()], copies):
            print(f"{failed}\nan unchanged test fails, so that no fault was tried")
            return 2
        print(f"all unchanged tests pass: {time.monotonic() - begin:.0f} s", flush=True)
        idle = queue.SimpleQueue[Copy]()
        for copy in copies:
            idle.put(copy)

        def trial(number: int) -> Result:
            copy = idle.get()
            try:
                result = tried(faults[number], copy)
            finally:
                idle.put(copy)
            what = f"{'noticed' if result.noticed else MISSED} {result.seconds:4.0f} s"
            print(line(number, faults[number], what, result.text), flush=True)
            return result

        with ThreadPoolExecutor(len(copies)) as pool:
            try:
                results = list(pool.map(trial, faults))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # else the faults that wait would be tried first
                raise
    missed = [number for number, result in zip(faults, results, strict=True) if not result.noticed]
    print(f"{len(results) - len(missed)} of {len(results)} faults noticed, {time.monotonic() - begin:.0f} s")
    for number in missed:
        print(line(number, faults[number], MISSED, faults[number].why))
    return 1 if missed else 0


def line(number: int, fault: Fault, what: str, more: str) -> str:
    """Returns a line about a fault."""
    return f"{number:2} {fault.room:23} {what}: {more}"


def main(arguments: Sequence[str] | None = None, every: Sequence[Fault] = FAULTS) -> int:
    """Reads the command line, and tries faults of a list; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", choices=TIERS, help="only faults of one tier")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", choices=range(len(every)), help="only these faults")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which tests run at the same time; 2 by default")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args(arguments)
    faults = {
        number: fault
        for number, fault in enumerate(every)
        if options.only is None or number in options.only
        if options.tier in (None, fault.tier)
    }
    if not faults or options.jobs < 1:
        parser.error(
            f"expected faults of the tier and at least 1 job, got {len(faults)} faults and {options.jobs} jobs"
        )
    if not options.list:
        return run(faults, options.jobs)
    for number, fault in faults.items():
        print(
            line(number, fault, f"{fault.file}, tier {fault.tier}", f"{fault.why}\n   - {fault.old}\n   + {fault.new}")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
