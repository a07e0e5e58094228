"""What `comm.init()` would do in the environment of this process."""

from __future__ import annotations

import warnings
from typing import Any

import click

from bagua_kernels import knobs
from bagua_kernels.comm.joining.address import check_interfaces, own_address
from bagua_kernels.comm.joining.interfaces import interface_of
from bagua_kernels.comm.joining.launch import Launch, loopback_of
from bagua_kernels.command.output import show_json, show_rows

_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "master_port", "launcher", "job")


def find() -> dict[str, Any]:
    """Returns the values by which this process would join the others; only `alone` where there are no others.

    Raises:
        ValueError: `comm.init()` would refuse the environment.
    """
    for knob in (knobs.TIMEOUT, knobs.HEARTBEAT, knobs.SECRET):
        knob.get()
    launch = Launch.read()
    if launch is None:
        return {"alone": True}
    check_interfaces()
    address = loopback_of(launch.master_addr) or own_address()
    own = {
        "store_at": "launcher" if launch.agent_store else "rank 0",
        "address": address,
        "interface": interface_of(address),
        "asks_mpi": not launch.master_addr,
    }
    return {"alone": False, **{name: getattr(launch, name) for name in _FIELDS}, **own}


def show(as_json: bool) -> None:
    """Prints the values, and warnings on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = find()
    for warning in caught:
        click.echo(f"Warning: {warning.message}", err=True)
    if as_json:
        show_json(found)
        return
    if found.pop("alone"):
        click.echo("This process is alone: comm.init() would open no socket.")
        return
    asks_mpi = found.pop("asks_mpi")
    # A port is no amount.
    lines = [{"field": name, "value": "-" if value in (None, "") else str(value)} for name, value in found.items()]
    show_rows(f"comm.init() would join rank {found['rank']} of {found['world_size']}", lines)
    if asks_mpi:
        click.echo("No variable has the host of rank 0: all ranks would ask MPI for it together.")
