"""The launcher that measures before it starts a job."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bagua_kernels import comm
from bagua_kernels.comm.programs.tuning import command as tune_command
from bagua_kernels.comm.programs.tuning import launcher as tune_launcher
from bagua_kernels.comm.programs.tuning import probe as tune_probe
from bagua_kernels.comm.programs.tuning.choice import DEFAULTS, ProbeError, choose, next_candidate, ratio
from bagua_kernels.comm.programs.tuning.command import Command, CommandError, parse
from bagua_kernels.comm.programs.tuning.launcher import Probes
from bagua_kernels.comm.programs.tuning.probe import Case, Node, Order, Result
from bagua_kernels.comm.programs.tuning.report import show
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.comm.tuning import measure as tuning_measure
from tests import limits
from tests.grids import grid

ROOT = Path(__file__).parents[4]
HOST = Node("eth0", ("eth0", "eth1"))
CASES = (Case(1024, 1, 3), Case(4096, 4, 3))
PROBE = "bagua_kernels.comm.programs.tuning.probe"

# Stands in for torchrun: probes end at once with status 3 or hang, the user's script gets RANK and runs.
TORCHRUN = f"""
import os, sys, time
if "{PROBE}" in sys.argv:
    print("the network is down", flush=True)
    time.sleep(60 if "--hang" in sys.argv else 0)
    sys.exit(3)
