"""Compiled kernels on disk: whatever happens to their files, kernels run, and later starts find them."""

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock

from bagua_kernels import knobs
from bagua_kernels.jit import _numba_cpu, compiling
from bagua_kernels.jit.kernel_folder import KernelFolder
from tests import limits

ROOT = Path(__file__).parents[2]

# What a start does: takes a kernel from disk or compiles it; prints whether it was found there, and its result.
PROGRAM = """
import json, sys
import numpy as np
from tests.jit import test_kernel_cache as cases
kernel = cases.doubling()
print("ready", flush=True)
sys.stdin.readline()
result = kernel(np.arange(4.0, dtype=np.float32))
print(json.dumps([sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()), float(result)]))
"""


def doubled_sum(values):
    total = np.float32(0)
    for value in values:
        total += value * factor
    return total


factor = 1.0


def doubling() -> Any:
    """A new dispatcher each time, as after a new start."""
    _numba_cpu._templates.clear()
    return _numba_cpu.compile_template(doubled_sum, {"factor": np.float32(2)})


def run(kernel: Any) -> tuple[int, float]:
    """How many signatures came from disk, and the result."""
    result = kernel(np.arange(4.0, dtype=np.float32))
    return sum(kernel.stats.cache_hits.values()), float(result)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def entry(folder: Path) -> Path:
    (path,) = folder.rglob("*.nbc")
    return path


def test_second_start_finds_what_the_first_has_compiled(folder: Path) -> None:
    assert run(doubling()) == (0, 12.0)
    assert run(doubling()) == (1, 12.0)


def test_signatures_have_files_of_their_own(folder: Path) -> None:
    doubling()(np.ones(2, np.float32))
    assert doubling()(np.ones(2, np.float64)) == 4.0
    assert len(list(folder.rglob("*.nbc"))) == 2
    assert run(doubling()) == (1, 12.0)


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut off": content[:middle],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"\0",
        "text": b"nothing of the kind",
    }[how]


