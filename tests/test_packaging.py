"""The repository as people get it: cloned, and as the zip archive that hosting sites offer."""

import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import limits
from tests.release import expected_files

ROOT = Path(__file__).parents[1]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A zip archive of the repository, unpacked as pip does: links become text files."""
    if not (ROOT / ".git").exists():
        pytest.skip(f"{ROOT} is not a git checkout, so that there is nothing to make an archive of")
    packed = subprocess.run(["git", "archive", "--format=zip", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with zipfile.ZipFile(io.BytesIO(packed.stdout)) as file:
        file.extractall(tmp_path / "archive")
    return tmp_path / "archive"


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limits.seconds(100), check=False)


@pytest.mark.slow
def test_wheel_of_a_zip_archive_holds_all_floors(archive: Path, tmp_path: Path) -> None:
    assert (archive / "bagua_kernels/comm").is_file(), "the links have survived, so that this tests nothing"
    result = build(archive, tmp_path / "wheels")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = expected_files(archive)
    assert len(expected) > 1
    assert {name for name in names if name.endswith((".py", "/py.typed"))} == expected


def test_build_refuses_sources_without_a_floor(archive: Path, tmp_path: Path) -> None:
    (archive / "comm").rename(archive / "elsewhere")
    result = build(archive, tmp_path / "wheels")
    assert result.returncode != 0
    assert "the sources are incomplete" in result.stdout + result.stderr


def test_page_of_package_indexes_has_no_links_into_the_repository() -> None:
    fields = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / fields["readme"]).read_text()
    assert page.startswith("# Bagua Kernels")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith("https://")] == []
