"""A release: its version has one place, its parts are checked, and its tag comes last. Also the files that hosting sites read."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import bagua_kernels
from bagua_kernels.comm.joining import interfaces
from bagua_kernels.comm.programs.doctor import command as doctor
from tests import release
from tests.docs import prose
from tests.release import Refused

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / ".pre-commit-config.yaml"
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
ABOUT = "bagua_kernels-1.2.dist-info/"
WHOLE = {"bagua_kernels/__init__.py", "bagua_kernels/comm/work.py", "bagua_kernels/py.typed"}
LISTED = {*WHOLE, f"{ABOUT}METADATA", f"{ABOUT}licenses/LICENSE"}


def repository(folder: Path, **files: str) -> Path:
    """A repository with one commit of a package of version 1.2, and with a link, as this one has."""
    files = {
        "bagua_kernels/__init__.py": '"""Text."""\n\n__version__ = "1.2"\n',
        "comm/__init__.py": "",
        "CHANGELOG.md": "# Changelog\n\n## 1.2\n\n- First.\n",
        ".gitignore": "*.log\n",
        **files,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bagua_kernels/comm").symlink_to("../comm", target_is_directory=True)
    own = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*own, "commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_version_has_one_place() -> None:
    assert release.version() == bagua_kernels.__version__
    fields = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in fields["project"]
    assert fields["project"]["dynamic"] == ["version"]
    assert fields["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "bagua_kernels.__version__"}}


@pytest.mark.parametrize("text", ["", '__version__ = "one"\n', '__version__ = "1.0"\n__version__ = "1.1"\n'])
def test_version_that_no_index_takes_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bagua_kernels").mkdir()
    (tmp_path / "bagua_kernels/__init__.py").write_text(text)
    with pytest.raises(Refused, match="expected one line __version__"):
        release.version(tmp_path)


def test_changelog_has_the_version() -> None:
    release.check_changelog((ROOT / "CHANGELOG.md").read_text(), bagua_kernels.__version__)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# Changelog\n", "has the sections none, expected one of 1.2"),
        ("## 1.1\n\n- Old.\n", "has the sections 1.1, expected one of 1.2"),
        ("## 1.2\n\n## 1.1\n\n- Old.\n", "expected one of 1.2"),
        ("## Unreleased\n\n- One.\n- Two.\n\n## 1.2\n\n- New.\n", "2 changes under Unreleased"),
    ],
)
def test_changelog_that_does_not_fit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        release.check_changelog(text, "1.2")


def test_changelog_may_have_an_empty_section_of_what_comes_next() -> None:
    release.check_changelog("## Unreleased\n\n## 1.2\n\n- New.\n\n## 1.1\n\n- Old.\n", "1.2")


def test_wheel_is_the_package_and_nothing_else() -> None:
    release.check_wheel(LISTED, WHOLE, "1.2")
    for missing in LISTED:
        with pytest.raises(Refused, match=f"lacks 1 files, such as {re.escape(missing)}"):
            release.check_wheel(LISTED - {missing}, WHOLE, "1.2")
    for surplus in (
        "tests/test_a.py",
        "bench/a.py",
        "bagua_kernels/tests/test_a.py",
        "bagua_kernels-1.1.dist-info/METADATA",
    ):
        with pytest.raises(Refused, match=f"1 files of no room, such as {re.escape(surplus)}"):
            release.check_wheel({*LISTED, surplus}, WHOLE, "1.2")


def test_files_of_a_wheel_are_those_of_all_rooms() -> None:
    expected = release.expected_files(ROOT)
    assert {"bagua_kernels/comm/work.py", "bagua_kernels/algorithms/exchanges/exchange.py"} <= expected
    files = {(ROOT / name).resolve() for name in expected}
    assert len(files) == len(expected), "a file is listed twice: through a link"
    assert [file for file in files if not file.is_file()] == []


def test_sdist_has_no_tests() -> None:
    needed = [f"bagua_kernels-1.2/{name}" for name in ("LICENSE", "pyproject.toml", "setup.py", "docs/summary.md")]
    release.check_sdist(needed, "1.2")
    with pytest.raises(Refused, match=r"lacks setup\.py"):
        release.check_sdist([name for name in needed if "setup" not in name], "1.2")
    with pytest.raises(Refused, match=r"1 files such as tests/test_a\.py"):
        release.check_sdist([*needed, "bagua_kernels-1.2/tests/test_a.py"], "1.2")


def test_copy_has_links_and_leaves_out_what_git_ignores(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    (root / "new.py").write_text("")
    (root / "old.log").write_text("")
    (root / "CHANGELOG.md").unlink()
    release.copy(root, tmp_path / "copy")
    names = {
        file.relative_to(tmp_path / "copy").as_posix() for file in (tmp_path / "copy").rglob("*") if not file.is_dir()
    }
    assert names == {".gitignore", "bagua_kernels/__init__.py", "comm/__init__.py", "new.py"}
    assert (tmp_path / "copy/bagua_kernels/comm").is_symlink()


def test_tag_comes_last_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tree without changes, after the wheel has been tried, and of the commit that was built."""
    root = repository(tmp_path / "root")
    for name in ("NAME", "EMAIL"):
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", "test")
    calls = []

    def build(source: Path, out: Path) -> tuple[Path, Path]:
        out.mkdir()
        sdist, wheel = out / "a.tar.gz", out / "a.whl"
        subprocess.run(["tar", "czf", sdist, "--files-from=/dev/null"], check=True)
        with zipfile.ZipFile(wheel, "w"):
            calls.append("build")
        return sdist, wheel

    def refuse(wheel: Path, released: str) -> None:
        assert release.git(root, "tag") == ""
        raise Refused("it does not work")

    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "check_sdist", lambda *_: None)
    monkeypatch.setattr(release, "check_wheel", lambda *_: None)
    monkeypatch.setattr(release, "try_wheel", refuse)
    with pytest.raises(Refused, match="does not work"):
        release.release(root, tmp_path / "dist", tag=True)
    assert release.git(root, "tag") == ""
    assert not (tmp_path / "dist").exists()

    monkeypatch.setattr(release, "try_wheel", lambda wheel, released: calls.append(released))
    release.release(root, tmp_path / "dist", tag=False)
    assert release.git(root, "tag") == ""
    release.release(root, tmp_path / "dist", tag=True)
    assert calls == ["build", "build", "1.2", "build", "1.2"]
    assert release.git(root, "rev-parse", "v1.2^{commit}") == release.git(root, "rev-parse", "HEAD")
    assert {file.name for file in (tmp_path / "dist").iterdir()} == {"a.tar.gz", "a.whl"}

    with pytest.raises(Refused, match=r"got the tag v1\.2 already"):
        release.release(root, tmp_path / "dist", tag=True)
    release.git(root, "tag", "-d", "v1.2")
    (root / "new.py").write_text("")
    with pytest.raises(Refused, match=r"1 files that differ from the commit, such as new\.py"):
        release.release(root, tmp_path / "dist", tag=True)
    assert len(calls) == 5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_release_without_a_tag(tmp_path: Path) -> None:
    """Builds both archives and takes steps beside the installed wheel: half a minute, most of it imports."""
    if not (ROOT / ".git").exists():
        pytest.skip(f"{ROOT} is not a git checkout, so that there is no list of its files")
    before = release.git(ROOT, "tag")
    line = [sys.executable, "-m", "tests.release", "--tag", "no", "--out", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {f"bagua_kernels-{bagua_kernels.__version__}{end}" for end in (".tar.gz", "-py3-none-any.whl")}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert release.git(ROOT, "tag") == before


def recipe(target: str) -> list[str]:
    """The commands of a target, with make's default interpreter."""
    (block,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [line.strip().replace("$(PYTHON)", ".venv/bin/python") for line in block.splitlines()]


def test_hooks_are_the_commands_of_make_lint() -> None:
    text = CONFIGURATION.read_text()
    entries = re.findall(r"^ +entry: (.*)$", text, re.MULTILINE)
    assert entries == recipe("lint")
    assert re.findall(r"repo: (.*)", text) == ["local"]
    assert re.findall(r"language: (.*)", text) == ["system"] * len(entries)
    # These commands look for their files, or get the ones that have to be checked together.
    assert re.findall(r"pass_filenames: (.*)", text) == ["false"] * len(entries)


def test_entries_of_hooks_exist() -> None:
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("there is no .venv here; make installs it")
    for entry in re.findall(r"entry: (.*)", CONFIGURATION.read_text()):
        python, dash, module, *rest = shlex.split(entry)
        assert (ROOT / python).is_file()
        assert dash == "-m"
        found = [
            str(ROOT / python),
            "-c",
            f"import importlib.util, sys; sys.exit(not importlib.util.find_spec('{module}'))",
        ]
        assert subprocess.run(found, check=False).returncode == 0, f"{python} has no {module}"
        assert [word for word in rest if "/" in word and not (ROOT / word).exists()] == []


def test_templates_ask_for_what_the_doctor_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [file.name for file in TEMPLATES] == ["fault.yml", "wish.yml"]
    pages = [file.read_text() for file in (*TEMPLATES, ROOT / "SECURITY.md")]
    (line,) = {line for text in pages for line in re.findall(r"`(python -m bagua_kernels\.comm\.doctor.*?)`", text)}
    for name in ("RANK", "WORLD_SIZE", *interfaces.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    doctor.main(shlex.split(line)[3:])
    capsys.readouterr()
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text())["ranks"][0]["versions"]["torch"]


def test_templates_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load(CONFIGURATION.read_text())["repos"][0]["hooks"]
    assert len({hook["id"] for hook in hooks}) == len(hooks) == len(recipe("lint"))
    for file in TEMPLATES:
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form), file
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields), file
        assert all(field["attributes"]["label"] for field in fields), file


def test_security_page_names_no_address_and_links_to_what_is_there() -> None:
    page = ROOT / "SECURITY.md"
    assert "@" not in page.read_text()
    links = re.findall(r"\]\(([^)]*)\)", page.read_text())
    assert "docs/security.md" in links
    for link in links:
        name, _, heading = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE)
        assert not heading or heading in {one.lower().replace(" ", "-") for one in headings}
    assert [each for each in prose.sentences(page) if each.words > 25] == []