@pytest.mark.parametrize("how", ["empty", "cut off", "one bit", "longer", "text"])
def test_damaged_entry_is_compiled_anew_and_replaced(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    run(doubling())
    path = entry(folder)
    sound = path.read_bytes()
    path.write_bytes(damaged(sound, how))
    assert run(doubling()) == (0, 12.0)
    assert "is compiled anew" in caplog.text
    assert entry(folder) == path
    caplog.clear()
    assert run(doubling()) == (1, 12.0)
    assert caplog.text == ""


def test_folder_in_place_of_an_entry_does_not_end_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(doubling())
    path = entry(folder)
    path.unlink()
    path.mkdir()
    assert run(doubling()) == (0, 12.0)
    assert "could not be saved" in caplog.text


def test_entry_that_is_no_kernel_is_compiled_anew_in_its_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(doubling())
    folder_of_entries = KernelFolder(entry(folder).parent, 10**9)
    content = folder_of_entries.read(entry(folder).stem)
    assert content is not None
    folder_of_entries.write(entry(folder).stem, content[:32] + b"no pickle")
    turns = []
    monkeypatch.setattr(KernelFolder, "turn", lambda _, name, **__: contextlib.nullcontext(turns.append(name)))
    before = compiling.seconds()
    assert run(doubling()) == (0, 12.0)
    assert turns == [entry(folder).stem]
    assert compiling.seconds() > before
    assert caplog.text.count("is compiled anew: UnpicklingError") == 1
    assert run(doubling()) == (1, 12.0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_process_forked_while_a_thread_compiles_can_compile(folder: Path) -> None:
    compiles, forks = threading.Event(), threading.Event()

    def compile_until_the_fork_waits() -> None:
        with global_compiler_lock:
            compiles.set()
            forks.wait(0.2)

    thread = threading.Thread(target=compile_until_the_fork_waits)
    thread.start()
    assert compiles.wait(limits.seconds(10))
    child = multiprocessing.get_context("fork").Process(target=run, args=(doubling(),))
    child.start()
    forks.set()
    child.join(limits.seconds(60))
    ended = child.exitcode
    child.kill()
    assert ended == 0
    thread.join()
    assert run(doubling()) == (1, 12.0)


@pytest.mark.slow
def test_full_disk_is_a_warning(tmp_path: Path) -> None:
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    ) + PROGRAM
    result = started(program, tmp_path)
    output, errors = result.communicate("\n", timeout=100)
    assert result.returncode == 0, errors
    assert json.loads(output.splitlines()[1]) == [0, 1, 12.0]
    assert "could not be saved" in errors


def started(program: str, folder: Path) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), "PATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def together(program: str, count: int, folder: Path, timeout: float) -> list[tuple[str, str]]:
    """What processes print that begin their work at once: their outputs and errors."""
    processes = [started(program, folder) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("\n", timeout=timeout) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, outputs
    return outputs


@pytest.mark.slow
def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    outputs = together(PROGRAM, 3, tmp_path, 100)
    results = [json.loads(output) for output, _ in outputs]
    assert [result for _, _, result in results] == [12.0] * 3
    assert sum(hits for hits, _, _ in results) == 2, outputs


def test_failed_compilation_leaves_the_lock_and_the_clock(folder: Path) -> None:
    kernel = doubling()
    with pytest.raises(numba.core.errors.TypingError):
        kernel("no array of numbers")
    assert list(folder.rglob("*.lock")) == []
    before = compiling.seconds()
    assert compiling.seconds() == before


def test_seconds_of_compiling_are_counted_once(folder: Path) -> None:
    before = compiling.seconds()
    run(doubling())
    taken = compiling.seconds() - before
    assert taken > 0
    run(doubling())
    assert compiling.seconds() == before + taken


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), (0, 1), (1, 0)])
def test_rank_0_says_that_it_compiles(
    folder: Path, rank: int | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_clock", compiling._Clock())
    monkeypatch.setattr(compiling, "_AFTER", 0.0)
    with knobs.override(knobs.RANK, rank), caplog.at_level(logging.WARNING):
        doubling()(np.ones(2, np.float32))
        doubling()(np.ones(2, np.float64))
    said = [record.getMessage() for record in caplog.records if "compiling kernels" in record.getMessage()]
    assert len(said) == lines
    assert all(str(folder) in line for line in said)


def test_clock_stands_still_while_kernels_are_compiled() -> None:
    before = compiling.clock()
    compiling.begin("folder")
    first = compiling.clock()
    compiling.begin("folder")  # a kernel that the first one calls
    compiling.end()
    assert compiling.clock() == first
    compiling.end()
    assert before <= first <= compiling.clock()


@pytest.mark.parametrize("reason", ["owner", "mode"])
def test_entry_that_another_user_can_have_written_is_passed_over(
    folder: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(doubling())
    if reason == "mode":
        entry(folder).chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(entry(folder), 54_321, 54_321)
    else:
        pytest.skip("os.geteuid() is not 0, so that files cannot be given away")
    assert run(doubling()) == (0, 12.0)
    assert "is compiled anew" in caplog.text
    assert run(doubling()) == (1, 12.0)


def test_entry_of_another_kernel_under_the_same_name_is_passed_over(folder: Path) -> None:
    run(doubling())
    path = entry(folder)
    folder_of_entries = KernelFolder(path.parent, 10**9)
    content = folder_of_entries.read(path.stem)
    folder_of_entries.write(path.stem, bytes([content[0] ^ 1]) + content[1:])
    assert run(doubling()) == (0, 12.0)


def test_while_another_process_compiles_one_kernel_threads_compile_others(folder: Path) -> None:
    """An open lock file that nobody in this process knows is as one of another process."""
    kernel, results = doubling(), []
    name, _ = kernel._cache._entry((numba.typeof(np.ones(4, np.float32)),))
    (folder / "bagua_kernels").mkdir(exist_ok=True)
    path = folder / "bagua_kernels" / f"{name}.lock"
    with open(path, "ab") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: results.append(run(kernel)))
        thread.start()
        while path.stat().st_nlink and not compiling._clock.depth:
            thread.join(0.001)
        assert _numba_cpu.compile_template(added_up, {})(np.arange(4.0)) == 6.0
        assert thread.is_alive()
        assert results == []
        path.unlink()
        fcntl.flock(others, fcntl.LOCK_UN)
    thread.join()
    assert results == [(0, 12.0)]


def added_up(values):
    total = 0.0
    for value in values:
        total += value
    return total


def test_template_that_reads_what_has_no_digest_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"reads the global 'WEIGHTS' of type list.*pass it in `bindings`"):
        _numba_cpu.compile_template(weighted_sum, {})


