"""The entry point of `bagua-kernels`, and its subcommands.

Modules that import PyTorch are imported inside of the subcommands: `bagua-kernels --help` and completion in a shell are quick.
"""

from __future__ import annotations

import click

import bagua_kernels
from bagua_kernels.command.commands import Commands
from bagua_kernels.command.passing import Passing

_NAME = "bagua-kernels"
_PROGRAMS = (
    ("doctor", "bagua_kernels.comm.doctor", "Find faults of a job's ranks and their network."),
    ("tune", "bagua_kernels.comm.tune", "Find settings of a fast network, then start a job."),
    ("advise", "bagua_kernels.algorithms.advise", "Predict the step times of algorithms on a network."),
    ("warmup", "bagua_kernels.warmup", "Compile kernels ahead of time."),
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bagua_kernels.__version__, prog_name=_NAME, message="%(prog)s %(version)s")
def commands() -> None:
    """Compressed and local-step data-parallel training for PyTorch."""


for _program in _PROGRAMS:
    commands.add_command(Passing(*_program))


@commands.command()
@click.option("--parameters", type=click.IntRange(min=1), default=25_000_000, show_default=True, help="Of the model.")
@click.option("--ranks", type=click.IntRange(min=1), default=8, show_default=True, help="Each on a node of its own.")
@_as_json
def algorithms(parameters: int, ranks: int, as_json: bool) -> None:
    """List all algorithms, and the bytes that they send."""
    from bagua_kernels.command import algorithms as table

    table.show(parameters, ranks, as_json)


@commands.command()
@click.option("--elements", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="Of the vector.")
@_as_json
def codecs(elements: int, as_json: bool) -> None:
    """List all codecs, with the bytes of their payloads."""
    from bagua_kernels.command import codecs as table

    table.show(elements, as_json)


@commands.command("launch-check")
@_as_json
def launch_check(as_json: bool) -> None:
    """Print what comm.init() would do; start nothing."""
    from bagua_kernels.command import launch_check as check

    check.show(as_json)


@commands.command()
@click.option("--elements", type=click.IntRange(min=1), default=1 << 23, show_default=True, help="Of each tensor.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Of which the median counts."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@_as_json
def bench(elements: int, repeats: int, device: str, as_json: bool) -> None:
    """Time a few kernels beside a copy of the same tensor."""
    from bagua_kernels.command import bench as measurement

    measurement.show(elements, repeats, device, as_json)


@commands.command()
@_as_json
def version(as_json: bool) -> None:
    """Print versions and devices."""
    from bagua_kernels.command import version as versions

    versions.show(as_json)


def main() -> None:
    """Runs the command and exits: 0, 1 after an error, or 2 after a command line that makes no sense."""
    commands.main(prog_name=_NAME)
