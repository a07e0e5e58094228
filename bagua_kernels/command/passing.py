"""A subcommand that runs a program of this package as `python -m` does."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import click


class Passing(click.Command):
    """Passes all arguments on as they are, `--help` and `--` too.

    Args:
        name: the name of the subcommand.
        module: the program, as for `python -m`.
        does: one line for the list of subcommands.
    """

    def __init__(self, name: str, module: str, does: str) -> None:
        super().__init__(name, help=does, add_help_option=False)
        self.module = module

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keeps the arguments for the program, which parses them itself."""
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the program, which ends by `SystemExit` with its own status."""
        sys.argv[1:] = ctx.args
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)