script = next(number for number, word in enumerate(sys.argv) if word.endswith("script.py"))
os.execv(sys.executable, [sys.executable, *sys.argv[script:]])
"""
SCRIPT = """
import json, os, sys
names = ("BAGUA_KERNELS_TUNING", "GLOO_SOCKET_IFNAME", "GIVEN")
open(sys.argv[1] + os.environ.get("RANK", ""), "w").write(json.dumps({n: os.environ.get(n) for n in names}))
sys.exit(int(sys.argv[2]))
"""


@grid(cover=1, line__launcher__options__kind=[
        ("torchrun script.py", "torchrun", "", "script"),
        ("torchrun --nproc-per-node 2 script.py --lr 1 -m x", "torchrun", "--nproc-per-node 2", "script"),
        ("/usr/bin/torchrun --nproc_per_node=2 script.py", "/usr/bin/torchrun", "--nproc_per_node=2", "script"),
        ("torchrun --standalone -- script.py a", "torchrun", "--standalone", "script"),
        ("torchrun --standalone script.py -- a", "torchrun", "--standalone", "script"),
        ("torchrun --nnodes 2 script.py script.py", "torchrun", "--nnodes 2", "script"),
        ("torchrun --nproc-per-node 2 -m train --nnodes 7", "torchrun", "--nproc-per-node 2 -m", "module"),
        ("torchrun --no-python --nproc-per-node 2 bash -c x", "torchrun", "--no-python --nproc-per-node 2", "command"),
        ("torchrun --run-path s.py", "torchrun", "--run-path", "path"),
        ("python -m torch.distributed.run --nnodes=1 s.py", "python -m torch.distributed.run", "--nnodes=1", "script"),
        ("python3.12 -u -X dev -m torch.distributed.run s.py", "python3.12 -u -X dev -m torch.distributed.run", "",
         "script"),
        ("python -m torch.distributed.launch --use-env s.py", "python -m torch.distributed.launch", "--use-env",
         "script"),
        ("python bin/torchrun -m train", "python bin/torchrun", "-m", "module"),
    ])  # fmt: skip
def test_parse_finds_the_users_script(line: str, launcher: str, options: str, kind: str) -> None:
    command = parse(line.split())
    assert command.launcher == tuple(launcher.split())
    assert command.options == tuple(options.split())
    assert command.kind == kind


@grid(
    cover=1,
    line__text=[
        ("", "got nothing"),
        ("mpirun -n 2 python script.py", "expected `torchrun.*got mpirun -n 2.*--dry-run -- torchrun"),
        ("srun torchrun script.py", "got srun torchrun"),
        ("python script.py", "got python script.py"),
        ("python -m train", "got python -m train"),
        ("python -m", "got python -m"),
        ("torchrun --frobnicate script.py", "does not take these arguments.*frobnicate"),
        ("torchrun --nproc-per-node 2", "does not take these arguments.*training_script"),
        ("torchrun --nnodes x script.py", "does not take these arguments.*'x'"),
    ],
)
def test_parse_says_what_it_expects(line: str, text: str) -> None:
    with pytest.raises(CommandError, match=text):
        parse(line.split())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("torchrun --standalone script.py", "one process"),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 script.py", "--nnodes 1:4 lets the number"),
        ("torchrun --nnodes 2 script.py", ""),
        ("torchrun --nnodes 2:2 script.py", ""),
        ("torchrun --nproc-per-node gpu script.py", ""),
    ],
)
def test_parse_tells_jobs_that_cannot_be_measured(line: str, text: str) -> None:
    unsuitable = parse(line.split()).unsuitable
    assert unsuitable == "" if not text else text in unsuitable


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("torchrun -r 3 --log-dir mine script.py a", ["--log-dir", "tmp", "--module", PROBE, "{}"]),
        ("torchrun --rdzv-id job7 -m train", [PROBE, "{}"]),
        ("torchrun --no-python bash x", [sys.executable, "-m", PROBE, "{}"]),
        ("torchrun --run-path s.py", [tune_probe.__file__, "{}"]),
    ],
)
def test_probe_takes_the_place_of_the_script(line: str, end: list[str]) -> None:
    command = parse(line.split())
    words = command.probing(4, "{}", Path("tmp"))
    assert words[-len(end) :] == end
    assert words[: 1 + len(command.options)] == ["torchrun", *command.options]
    again = tune_command.get_args_parser().parse_args(words[1:])
    assert again.rdzv_id == ("job7-tune4" if "job7" in line else "none-tune4")
    assert (again.max_restarts, again.redirects, again.tee) == (0, "0", "0")
    assert again.training_script in end


def found(backend: str = "gloo", *nodes: Node) -> Result:
    return Result(backend, 4, nodes or (HOST, HOST), CASES, (1.0, 1.0))


def walk(first: Result, best: dict[str, float] | None = None) -> list[str]:
    """Follows the search with made-up ratios; returns the candidates in their order."""
    ratios, seen = {DEFAULTS: 1.0}, []
    while (candidate := next_candidate(first, ratios)) is not None:
        name = " ".join(f"{name.removeprefix('NCCL_')}={value}" for name, value in candidate)
        ratios[candidate] = (best or {}).get(name, 1.0)
        seen.append(name.replace("GLOO_SOCKET_IFNAME=", ""))
        assert len(seen) < 50
    return seen


def test_gloo_candidates() -> None:
    """Interfaces that all hosts have, then the best one several times."""
    assert walk(found()) == ["eth1", "eth0,eth0", "eth0,eth0,eth0,eth0"]
    assert walk(found(), {"GLOO_SOCKET_IFNAME=eth1": 0.5}) == ["eth1", "eth1,eth1", "eth1,eth1,eth1,eth1"]
    assert walk(found(), {"GLOO_SOCKET_IFNAME=eth1": math.inf})[1:] == ["eth0,eth0", "eth0,eth0,eth0,eth0"]
    assert walk(found("gloo", HOST)) == ["eth0,eth0", "eth0,eth0,eth0,eth0"]
    assert walk(found("gloo", HOST, Node("ens3", ("ens3", "eth1")))) == ["eth1"]
    assert walk(found("gloo", HOST, Node("ens3", ("ens3",)))) == []
    assert walk(found("gloo", HOST, Node("eth0", ("eth0",), (("GLOO_SOCKET_IFNAME", "eth0"),)))) == []


def test_nccl_candidates() -> None:
    """One thing after another, with what was best so far, and never more sockets than NCCL takes."""
    threads = [f"SOCKET_NTHREADS={n}" for n in (2, 4, 8)]
    socks = [f"NSOCKS_PERTHREAD={n}" for n in (2, 4, 8)]
    sizes = [f"BUFFSIZE={n << 20}" for n in (2, 8, 16)]
    assert walk(found("nccl")) == threads + socks + sizes
    chosen = walk(found("nccl"), {threads[1]: 0.9, f"{threads[1]} {socks[0]}": 0.8})
    assert chosen[3:] == [f"{threads[1]} {one}" for one in socks] + [f"{threads[1]} {socks[0]} {one}" for one in sizes]
    assert walk(found("nccl", HOST)) == sizes
    user = Node("eth0", ("eth0",), (("NCCL_SOCKET_NTHREADS", "16"),))
    assert walk(found("nccl", user, HOST)) == socks[:2] + sizes


def test_three_percent_are_asked_for() -> None:
    a, b = (("X", "1"),), (("X", "2"),)
    assert choose([DEFAULTS, a, b], {DEFAULTS: 1.0, a: 0.98, b: 0.975}) == DEFAULTS
    assert choose([DEFAULTS, a, b], {DEFAULTS: 1.0, a: 0.96, b: 0.95}) == b
    assert choose([DEFAULTS, a], {DEFAULTS: 1.0, a: math.inf}) == DEFAULTS
    assert choose([DEFAULTS, a], {DEFAULTS: 1.0}) == DEFAULTS
    assert ratio((1.0, 8.0), (2.0, 4.0)) == pytest.approx(1.0)


class MadeUp(Probes):
    """Probes whose times depend on the interfaces; those without a time fail."""

    def __init__(self, times: dict[str, float], node: Node = HOST, nodes: int = 1, budget: float = 1000.0) -> None:
        super().__init__(Command(("torchrun",), (), "script", nodes, "none"), {}, budget, "auto")
        self.times, self.nodes, self.jobs = times, (node,) * nodes, []
        self.later: dict[str, float] = {}

    def run(self, variables, cases=(), own=0.0):
        name = variables.get("GLOO_SOCKET_IFNAME", "")
        times = {**self.times, **self.later} if name in self.jobs else self.times
        self.jobs.append("own" if own else name)
        self._each = 10.0
        self._end = 10.0 * len(self.jobs)
        if own:
            tuning = comm.Tuning(stripes=4, measured={"all_reduce": []})
            return Result("gloo", 2, self.nodes, tuning=tuning.to_json())
        if name not in times:
            raise ProbeError("it is broken")
        return Result("gloo", 2, self.nodes, CASES, (times[name],) * 2)


def test_search_repeats_what_looks_faster() -> None:
    probes = MadeUp({"": 1.0, "eth0,eth0": 0.9, "eth0,eth0,eth0,eth0": 0.8})
    outcome = tune_launcher.search(probes, [1024])
    assert probes.jobs == ["", "eth0,eth0", "eth0,eth0,eth0,eth0", "eth0,eth0,eth0,eth0", "eth0,eth0", "", "own"]
    assert outcome.chosen["GLOO_SOCKET_IFNAME"] == "eth0,eth0,eth0,eth0"
    assert outcome.chosen["BAGUA_KERNELS_SOCKETS"] == "4"
    assert comm.Tuning.from_json(outcome.chosen["BAGUA_KERNELS_TUNING"]) == comm.Tuning(stripes=4)


def test_search_believes_only_what_it_has_seen_twice() -> None:
    probes = MadeUp({"": 1.0, "eth0,eth0": 0.8, "eth0,eth0,eth0,eth0": 0.98})
    probes.later = {"eth0,eth0": 0.98}
    outcome = tune_launcher.search(probes, [1024])
    assert probes.jobs == ["", "eth0,eth0", "eth0,eth0,eth0,eth0", "eth0,eth0", "", "own"]
    assert "GLOO_SOCKET_IFNAME" not in outcome.chosen


def test_search_goes_on_without_a_broken_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    probes = MadeUp({"": 1.0, "eth0,eth0,eth0,eth0": 0.5})
    outcome = tune_launcher.search(probes, [1024])
    assert outcome.chosen["GLOO_SOCKET_IFNAME"] == "eth0,eth0,eth0,eth0"
    assert "eth0,eth0 failed: it is broken" in " ".join(outcome.notes)
    show(outcome)
    shown = capsys.readouterr().err
    assert "failed" in shown
    assert "-50.0 %" in shown


def test_search_of_several_hosts_ends_with_a_broken_candidate() -> None:
    """Another host's launcher may have failed elsewhere: nothing is chosen that it might not have seen."""
    probes = MadeUp({"": 1.0, "eth1": 0.5}, nodes=2)
    outcome = tune_launcher.search(probes, [1024])
    assert probes.jobs == ["", "eth1", "eth1,eth1"]
    assert outcome.chosen == {}