WEIGHTS = [1.0, 2.0]


def weighted_sum(values):
    return values[0] * WEIGHTS[0]


def test_part_of_a_kernel_must_be_a_helper(folder: Path) -> None:
    with pytest.raises(TypeError, match="compile it with helper=True"):
        _numba_cpu.compile_template(calls_part, {"part_of_it": doubling()})


def part_of_it(values):
    return values


def calls_part(values):
    return part_of_it(values)


# What a start of other sources does: compiles one kernel of PowerSGD, one of an optimizer and one of a codec.
THREE_KERNELS = """
import json, numpy as np, torch
from numba.core import event

compiled = []

class Compilations(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event):
        pass

event.register("numba:compile", Compilations())
from bagua_kernels import compression
from bagua_kernels.launchers import elementwise, low_rank
from bagua_kernels.rules.optimizers import ElementwiseRule

def negated(x):
    return -x

elementwise.apply(ElementwiseRule("negated", negated, 1, (0,)), [torch.ones(4)], [])
low_rank.orthonormalize(torch.ones(1, 4, 2))
compression.from_spec("minmax_uint8").encode(torch.ones(64))
# Rules have no digest in their names, and are compiled with what calls them.
print(json.dumps(sorted(name for name in compiled if len(name.rpartition("_")[2]) == 16)))
# Of PowerSGD's kernels with vectors, which take seconds, the name is enough.
print(low_rank.OP.backend(torch.device("cpu")).kernels((1,)).project.__name__)
"""


