"""Tests with the oldest and the newest versions of what pyproject.toml asks for, in environments of their own.

`python -m tests.versions oldest` is what `make test-oldest` does. It needs the Python of the file, and CPU builds of its torch.
Where either is missing, nothing is run. The reason is printed, and is in `results/versions-oldest.json`, where `ran` is false.
The exit status is then 0, for nothing has failed. A CPU build is named by its local version (`torch==2.9.0+cpu`): pip never takes
one for CUDA for it, which has gigabytes. Where pip has none by itself, `--index https://download.pytorch.org/whl/cpu` has it.

Continuous integration runs both for one commit in ten, by its hash, and after a change of what is installed (`due`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests import reach

ROOT = Path(__file__).parents[1]
PYTHONS = {"oldest": "3.11", "newest": "3.13"}
# What decides which versions are installed.
INSTALLED = ("pyproject.toml", "constraints.txt", "constraints-oldest.txt", "constraints-newest.txt")
ONE_OF = 10  # commits
MINUTES = 10.0
# Of this repository: what an item of `make test` needs, without the tools of `make lint`.
EXTRAS = ".[test]"


def pins(name: str, root: Path = ROOT) -> dict[str, str]:
    """Returns what a file pins: the whole requirement by the name of the package."""
    lines = (root / name).read_text().splitlines()
    return {line.partition("==")[0].lower(): line for line in lines if line and not line.startswith("#")}


def constraints(which: str, root: Path = ROOT) -> list[str]:
    """Returns the pins of an environment: those of its file, and those of constraints.txt for all other packages."""
    return list((pins("constraints.txt", root) | pins(f"constraints-{which}.txt", root)).values())


def is_due(change: reach.Change) -> bool:
    """Returns True for one commit in ten, and if what is installed may have changed."""
    return reach.touches(change, INSTALLED) or int(change.head or "0", 16) % ONE_OF == 0


def python_of(version: str) -> str | None:
    """Returns the path of an interpreter, None if there is none that runs."""
    for path in (
        shutil.which(f"python{version}"),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ):
        if path is None:
            continue
        asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return path
    return None


def missing(which: str, index: Sequence[str]) -> str:
    """Returns why an environment cannot be made here; empty if it can be."""
    version = PYTHONS[which]
    python = python_of(version)
    if python is None:
        return f"there is no Python {version}"
    torch = pins(f"constraints-{which}.txt")["torch"]
    # A dry run reads what the index has; the version of a CPU build is none that pip could confuse with a larger one.
    asked = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", *index, torch]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
        return f"pip has no {torch} for Python {version}: {lines[0] if lines else 'it gave no reason'}"
    return ""


def install(which: str, index: Sequence[str]) -> Path:
    """Makes the environment, unless it is there with the same pins; returns its interpreter.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    folder = ROOT / f".venv-{which}"
    python, mark = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join([*constraints(which), (ROOT / "pyproject.toml").read_text()])
    if mark.is_file() and mark.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    found = python_of(PYTHONS[which])
    assert found is not None
    subprocess.run([found, "-m", "venv", str(folder)], check=True)
    pinned = folder / "constraints.txt"
    pinned.write_text("\n".join(constraints(which)) + "\n")
    pip = [str(python), "-m", "pip", "install", "-qq", "--no-compile", *index, "--constraint", str(pinned)]
    # By name, or pip would take the newest torch that fits pyproject.toml while it looks for a solution.
    subprocess.run([*pip, pins(f"constraints-{which}.txt")["torch"], "setuptools"], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", EXTRAS], check=True, cwd=ROOT)
    mark.write_text(wanted)
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "which", choices=(*PYTHONS, "due"), help="due: only end with 0 if both are to be run, else with 1"
    )
    parser.add_argument("--index", metavar="URL", help="a further index of packages, for CPU builds of torch")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="minutes after which no item begins")
    parser.add_argument("--end", metavar="TIME", type=float, help="seconds since 1970 after which nothing begins")
    given = parser.parse_args(arguments)
    if given.which == "due":
        return int(not is_due(reach.change_of(ROOT)))
    index = [] if given.index is None else ["--extra-index-url", given.index]
    told: dict[str, object] = {
        "target": given.which,
        "ran": False,
        "reason": "",
        "pins": pins(f"constraints-{given.which}.txt"),
    }
    status = 0
    late = given.end is not None and time.time() > given.end
    told["reason"] = "no time is left" if late else missing(given.which, index)
    if not told["reason"]:
        python = install(given.which, index)
        line = [str(python), "-m", "tests.runs", "test", "--minutes", f"{given.minutes:g}", "--seed", "0"]
        line += [] if given.end is None else ["--end", f"{given.end:.0f}"]
        status = subprocess.run(line, cwd=ROOT, check=False).returncode
        told |= {"ran": True, "status": status}
    report = ROOT / "results" / f"versions-{given.which}.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(told, indent=1) + "\n")
    print(f"test-{given.which}: {json.dumps(told)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
