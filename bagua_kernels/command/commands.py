"""A group of subcommands whose errors are one sentence."""

from __future__ import annotations

from typing import Any

import click


class Commands(click.Group):
    """Prints an error of a subcommand as one sentence on stderr, and exits with status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand.

        Raises:
            ClickException: the subcommand raised an error, whose first line is the message.
        """
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # Click's own, which are RuntimeErrors; and a reader that has seen enough
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise click.ClickException((str(error).splitlines() or [""])[0] or type(error).__name__) from error
