"""Builds a release, tries it where nothing but it is installed, and tags the commit locally.

`python -m tests.release` is what `make release` does. The sdist is built from a copy of the files that git does not ignore, and
the wheel from the sdist, so that a file that one of them lacks is noticed. The wheel is then installed into a fresh environment,
which sees the dependencies of this interpreter: nothing is downloaded. `tests/installed.py` is executed there.

The tag is made only of a tree without changes, and last. It stays on this machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
FLOORS = ("bagua_kernels", "comm", "algorithms")
SMOKE = Path(__file__).with_name("installed.py")


class Refused(Exception):
    """A release that cannot be made as things are; the text has the change to make."""


def version(root: Path = ROOT) -> str:
    """Returns the version that the sources have.

    Raises:
        Refused: there is none, or package indexes would not accept it.
    """
    file = root / "bagua_kernels/__init__.py"
    found = re.findall(r'^__version__ = "([^"]*)"$', file.read_text(), re.MULTILINE)
    try:
        (text,) = found
        Version(text)
    except (ValueError, InvalidVersion):
        raise Refused(f'got {found} in {file}, expected one line __version__ = "1.2.3"; write it there') from None
    return str(text)


def check_changelog(text: str, released: str) -> None:
    """Checks that the changelog has the version, and nothing that no version has.

    Raises:
        Refused: it has no section of the version, or one with changes of no version.
    """
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    if not sections.get(released, "").strip():
        names = ", ".join(sections) or "none"
        raise Refused(f"CHANGELOG.md has the sections {names}, expected one of {released}; write what is new in it")
    if entries := re.findall(r"^- ", sections.get("Unreleased", ""), re.MULTILINE):
        raise Refused(
            f"CHANGELOG.md has {len(entries)} changes under Unreleased, expected none; move them to {released}"
        )


def git(root: Path, *words: str) -> str:
    """Returns what git prints."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def check_tag(root: Path, tag: str) -> None:
    """Checks that the commit can get the tag.

    Raises:
        Refused: files differ from the commit, or the tag exists.
    """
    if git(root, "tag", "--list", tag).strip():
        raise Refused(f"got the tag {tag} already, expected none; raise __version__, or delete the tag with git tag -d")
    if changed := git(root, "status", "--porcelain").splitlines():
        raise Refused(
            f"got {len(changed)} files that differ from the commit, such as {changed[0][3:]}, expected none; commit them, "
            "or build without a tag: make release RELEASE_TAG=no"
        )


def copy(root: Path, target: Path) -> None:
    """Copies the files that git does not ignore, links as links; builds leave files beside the sources."""
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in sorted({*names} - {""}):
        source = root / name
        if source.is_symlink() or source.is_file():  # else it was deleted, and git does not know yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Builds an sdist, and the wheel from it; returns both.

    Raises:
        Refused: the build failed; its output is above.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        raise Refused(f"the build ended with status {done.returncode}, expected 0; its output above has the reason")
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def expected_files(source: Path) -> set[str]:
    """Returns the files of the package that a wheel has to contain: all Python files of the floors, and `py.typed`."""
    names = {"bagua_kernels/py.typed"}
    for floor in FLOORS:
        for file in (source / floor).rglob("*.py"):
            inside = file.relative_to(source / floor)
            if floor != "bagua_kernels" or inside.parts[0] not in FLOORS:  # through a link, which some Pythons follow
                names.add(
                    (PurePosixPath("bagua_kernels") / ("" if floor == "bagua_kernels" else floor) / inside).as_posix()
                )
    return names


def check_wheel(names: Iterable[str], expected: set[str], released: str) -> None:
    """Checks what a wheel contains: the whole package, its license, and nothing else.

    Raises:
        Refused: files are missing, or there are others.
    """
    found = {*names}
    about = f"bagua_kernels-{released}.dist-info/"
    others = {name for name in found if not name.startswith(about)}
    if missing := sorted((expected | {f"{about}METADATA", f"{about}licenses/LICENSE"}) - found):
        raise Refused(
            f"the wheel lacks {len(missing)} files, such as {missing[0]}; see packages.find in pyproject.toml"
        )
    if surplus := sorted(others - expected):
        raise Refused(f"the wheel has {len(surplus)} files of no room, such as {surplus[0]}; expected only the package")


def check_sdist(names: Iterable[str], released: str) -> None:
    """Checks that an sdist has what a build needs, and no tests.

    Raises:
        Refused: files are missing, or there are tests or benchmarks.
    """
    top = f"bagua_kernels-{released}/"
    found = {name.removeprefix(top) for name in names}
    if missing := sorted({"LICENSE", "pyproject.toml", "setup.py", "docs/summary.md"} - found):
        raise Refused(f"the sdist lacks {', '.join(missing)}; see MANIFEST.in")
    if surplus := sorted(name for name in found if name.startswith(("tests/", "bench/"))):
        raise Refused(f"the sdist has {len(surplus)} files such as {surplus[0]}, expected none; see MANIFEST.in")


def environment(folder: Path, wheel: Path) -> Path:
    """Makes an environment with the wheel and the dependencies of this interpreter; returns its interpreter.

    Raises:
        subprocess.CalledProcessError: the environment cannot be made, or pip refused the wheel.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-qq",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(
        subprocess.run([str(python), "-I", "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    )
    # After the wheel, which pip would take for installed. A line of such a file adds a folder without the .pth files that are
    # in it, so that an editable installation of this package stays out of sight.
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(lent) + "\n")
    return python


def try_wheel(wheel: Path, released: str) -> None:
    """Executes `tests/installed.py` where only the wheel is installed.

    Raises:
        Refused: it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "venv", wheel)
        # Isolated: neither PYTHONPATH nor the folder of the script are on the path.
        for words in ([str(SMOKE), released], ["-m", "bagua_kernels.warmup", "--help"]):
            line = [str(python), "-I", *words]
            done = subprocess.run(
                line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode:
                print(done.stdout)
                called = " ".join(words)
                raise Refused(f"{called} ended with status {done.returncode} beside the wheel, expected 0; see above")


def release(root: Path, out: Path, tag: bool) -> None:
    """Builds, checks, tries and tags a release; with `tag=False` without the tag, and from a tree with changes, too.

    Raises:
        Refused: the release cannot be made.
    """
    released = version(root)
    check_changelog((root / "CHANGELOG.md").read_text(), released)
    if tag:
        check_tag(root, f"v{released}")
    commit = git(root, "rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "dist"
        copy(root, source)
        sdist, wheel = build(source, built)
        with tarfile.open(sdist) as archive:
            check_sdist(archive.getnames(), released)
        with zipfile.ZipFile(wheel) as packed:
            check_wheel(packed.namelist(), expected_files(source), released)
        print(f"{sdist.name} and {wheel.name} have all files; the wheel is tried in a fresh environment", flush=True)
        try_wheel(wheel, released)
        out.mkdir(parents=True, exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy2(file, out / file.name)
    print(f"{out / sdist.name}\n{out / wheel.name}")
    if tag:
        # The commit that was built, wherever HEAD is by now.
        git(root, "tag", "--annotate", "--message", f"bagua-kernels {released}", f"v{released}", commit)
        print(f"tagged {commit[:12]} as v{released}, on this machine only: git push origin v{released}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the release that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", choices=("yes", "no"), default="yes", help="no: build and try only, from any tree")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="of sdist and wheel (dist)")
    given = parser.parse_args(arguments)
    try:
        release(ROOT, given.out, given.tag == "yes")
    except Refused as reason:
        print(f"no release: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
