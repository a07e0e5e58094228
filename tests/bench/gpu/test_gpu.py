"""`make gpu-check` without a GPU: the runner with stages that pass, fail, crash, hang and flood, and the digests of the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bench.gpu.__main__ as command
from bench.gpu import digests, marks, stage, tests_of, workers
from bench.gpu.child import ROOT, Child
from bench.gpu.runner import CRASHED, FAILED, NOT_RUN, PASSED, REFUSED, TIMED_OUT, Report, Runner, Stage, table
from tests import limits

LONG = limits.seconds(90)
PASSES = "marks.figures({'rate': 5}); marks.headline('all well'); marks.row('one row')"
RAISES = "marks.figures({'before': 1}); raise ValueError('this fails')"
ABORTS = "marks.figures({'before': 2}); import os; os.abort()"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "marks.figures({'before': 3})\nimport time\nwhile True: time.sleep(1)"
FLOODS = "for i in range(60_000): print('x' * 100, i)\nmarks.figures({'after': 4})"
NO_LINES = "import sys; sys.stdout.write('y' * 300_000)"
REFUSES = "import sys; marks.put(marks.REFUSED, 'no module that is needed'); sys.exit(marks.REFUSED_STATUS)"


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", f"from bench.gpu import marks\n{code}"


def dummy(name: str, code: str, limit: float = LONG, **options: object) -> Stage:
    return Stage(name, python(code), limit, environment={"PYTHONPATH": str(ROOT)}, **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    """False for zombies, too, which nobody may collect here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    limits.until(condition, "the child has come so far", limit=90, pause=0.02)


def runner(folder: Path, stages: list[Stage], deadline: float = 10 * LONG, cores: int = 4) -> tuple[Runner, list[str]]:
    said: list[str] = []
    return Runner(stages, folder / "log.txt", folder / "summary.jsonl", deadline, cores=cores, say=said.append), said


def test_each_stage_has_its_outcome_and_costs_no_other(tmp_path: Path) -> None:
    stages = [
        dummy("passes", PASSES),
        dummy("raises", RAISES),
        dummy("aborts", ABORTS),
        dummy("killed", KILLED),
        dummy("hangs", HANGS, limit=limits.seconds(4), least=1.0),
        dummy("floods", FLOODS),
        dummy("no lines", NO_LINES, alone=True),
        dummy("refuses", REFUSES),
        Stage("no program", ("/no/such/program",), LONG),
        dummy("too long", PASSES, least=1e6),
        dummy("last", PASSES),
    ]
    run, said = runner(tmp_path, stages)
    reports = {report.stage.name: report for report in run.run()}
    expected = {
        **{
            "passes": PASSED,
            "raises": FAILED,
            "aborts": CRASHED,
            "killed": CRASHED,
            "hangs": TIMED_OUT,
            "floods": PASSED,
        },
        **{"no lines": PASSED, "refuses": REFUSED, "no program": FAILED, "too long": NOT_RUN, "last": PASSED},
    }
    assert {name: report.outcome for name, report in reports.items()} == expected
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert {line["stage"]: line["outcome"] for line in lines} == expected
    by_name = {line["stage"]: line for line in lines}
    assert by_name["passes"]["figures"] == {"rate": 5}
    assert [by_name[name]["figures"] for name in ("raises", "aborts", "floods")] == [
        {"before": 1},
        {"before": 2},
        {"after": 4},
    ]
    assert by_name["raises"]["reason"] == "ValueError: this fails"
    assert by_name["aborts"]["reason"] == f"ended by signal {signal.SIGABRT}"
    assert by_name["refuses"]["reason"] == "no module that is needed"
    assert by_name["floods"]["lines"] == 60_001
    log = (tmp_path / "log.txt").read_text()
    assert len(log) < 1_000_000
    # The end of a flood is kept, and no line of another stage is lost.
    assert "x 59999\n" in log
    assert "lines are left out" in log
    assert "ValueError: this fails" in log
    assert len(said) == len(stages)
    shown = table(run.reports, "title")
    assert len(shown) <= 60
    assert "4 passed, 2 failed, 1 timed out, 2 crashed, 1 refused, 1 not run" in shown[-1]


def test_a_stage_that_is_to_be_alone_is(tmp_path: Path) -> None:
    """Each stage writes when it begins and ends; none of the others begins within the one that is alone."""
    events = tmp_path / "events"
    code = (
        "import os, sys, time\nf = os.open({path!r}, os.O_APPEND | os.O_CREAT | os.O_WRONLY)\n"
        "os.write(f, b'begin {name}\\n'); time.sleep(0.1); os.write(f, b'end {name}\\n')"
    )
    names = ("a", "b", "alone", "c", "d")
    stages = [dummy(name, code.format(path=str(events), name=name), alone=name == "alone") for name in names]
    run, _ = runner(tmp_path, stages)
    assert [report.outcome for report in run.run()] == [PASSED] * 5
    lines = events.read_text().split("\n")
    place = lines.index("begin alone")
    assert lines[place + 1] == "end alone"
    assert {line.split()[1] for line in lines[:place]} == {"a", "b"}