class Copies:
    """Copies of the sources, each in a folder of its own, that share a cache.

    Attributes:
        project: the name of a kernel with vectors in the last copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.project = folder, 0, ""

    def compiled(self, changes: dict[str, tuple[str, str]], **variables: str) -> list[str]:
        """The kernels that a start of a new copy compiles.

        Args:
            changes: by the name of a file, what is replaced there, and by what.
            variables: of the environment.
        """
        self.count += 1
        copy = self.folder / f"copy{self.count}"
        skipped = shutil.ignore_patterns("__pycache__", "comm", "algorithms")
        shutil.copytree(ROOT / "bagua_kernels", copy / "bagua_kernels", ignore=skipped)
        for file, (old, new) in changes.items():
            text = (copy / "bagua_kernels" / file).read_text()
            assert old in text, (file, old)
            (copy / "bagua_kernels" / file).write_text(text.replace(old, new))
        environment = {"NUMBA_CACHE_DIR": str(self.folder / "cache"), "PYTHONPATH": str(copy), "PATH": "", **variables}
        command = [sys.executable, "-c", THREE_KERNELS]
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stderr
        compiled, self.project = result.stdout.splitlines()
        return list(json.loads(compiled))


FIRST = "from __future__ import annotations\n"


def starts(names: list[str], part: str) -> list[str]:
    return [name for name in names if name.startswith(part)]


@pytest.mark.slow
def test_what_is_compiled_depends_on_sources_and_processor_only(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    first = copies.compiled({})
    assert starts(first, "over_range")
    assert starts(first, "encode_blocks")
    assert copies.compiled({}) == []
    comment = {
        "launchers/blockwise/_numba_cpu_block.py": ("\ndef ", "\n# Another comment.\ndef "),
        "rules/quantizers.py": ("\ndef ", "\n# Another comment.\ndef "),
        "jit/_numba_cpu_intrinsics.py": ("\ndef ", "\n# Another comment.\ndef "),
        "launchers/low_rank/_numba_cpu_vectors.py": ("\ndef ", "\n# Another comment.\ndef "),
    }
    assert copies.compiled(comment) == []
    # The vectors of PowerSGD are part of no other kernels.
    project = copies.project
    assert copies.compiled({"launchers/low_rank/_numba_cpu_vectors.py": (FIRST, FIRST + "CHANGED = True\n")}) == []
    assert copies.project != project
    # A template, and a rule that some kernels call.
    blocks = "def encode_blocks(x, words, codes, counts, seed_low, seed_high, begin, end, threads, launcher):"
    changed = {"launchers/blockwise/_numba_cpu_loops.py": (blocks, blocks + "\n    unused = 1")}
    assert [name.rpartition("_")[0] for name in copies.compiled(changed)] == ["encode_blocks"]
    changed = {"rules/quantizers.py": ("tl.maximum(nearest_integer(steps), bottom)", "nearest_integer(steps)")}
    rule = copies.compiled(changed)
    assert starts(rule, "encode_blocks")
    assert not starts(rule, "over_range")
    everything = copies.compiled({"jit/_numba_cpu_intrinsics.py": (FIRST, FIRST + "CHANGED = True\n")})
    assert len(everything) == len(first)
    assert len(copies.compiled({}, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")) == len(first)
    assert copies.compiled({}) == []


# Trains in one job of four ranks, which are threads; prints what it has compiled, with the types of the arguments.
JOB = """
import json, sys
from numba.core import event

compiled = []

class Compilations(event.Listener):
    def on_start(self, event):
        compiled.append((event.data["dispatcher"].py_func.__name__, str(event.data["args"])))

    def on_end(self, event):
        pass

event.register("numba:compile", Compilations())
import torch
from bagua_kernels import optim
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import run_ranks

def train(communicator):
    module = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.Linear(60, 10))
    optimizer = optim.AdamW(module.parameters())
    model = from_spec("bytegrad", module, optimizer, communicator=communicator, warmup_steps=0)
    for _ in range(3):
        model(torch.ones(4, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()

print("ready", flush=True)
sys.stdin.readline()
run_ranks(4, train, timeout=600.0)
print(json.dumps([name for name in compiled if len(name[0].rpartition("_")[2]) == 16]))
"""


@pytest.mark.slow
def test_two_jobs_at_once_compile_no_kernel_twice(tmp_path: Path) -> None:
    outputs = together(JOB, 2, tmp_path, 600)
    first, second = ([tuple(name) for name in json.loads(output.splitlines()[-1])] for output, _ in outputs)
    compiled = [*first, *second]
    assert compiled
    assert len(set(compiled)) == len(compiled), sorted(set(first) & set(second))
    assert len(compiled) == len(list(tmp_path.rglob("*.nbc")))


# Root fills the cache, and another user, in a forked process, finds its kernels there.
OTHER_USER = """
import os, sys
sys.stdin.readline()
import numpy as np
from tests.jit import test_kernel_cache as cases

assert cases.run(cases.doubling()) == (0, 12.0)
child = os.fork()
if not child:
    os.setgid(54_321)
    os.setuid(54_321)
    found = cases.run(cases.doubling())
    print(found, flush=True)
    os._exit(found != (1, 12.0))
_, status = os.waitpid(child, 0)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="os.geteuid() is not 0, so that no other user can be tried")
def test_cache_that_root_has_filled_serves_others() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest keeps its own from other users
        Path(folder).chmod(0o755)
        process = started(OTHER_USER, Path(folder))
        output, errors = process.communicate("\n", timeout=limits.seconds(600))
    assert process.returncode == 0, (output, errors)
    assert output == "(1, 12.0)\n"
