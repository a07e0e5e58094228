"""What the last changes can reach: `python -m tests.reach`, or `make reach`.

The change is what differs between HEAD and its base: the newest ancestor whose commit date is at least six hours older than
HEAD's. A clone has no other mark of what its origin had before. Where git cannot name the difference (no git, no repository, a
shallow clone, no ancestor that old), everything counts as changed.

A file of tests is reached if it changed, or something that it depends on (`tests/imports.py` describes how that is found).
Everything is reached by a change of a file in `EVERYTHING`, and by a changed file on which nothing is known to depend.
"""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests import imports
from tests.imports import CHOOSING, FLOORS, Graph

ROOT = imports.ROOT
# Seconds by which the base is older than HEAD.
AGE = 6 * 3600
# Patterns of the files that decide what is installed, and how tests are chosen and run.
EVERYTHING = ("pyproject.toml", "setup.py", "constraints*.txt", *CHOOSING)


class Unknown(Exception):
    """Git cannot name the change; the message is the reason."""


@dataclass(frozen=True)
class Change:
    """What differs between two commits.

    Attributes:
        head: the hash of HEAD; empty if there is no repository.
        base: the hash of the commit that HEAD is compared with; empty if there is none.
        files: names of the files that differ, below the root; None if everything counts as changed.
        reason: why everything counts as changed; else empty.
    """

    head: str = ""
    base: str = ""
    files: tuple[str, ...] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reached:
    """What a change reaches.

    Attributes:
        change: the change.
        everything: why all files of tests are reached; empty if a change reaches only some.
        files: the files of tests that are reached, each with a changed file that reaches it.
    """

    change: Change
    everything: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def new_rules(self) -> bool:
        """True if what chooses the items of a run may have changed."""
        return self.change.files is None or not set(CHOOSING).isdisjoint(self.change.files)


def git(root: Path, *arguments: str) -> str:
    """Returns what git prints.

    Raises:
        Unknown: if git is missing or fails.
    """
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Unknown("there is no git") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"git {arguments[0]} ended with status {done.returncode}"]
        raise Unknown(lines[0])
    return done.stdout


def base_of(root: Path) -> str:
    """Returns the hash of the newest ancestor of HEAD that is six hours older, by the dates of the commits.

    Raises:
        Unknown: if there is none.
    """
    log = [line.split() for line in git(root, "log", "--format=%H %ct", "HEAD").splitlines()]
    dates = {commit: int(date) for commit, date in log}
    limit = dates[log[0][0]] - AGE
    # Of commits of the same second the first one in the log has the others among its ancestors.
    old = [commit for commit, date in dates.items() if date <= limit]
    if not old:
        raise Unknown(f"no ancestor of HEAD is {AGE // 3600} hours older")
    return max(old, key=dates.__getitem__)


def commit_of(root: Path, revision: str) -> str:
    """Returns the hash of the commit that a revision names.

    Raises:
        Unknown: if there is none.
    """
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except Unknown:
        raise Unknown(f"there is no commit {revision!r}") from None


def change_of(root: Path, base: str = "") -> Change:
    """Returns the change of the repository in a folder.

    Args:
        root: the repository's top folder.
        base: a revision to compare HEAD with, in place of the one that dates choose.
    """
    head = ""
    try:
        if Path(git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            raise Unknown("the folder is not the top of a repository")
        head = git(root, "rev-parse", "HEAD").strip()
        if not base and git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
            raise Unknown("the clone is shallow")
        found = commit_of(root, base) if base else base_of(root)
        # Both names of a file that was moved.
        names = git(root, "diff", "--name-only", "--no-renames", "-z", found, "HEAD")
    except Unknown as error:
        return Change(head=head, reason=str(error))
    return Change(head, found, tuple(name for name in names.split("\0") if name))


def is_test(name: str) -> bool:
    """True if a file's name is one of a file of tests."""
    return re.fullmatch(r"tests/(.*/)?test_[^/]*\.py", name) is not None


def reached_by(change: Change, root: Path = ROOT) -> Reached:
    """Returns what a change reaches, in the tree as it is."""
    if change.files is None:
        return Reached(change, f"everything counts as changed: {change.reason}")
    for name in change.files:
        if any(fnmatch(name, pattern) for pattern in EVERYTHING):
            return Reached(change, f"{name} changed")
    deleted = [name for name in change.files if not (root / name).exists()]
    graph = Graph(root, deleted)
    uses = [graph.uses(name) for name in graph.files]
    imported = set[str]().union(*(each.whole | each.alone for each in uses))
    readers: dict[str, set[str]] = {}
    for path in change.files:
        readers[path] = {name for name in graph.files if graph.mentions(name, path)}
        known = path in imported or is_test(path) or bool(readers[path]) or path in deleted
        listing = {name for name in graph.files if graph.lists(name, path)}
        readers[path] |= listing
        # Programs of `bench` and pages may be listed only. On the floors such a file is loaded in an unknown way.
        if not known and not (listing and path.partition("/")[0] not in (*FLOORS, "tests")):
            return Reached(change, f"{path} changed, and nothing is known to depend on it")
    files = dict[str, str]()
    for name in graph.files:
        if is_test(name) and name not in deleted:
            needed = graph.needed(name)
            cause = next(
                (path for path in change.files if path in needed or not needed.isdisjoint(readers[path])), None
            )
            if cause is not None:
                files[name] = cause
    return Reached(change, files=files)


def of_last_changes(root: Path = ROOT, base: str = "") -> Reached:
    """Returns what the change of the repository in a folder reaches."""
    # Syntax trees are millions of objects that stay.
    gc.freeze()
    gc.disable()
    try:
        return reached_by(change_of(root, base), root)
    finally:
        gc.enable()
        gc.unfreeze()


def described(reached: Reached) -> str:
    """Returns the base, the changed files and the files of tests that are reached, one per line."""
    change = reached.change
    lines = [f"base: {change.base or 'none'}"]
    lines += [f"changed: {name}" for name in change.files or ()]
    if reached.everything:
        return "\n".join([*lines, f"reached: all files of tests, for {reached.everything}"])
    lines += [f"reached: {name}, by {cause}" for name, cause in sorted(reached.files.items())]
    return "\n".join([*lines, f"{len(reached.files)} files of tests are reached"])


def count_of(reached: Reached, root: Path = ROOT) -> int:
    """Returns the number of items that are reached, of all that `--all` collects.

    Raises:
        RuntimeError: if pytest cannot collect them.
    """
    paths = ["tests"] if reached.everything else sorted(reached.files)
    if not paths:
        return 0
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "--all", *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join([*done.stdout.splitlines()[-10:], done.stderr])
        raise RuntimeError(f"pytest --collect-only ended with status {done.returncode}:\n{last}")
    return sum("::" in line for line in done.stdout.splitlines())


def touches(change: Change, paths: Iterable[str]) -> bool:
    """True if a change may have changed one of some files, or a file below one of some folders."""
    if change.files is None:
        return True
    return any(name == path or name.startswith(f"{path}/") for name in change.files for path in paths)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the last changes reach; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.reach", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", metavar="REV", default="", help="a revision to compare HEAD with")
    parser.add_argument(
        "--untouched", nargs="+", metavar="PATH", help="only end with status 0 if none of these changed, else with 1"
    )
    given = parser.parse_args(arguments)
    if given.untouched:
        return int(touches(change_of(ROOT, given.base), given.untouched))
    found = of_last_changes(ROOT, given.base)
    print(described(found), flush=True)
    print(f"{count_of(found)} items")
    return 0


if __name__ == "__main__":
    sys.exit(main())
