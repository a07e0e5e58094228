"""Calls of the command within this process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from bagua_kernels.command.main import commands


class Ended(NamedTuple):
    status: object
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Calls the command as its entry point does, which always exits."""
    with pytest.raises(SystemExit) as ended:
        commands.main(arguments, prog_name="bagua-kernels")
    return Ended(ended.value.code or 0, *capsys.readouterr())


def values(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Calls a subcommand with `--json`, and returns what it prints."""
    ended = call(capsys, *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)