@pytest.mark.parametrize(
    ("budget", "jobs"),
    [
        (20, ["", "own"]),
        (70, ["", "eth0,eth0", "eth0,eth0", "", "own"]),
        (80, ["", "eth0,eth0", "eth0,eth0,eth0,eth0", "eth0,eth0", "", "own"]),
    ],
)
def test_search_keeps_to_the_budget(budget: float, jobs: list[str]) -> None:
    """A candidate is tried only if there is time to see it again; a job takes 10 seconds here, `tune` a quarter."""
    probes = MadeUp({"": 1.0, "eth0,eth0": 0.9, "eth0,eth0,eth0,eth0": 0.95}, budget=budget)
    outcome = tune_launcher.search(probes, [1024])
    assert probes.jobs == jobs
    assert any("does not last" in note for note in outcome.notes) == (budget < 80)


def test_search_keeps_the_users_variables() -> None:
    fixed = (("GLOO_SOCKET_IFNAME", "eth7"), ("BAGUA_KERNELS_TUNING", "{}"))
    probes = MadeUp({"": 1.0}, Node("eth0", ("eth0",), fixed))
    outcome = tune_launcher.search(probes, [1024])
    assert (probes.jobs, outcome.chosen) == ([""], {})
    assert "GLOO_SOCKET_IFNAME=eth7 is set and stays" in outcome.notes


