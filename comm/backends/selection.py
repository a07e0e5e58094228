"""Which backend the ranks of a torch process group use."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua_kernels import knobs
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator


def over_torch(
    timeout: float, place: torch.device | None, host: str, look: Callable[[], object] | None = None
) -> Communicator:
    """Makes the communicator that suits the default group; all ranks have to agree on what the environment asks for.

    Args:
        timeout: seconds, also for all of this.
        place: the device of tensors; None for that of the group.
        host: the address at which the ranks listen; empty for the default.
        look: called again and again while it waits for other ranks; what it raises ends the wait.
    """
    deadline = time.monotonic() + timeout
    base = TorchCommunicator(timeout=timeout, device=place, host=host, look=look)
    if base.size == 1:
        return base
    try:
        with base.session.within(max(deadline, time.monotonic() + timeout / 10)):
            settings = agreed_settings(base)
        if base.device.type == "cuda" and settings.nccl == "cupy":
            made = NcclCommunicator(timeout=timeout, device=base.device)
            base.close()
            return made
        if base.device.type == "cuda" or not settings.sockets:
            return base
        tuning = Tuning.from_json(settings.tuning) if settings.tuning else None
        stripes = max(settings.sockets, tuning.stripes if tuning else 1)
        return StripedCommunicator(base, stripes=stripes, tuning=tuning, host=host, deadline=deadline)
    except BaseException as error:
        base.abort(f"init failed: {error}")
        raise


@dataclass(frozen=True)
class Settings:
    """What a rank's environment asks for; see `bagua_kernels.knobs`.

    Attributes:
        sockets: sockets between two ranks; 0 for none.
        tuning: their table as JSON; may be empty.
        nccl: how NCCL is driven.
        problem: why the environment cannot be read; empty if it can.
    """

    sockets: int
    tuning: str
    nccl: str
    problem: str = ""


def agreed_settings(base: TorchCommunicator) -> Settings:
    """Returns what all ranks want.

    Raises:
        ValueError: on all ranks, if one cannot read its environment, or wants something else.
    """
    try:
        text = knobs.TUNING.get()
        try:
            Tuning.from_json(text or "{}")
        except ValueError as error:
            raise ValueError(f"{knobs.TUNING.variable}: {error}") from None
        mine = Settings(knobs.SOCKETS.get() if hasattr(select, "epoll") else 0, text, knobs.NCCL.get())
    except ValueError as error:
        mine = Settings(0, "", "", str(error))
    everyone: list[Settings] = base.all_gather_object(mine)
    problems = {rank: one.problem for rank, one in enumerate(everyone) if one.problem}
    if problems:
        raise ValueError(f"some ranks cannot use their environment: {problems}")
    for name, knob in (("sockets", knobs.SOCKETS), ("tuning", knobs.TUNING), ("nccl", knobs.NCCL)):
        values = {rank: getattr(one, name) for rank, one in enumerate(everyone)}
        if len(set(values.values())) > 1:
            raise ValueError(f"{knob.variable} has to be the same on all ranks, got {values}: let the launcher set it")
    return mine