def test_no_stage_starts_after_the_deadline(tmp_path: Path) -> None:
    run, said = runner(tmp_path, [dummy("first", HANGS, least=0.1), dummy("second", PASSES)], deadline=2.0, cores=1)
    assert [report.outcome for report in run.run()] == [TIMED_OUT, NOT_RUN]
    assert "of 2 s were left" in said[1]


def test_a_killed_group_has_no_survivors() -> None:
    """Neither a process of the group survives nor one that has left it."""
    inner = "import time\nwhile True: time.sleep(1)"
    code = (
        "import subprocess, sys, time\n"
        f"both = [subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=new) for new in (False, True)]\n"
        "print('CHILDREN', *(each.pid for each in both), flush=True)\nwhile True: time.sleep(1)"
    )
    lines: list[str] = []
    child = Child(python(code), lines.append, LONG, {"PYTHONPATH": str(ROOT)})
    wait_until(lambda: lines)
    pids = [int(word) for word in lines[0].split()[1:]]
    assert all(map(alive, pids))
    assert not child.poll()
    child.limit = 0.0
    assert child.poll()
    assert (child.timed_out, child.status) == (True, -signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)))


def test_stages_end_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hangs = (
        "import os, time\nfrom bench.gpu.child import end_with_parent\nend_with_parent()\n"
        f"open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(1000)"
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom bench.gpu.runner import Runner, Stage\n"
        f"stage = Stage('hangs', (sys.executable, '-c', {hangs!r}), 1000)\n"
        f"Runner([stage], Path({str(tmp_path)!r}) / 'log', Path({str(tmp_path)!r}) / 'summary', 1000).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(int(pid_file.read_text())))


def test_table_has_60_lines_at_most() -> None:
    reports = []
    for number in range(12):
        report = Report(Stage(f"stage {number}", (), 1.0, rows=50), FAILED, reason="a\nb")
        report.table = [f"row {i}" for i in range(50)]
        reports.append(report)
    shown = table(reports, "title")
    assert len(shown) == 60
    assert all(any(line.startswith(f"stage {number} ") for line in shown) for number in range(12))
    assert all("\n" not in line for line in shown)


@pytest.mark.parametrize(("code", "status"), [(PASSES, 0), (REFUSES, 0), (RAISES, 1), (ABORTS, 1)])
def test_exit_status(
    code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [dummy("facts", code), dummy("smoke", PASSES), dummy("speed", PASSES)]
    monkeypatch.setattr(command, "stages", lambda *_: stages)
    monkeypatch.setattr(sys, "argv", ["gpu", "--stages", "facts smoke"])
    monkeypatch.setenv("OUT", str(tmp_path))
    # What an earlier run has left of another stage stays.
    (tmp_path / "summary.jsonl").write_text('{"stage": "facts"}\n{"stage": "speed"}\n')
    assert command.main() == status
    assert "facts" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    assert lines[0] == {"stage": "speed"}
    assert {line["stage"] for line in lines if "outcome" in line} == {"facts", "smoke"}


def test_a_machine_that_refuses_everything_has_not_been_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "stages", lambda *_: [dummy("facts", REFUSES)])
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path)])
    assert command.main() == 1


def test_unknown_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--stages", "facts spead"])
    with pytest.raises(SystemExit):
        command.main()


def test_limits_fit_the_deadline() -> None:
    """Also if every stage runs to its limit: the order of the runner on 16 cores, in seconds that are not waited for."""
    left, now, running = list(command.stages()), 0.0, list[tuple[float, Stage]]()
    while left or running:
        free = 16 - sum(each.cores for _, each in running)
        started = None
        for each in left:
            if not running or (not each.alone and each.cores <= free and not any(other.alone for _, other in running)):
                started = each
                break
            if each.alone:
                break
        if started is not None:
            left.remove(started)
            running.append((now + started.limit, started))
            continue
        now = min(end for end, _ in running)
        running = [(end, each) for end, each in running if end > now]
    assert now <= command.DEADLINE


def test_missing_modules_are_refusals() -> None:
    with pytest.raises(ModuleNotFoundError) as lacks:
        __import__("no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError) as ours:
        __import__("bench.gpu.no_such_stage")
    assert stage.refusal(lacks.value) == "no module no_such_module_at_all"
    assert stage.refusal(ours.value) == ""
    assert stage.refusal(marks.Refused("why")) == "why"
    assert stage.refusal(ValueError("wrong")) == ""


def test_a_stage_without_its_module_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "find_spec", lambda name: None if name == "triton" else object())
    assert stage.run("smoke", stage.Context("cpu", small=True)) == marks.REFUSED_STATUS
    assert marks.parsed(capsys.readouterr().out.strip()) == (marks.REFUSED, "no module triton")


