"""`python -m bagua_kernels.comm.tune -- torchrun …`: finds the transport's variables that suit the hosts, then starts.

1. torch's own parser reads the command. It is run with the probe instead of the user's script: once unchanged, then with
   each candidate set of variables, until the budget is spent.
2. The candidates vary one thing after another: what was best in one step is kept in the next. Candidates that are more
   than 3 % faster than the defaults are run once more, in reversed order. The best one that is faster both times is
   chosen.
3. On Gloo, one more job runs `bagua_kernels.comm.tune`.
4. The process is replaced by the user's command with the chosen variables.

Launchers of several hosts decide by what the probes report, which is equal on all of them, and by nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import bagua_kernels
from bagua_kernels import knobs
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.programs.tuning import choice
from bagua_kernels.comm.programs.tuning import probe as tune_probe
from bagua_kernels.comm.programs.tuning.command import Command, CommandError, parse
from bagua_kernels.comm.programs.tuning.probe import Case, Node, Order, Result
from bagua_kernels.comm.programs.tuning.report import reused, show, text, write

_OWN_SOCKETS = 4  # that the package's own `tune` may try
_START = 5.0  # seconds, about, that a job of Python and torch takes to start
_LIMIT = 90.0  # seconds, beyond what is measured, after which a probe has failed
_MEETING = 600.0  # seconds more for hosts that start at different times


class Probes:
    """Runs probing jobs one after another, with a limit to each.

    Args:
        command: the user's.
        environment: the user's.
        budget: seconds for all of them, about.
        backend: "auto", "gloo" or "nccl".
    """

    def __init__(self, command: Command, environment: Mapping[str, str], budget: float, backend: str) -> None:
        self.command, self.environment, self.backend, self.budget = command, environment, backend, budget
        self.seconds = min(4.0, max(0.3, budget / 20))  # of measurement, in a job
        self._began, self._number = time.monotonic(), 0
        self._end = self._each = 0.0

    def fit(self, jobs: int, reserve: float) -> bool:
        """Returns True if more jobs fit into the budget; the same on all hosts."""
        return self._end + jobs * self._each + reserve <= self.budget

    def run(self, variables: Mapping[str, str], cases: Sequence[Case] = (), own: float = 0.0) -> Result:
        """Runs a job with some variables set.

        Raises:
            ProbeError: it failed or took too long; the message holds the end of its output.
        """
        number, several = self._number, self.command.nodes > 1
        what = "this package's own ways, with " if own else ""
        what += text(tuple(variables.items())) if variables else "the defaults"
        print(f"tune: measuring {what} (job {number + 1}, {self.budget:g} s for all)", file=sys.stderr, flush=True)
        spent = time.monotonic() - self._began
        self._number += 1
        limit = _LIMIT + 5 * (self.seconds + own) + (_MEETING if several and not number else 0.0)
        root = str(Path(bagua_kernels.__path__[0]).parent)
        path = os.pathsep.join(filter(None, [root, self.environment.get("PYTHONPATH", "")]))
        with tempfile.TemporaryDirectory(prefix="bagua_kernels_tune_") as name:
            folder = Path(name)
            order = Order(
                str(folder / "result.json"), self._node(), self.backend, tuple(cases), self.seconds, own, spent, limit
            )
            command = self.command.probing(number, json.dumps(dataclasses.asdict(order)), folder)
            try:
                said, status = _run(command, {**self.environment, **variables, "PYTHONPATH": path}, limit, folder)
                if status != 0 or not (folder / "result.json").is_file():
                    raise choice.ProbeError(
                        f"it ended with status {status}{'' if status else ' and no result'}:\n{said}"
                    )
                result = Result.from_json((folder / "result.json").read_text())
            except (OSError, ValueError) as error:
                raise choice.ProbeError(f"{type(error).__name__}: {error}") from error
            finally:
                self._each = self._each or _START + self.seconds
                self._end = time.monotonic() - self._began
        if several:  # this host's clock must not decide
            self._each = result.spent / number if number else self._each
            self._end = result.spent + self._each
        else:
            self._each = self._end / self._number
        return result

    def _node(self) -> Node:
        found = interfaces.interfaces()
        outward = tuple(one.name for one in found if one.leads_out)
        fixed = tuple((name, self.environment[name]) for name in choice.NAMES if self.environment.get(name))
        return Node(interfaces.choose(found, {}).name, outward, fixed)


def _run(command: Sequence[str], environment: Mapping[str, str], limit: float, folder: Path) -> tuple[str, int]:
    """Runs a job; returns the end of its output and its status."""
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        late = ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = f"\nit was ended after {limit:g} s"
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its processes, for which it takes up to 30 seconds
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        output.seek(0)
        return output.read().decode(errors="replace").strip()[-3000:] + late, process.returncode


def search(probes: Probes, sizes: Sequence[int]) -> choice.Search:
    """Measures as long as the budget lasts, and chooses.

    Raises:
        ProbeError: the defaults could not be measured.
    """
    found = choice.Search()
    first = found.first = probes.run({}, tune_probe.plan(sizes))
    if first.world == 1:
        return found
    found.runs[choice.DEFAULTS] = [first.seconds]
    fixed: dict[str, str] = {name: value for node in first.nodes for name, value in node.fixed}
    found.notes += [f"{name}={value[:60]} is set and stays" for name, value in fixed.items()]
    own = first.backend == "gloo" and choice.OWN not in fixed and fixed.get(choice.SOCKETS) != "0"
    share = max(1.0, probes.budget / 4) if own else 0.0
    alive = True
    # One job for the candidate, two to see the defaults and the best one again, one for the package's own.
    while (
        (candidate := choice.next_candidate(first, found.ratios(1))) is not None
        and alive
        and probes.fit(3 + own, share)
    ):
        alive = _add(found, probes, candidate)
    if candidate is not None and alive:
        found.notes.append(f"--budget {probes.budget:g} does not last for all candidates")
    ratios = found.ratios()
    again = sorted((one for one in ratios if ratios[one] * choice.GAIN < 1), key=lambda one: ratios[one])
    while len(again) > 1 and not probes.fit(len(again) + 1 + own, share):
        again.pop()
    for one in [one for one in reversed(found.runs) if one in (*again, *([choice.DEFAULTS] if again else []))]:
        alive = alive and _add(found, probes, one)
    twice = [one for one, runs in found.runs.items() if len(runs) == 2 == len(found.runs[choice.DEFAULTS])]
    found.chosen = dict(choice.choose([choice.DEFAULTS, *twice], found.ratios()))
    if own and alive:
        sockets = {} if choice.SOCKETS in fixed else {choice.SOCKETS: str(_OWN_SOCKETS)}
        try:
            text = probes.run({**found.chosen, **sockets}, own=share).tuning
            tuning = dataclasses.replace(Tuning.from_json(text), measured={})
        except (choice.ProbeError, ValueError) as error:
            found.notes.append(f"bagua_kernels.comm.tune could not be run: {str(error)[-600:]}")
        else:
            found.chosen[choice.OWN] = tuning.to_json()
            if choice.SOCKETS not in fixed and tuning.stripes > knobs.SOCKETS.default:
                found.chosen[choice.SOCKETS] = str(tuning.stripes)
    return found


def _add(found: choice.Search, probes: Probes, candidate: choice.Variables) -> bool:
    """Measures a candidate; returns True if the search may go on."""
    assert found.first is not None
    runs = found.runs.setdefault(candidate, [])
    try:
        runs.append(probes.run(dict(candidate), found.first.cases).seconds)
    except choice.ProbeError as error:
        found.notes.append(f"{text(candidate)} failed: {str(error)[-600:]}")
        # Launchers of other hosts may not have come as far: what all have measured decides.
        return probes.command.nodes == 1
    return True


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [int(size.rstrip("KMG")) * units.get(size[-1:], 1) for size in text.upper().split(",")]
    if min(sizes) < 4:
        raise ValueError("expected at least 4 bytes")
    return sizes


def _seconds(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError("expected a number of seconds above zero")
    return float(text)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bagua_kernels.comm.tune",
        usage="%(prog)s [options] -- torchrun ARGUMENTS script.py ARGUMENTS",
        description="Measures which variables make the job's all-reduces fast, sets them and starts the job.",
    )
    parser.add_argument("--budget", type=_seconds, default=60.0, help="seconds to spend, about (default: 60)")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="by default NCCL on GPUs")
    parser.add_argument("--sizes", type=_sizes, default=list(tune_probe.SIZES), help="bytes (default: 64K,1M,25M)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured and chosen")
    parser.add_argument("--dry-run", action="store_true", help="print `export` lines instead of starting the job")
    parser.add_argument("--reuse", type=Path, metavar="FILE", help="measure nothing: take what --json has written")
    return parser.parse_args(words)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Ends by an exception where a scheduler ends the process, so that no probe stays behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measures, chooses, and becomes the user's command.

    Args:
        words: the command line after the name of the program.
        environment: the user's.

    Returns:
        An exit status, where no job was started.
    """
    place = list(words).index("--") if "--" in words else len(words)
    given, wanted = _arguments(words[:place]), list(words[place + 1 :])
    failed, chosen = False, {}
    try:
        command = parse(wanted)
        if given.reuse:
            try:
                read = reused(given.reuse)
            except choice.ProbeError as error:
                # Without it the job would run for long with other settings than those that were asked for.
                print(f"tune: the job is not started: {error}", file=sys.stderr)
                return 1
            chosen = {name: value for name, value in read.items() if not environment.get(name)}
        elif given.json and not os.access(given.json if given.json.exists() else given.json.parent, os.W_OK):
            print(f"tune: --json {given.json} cannot be written: name a file in a folder that exists", file=sys.stderr)
            return 2
        elif command.unsuitable:
            print(f"tune: nothing is measured: {command.unsuitable}", file=sys.stderr)
        else:
            with _ended_by_signal():
                found = search(Probes(command, environment, given.budget, given.backend), given.sizes)
            chosen = found.chosen
            show(found)
            if given.json:
                write(given.json, found)
    except CommandError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    except (choice.ProbeError, OSError, ValueError) as error:
        failed = True
        print(f"tune: could not measure, so the environment stays as it is: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if given.dry_run:
        for name, value in chosen.items():
            print(f"export {name}={shlex.quote(value)}")
        return int(failed)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(wanted[0], wanted, {**environment, **chosen})
    except OSError as error:
        print(f"tune: {wanted[0]} cannot be started: {error}", file=sys.stderr)
        return 127
