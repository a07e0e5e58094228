"""An environment in which only the wheel is installed, beside its dependencies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import release


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of such an environment."""
    folder = tmp_path_factory.mktemp("wheel")
    release.copy(release.ROOT, folder / "source")
    _, wheel = release.build(folder / "source", folder / "dist")
    python = release.environment(folder / "venv", wheel)
    # Programs of its dependencies, such as torchrun, are called as modules; that of the wheel is there.
    script = python.parent / "bagua-kernels"
    assert re.match(rf"#!.*{re.escape(str(python.parent))}", script.read_text())
    return python.parent