def test_plan_has_several_under_way() -> None:
    assert tune_probe.plan([1 << 20, 1024]) == (Case(1024, 1), Case(1 << 20, 1), Case(1 << 20, 4))


@pytest.mark.slow
def test_probe_writes_its_result(tmp_path: Path) -> None:
    order = Order(str(tmp_path / "result"), HOST, "gloo", (Case(1024, 1), Case(4096, 4, 2)), seconds=0.1, spent=1.5)
    results = run_processes(tune_probe.main, 2, args=["--local-rank=0", json.dumps(asdict(order))])
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    result = Result.from_json((tmp_path / "result").read_text())
    assert (result.backend, result.world, result.nodes, result.spent) == ("gloo", 2, (HOST,), 1.5)
    assert [(case.nbytes, case.in_flight) for case in result.cases] == [(1024, 1), (4096, 4)]
    assert result.cases[0].rounds >= 3
    assert result.cases[1].rounds == 2
    assert all(seconds > 0 for seconds in result.seconds)
    with pytest.raises(ValueError, match="no result of a probe"):
        Result.from_json("{}")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "torchrun").write_text(f"#!{sys.executable}\n{TORCHRUN}")
    (tmp_path / "torchrun").chmod(0o755)
    return tmp_path


def launch(folder: Path, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher; the job writes the variables that it sees to `seen` and its rank."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    drop = ("TORCHELASTIC_", "PET_", "RANK", "WORLD_SIZE", "GLOO_", "BAGUA_KERNELS_TUNING", "BAGUA_KERNELS_SOCKETS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    command = [sys.executable, "-m", "bagua_kernels.comm.tune", *words]
    environment = {**kept, "PYTHONPATH": path, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limits.seconds(100)
    )


@pytest.mark.slow
def test_job_runs_though_the_probe_fails(job: Path) -> None:
    ended = launch(job, ["--", "./torchrun", "--nproc-per-node", "2", "script.py", "seen", "5"], GIVEN="x")
    assert ended.returncode == 5, ended.stderr
    assert "environment stays as it is" in ended.stderr
    assert "the network is down" in ended.stderr
    assert json.loads((job / "seen").read_text())["GIVEN"] == "x"


def test_probe_that_hangs_is_ended(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_launcher, "_LIMIT", 0.5)
    command = Command((sys.executable, str(job / "torchrun"), "--hang"), (), "script", 1, "none")
    with pytest.raises(ProbeError, match=r"the network is down\nit was ended after"):
        Probes(command, os.environ, 10.0, "gloo").run({})


def test_reuse(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "found.json").write_text(json.dumps({"variables": {"NCCL_BUFFSIZE": "7", "NCCL_NSOCKS_PERTHREAD": "a b"}}))
    words = ["--dry-run", "--reuse", str(job / "found.json"), "--", "torchrun", "--nproc-per-node", "2", "script.py"]
    assert tune_launcher.main(words, {"NCCL_BUFFSIZE": "3"}) == 0
    assert capsys.readouterr().out == "export NCCL_NSOCKS_PERTHREAD='a b'\n"
    words[2] += "x"
    assert tune_launcher.main(words, {}) == 1
    assert "expected what --json has written" in capsys.readouterr().err
    assert tune_launcher.main(["--", "mpirun", "x"], {}) == 2


@pytest.mark.parametrize("text", [None, "", "[1]", '{"variables": [1]}'])
def test_a_file_that_is_not_found_starts_no_job(
    text: str | None, job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execvpe", lambda *command: started.append(command))
    path = job / "missing.json"
    if text is not None:
        path.write_text(text)
    words = ["--reuse", str(path), "--", "torchrun", "--nproc-per-node", "2", "script.py"]
    assert tune_launcher.main(words, {}) == 1
    said = capsys.readouterr().err
    assert "the job is not started" in said
    assert "missing.json" in said
    assert not started


def test_a_report_that_cannot_be_written_is_told_before(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_launcher, "search", lambda *_: pytest.fail("it measured first"))
    path = job / "nowhere" / "found.json"
    words = ["--json", str(path), "--", "torchrun", "--nproc-per-node", "2", "script.py"]
    assert tune_launcher.main(words, {}) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_job_gets_what_was_measured(job: Path) -> None:
    words = ["--budget", "1", "--sizes", "64K", "--json", "found.json", "--", sys.executable]
    words += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "script.py", "seen", "0"]
    ended = launch(job, words)
    assert ended.returncode == 0, ended.stderr
    assert "All-reduce on gloo, 2 ranks" in ended.stderr
    assert ended.stdout == ""
    for rank in range(2):
        seen = json.loads((job / f"seen{rank}").read_text())
        assert (
            seen["BAGUA_KERNELS_TUNING"]
            == json.loads((job / "found.json").read_text())["variables"]["BAGUA_KERNELS_TUNING"]
        )
        comm.Tuning.from_json(seen["BAGUA_KERNELS_TUNING"])


def test_the_function_keeps_its_name() -> None:
    with pytest.raises(ImportError, match="is a command, not a module to import"):
        importlib.import_module("bagua_kernels.comm.tune")
    assert comm.tune is tuning_measure.tune
    assert "bagua_kernels.comm.tune" not in sys.modules