def test_every_stage_has_a_file() -> None:
    files = {file.stem for file in (ROOT / "bench/gpu/stages").glob("*.py")} - {"__init__", "compared"}
    assert {each.name for each in command.stages()} == files
    assert stage.NEEDS.keys() <= files


def test_marked_lines_survive_other_text() -> None:
    assert marks.parsed('FIGURE {"a": 1}') == (marks.FIGURE, {"a": 1})
    for line in ("FIGURE {cut", "FIGURE 3", "a FIGURE", ""):
        assert marks.parsed(line)[0] == ""
    assert marks.parsed("HEADLINE two words") == (marks.HEADLINE, "two words")


def test_workers_cost_only_themselves(capfd: pytest.CaptureFixture[str]) -> None:
    commands = {
        **{"passes": python(PASSES), "raises": python(RAISES), "aborts": python(ABORTS)},
        **{"hangs": python(HANGS), "refuses": python(REFUSES)},
    }
    own = {name: {"PYTHONPATH": str(ROOT)} for name in commands}
    found = workers.run_workers(commands, 5.0, environment=own)
    outcomes = {name: worker.outcome for name, worker in found.items()}
    # On a machine with much other work one of the others may not end in time, either.
    assert outcomes["hangs"] == TIMED_OUT
    expected = {"passes": PASSED, "raises": FAILED, "aborts": CRASHED, "refuses": REFUSED}
    assert all(outcomes[name] in (outcome, TIMED_OUT) for name, outcome in expected.items())
    assert found["hangs"].figures in ({"before": 3}, {})
    with pytest.raises(marks.Differs, match="hangs"):
        workers.judge(found)
    assert '"rate": 5' in capfd.readouterr().out


def test_outcomes_of_tests_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\ndef test_one(): pass\ndef test_two(): assert 0\n@pytest.mark.skip\ndef test_three(): pass\n"
    )
    counts = tests_of.run_tests("some", [str(file)], LONG, tmp_path / "report.xml", jobs=1, timeout=60)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1}
    assert "test_some.py::test_two" in capfd.readouterr().out
    with pytest.raises(marks.Differs, match="some"):
        tests_of.verdict({"some": counts})


def test_digests_have_all_cases() -> None:
    from bagua_kernels.algorithms import names
    from bench.gpu import cases, trainings

    known = digests.read()
    assert set(known["groups"]) == set(cases.group_names()), "run `make gpu-digests`"
    for group in cases.group_names():
        expected = {case.name: digests.LENGTH * len(case.operations) for case in cases.cases_of(group)}
        assert {name: len(text) for name, text in known["groups"][group].items()} == expected, group
    trained = {*names(), *(f"deep {name}" for name in trainings.BY_PROCESSES)}
    assert set(known["losses"]) == trained, "run `python -m bench.gpu.digests --groups losses`"
    assert digests.PATH.stat().st_size < 1_000_000


def check(group: str, chosen: Callable[[str], bool]) -> int:
    from bench.gpu import cases

    known, number = digests.of_group(group), 0
    for case in cases.cases_of(group):
        if chosen(case.name):
            found = dict(zip(case.operations, case.digests(cases.CPU), strict=True))
            assert found == dict(zip(case.operations, known[case.name], strict=True)), (group, case.name)
            number += 1
    return number


# Kernels that other tests of the default tier compile, too, or none.
@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("inputs", "heavy float32 1009"),
        ("inputs", "huge bfloat16 257"),
        ("identity", "nan float16 1009"),
        ("cast", "offset float32 257"),
        ("low_rank", "3x64x2"),
        ("elementwise", "adam float32 257"),
        ("minmax_uint8", "heavy float32 257 block 256"),
    ],
)
def test_digests_are_those_of_the_kernels(group: str, name: str) -> None:
    assert check(group, lambda each: each == name) == 1


def everything() -> list[str]:
    from bench.gpu import cases

    return cases.group_names()


@pytest.mark.slow  # Compiles most kernels of float32.
@pytest.mark.parametrize("group", everything())
def test_all_digests_of_float32_are_those_of_the_kernels(group: str) -> None:
    dtypes = ("float16", "bfloat16", " 150001", " 4000037", "block 32", "block 4096")
    assert check(group, lambda name: not any(part in name for part in dtypes)) > 0


@pytest.mark.slow  # Kernels run in Triton's interpreter and in Numba's simulator.
def test_all_stages_run_without_a_gpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--patience", "8", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    outcomes = {line["stage"]: line["outcome"] for line in lines}
    assert outcomes == dict.fromkeys((each.name for each in command.stages()), PASSED), done.stdout
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 60 + len(outcomes)
