"""Which backend the ranks of a torch process group use."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bagua_kernels import knobs
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.failures.heartbeat import OPENING
from bagua_kernels.comm.failures.session import Session


def over_torch(
    timeout: float,
    place: torch.device | None,
    host: str,
    look: Callable[[], object] | None = None,
    tell: Callable[[BaseException], object] | None = None,
    watch: bool = True,
) -> Communicator:
    """Makes the communicator that suits the default group; all ranks have to agree on what the environment asks for.

    Args:
        timeout: seconds, also for all of this.
        place: the device of tensors; None for that of the group.
        host: the address at which the ranks listen; empty for the default.
        look: called again and again while it waits for other ranks; what it raises ends the wait.
        tell: called with what failed, before this rank leaves, which may take seconds.
        watch: False for ranks that send no heartbeats, because they have other means to find those that are lost.
    """
    deadline = time.monotonic() + timeout
    base = TorchCommunicator(
        timeout=timeout,
        watch=watch,
        device=place,
        host=host,
        look=look,
        connected=False,
        first=asdict(Settings.here()),
    )
    if base.size == 1:
        return base
    try:
        assert base.introduction is not None
        settings = agreed_settings([Settings(**told) for told in base.introduction.first()])
        sockets = base.device.type == "cpu" and settings.sockets
        if not sockets:
            with base.session.within(max(deadline, time.monotonic() + timeout / 10)):
                base.connect(look)
        if base.device.type == "cuda" and settings.nccl == "cupy":
            made = NcclCommunicator(timeout=timeout, device=base.device)
            base.close()
            return made
        if not sockets:
            return base
        tuning = Tuning.from_json(settings.tuning) if settings.tuning else None
        stripes = max(settings.sockets, tuning.stripes if tuning else 1)
        base.introduction.watch(partial(_see, base.session))
        return StripedCommunicator(
            base, stripes=stripes, tuning=tuning, host=host, deadline=deadline, exchange=base.introduction
        )
    except BaseException as error:
        if tell is not None:
            tell(error)
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

    @classmethod
    def here(cls) -> Settings:
        """Returns those of this process."""
        try:
            text = knobs.TUNING.get()
            try:
                Tuning.from_json(text or "{}")
            except ValueError as error:
                raise ValueError(f"{knobs.TUNING.variable}: {error}") from None
            return cls(knobs.SOCKETS.get() if hasattr(select, "epoll") else 0, text, knobs.NCCL.get())
        except ValueError as error:
            return cls(0, "", "", str(error))


def agreed_settings(everyone: list[Settings]) -> Settings:
    """Returns what all ranks want.

    Args:
        everyone: the settings of each rank.

    Raises:
        ValueError: on all ranks, if one cannot read its environment, or wants something else.
    """
    problems = {rank: one.problem for rank, one in enumerate(everyone) if one.problem}
    if problems:
        raise ValueError(f"some ranks cannot use their environment: {problems}")
    for name, knob in (("sockets", knobs.SOCKETS), ("tuning", knobs.TUNING), ("nccl", knobs.NCCL)):
        values = {rank: getattr(one, name) for rank, one in enumerate(everyone)}
        if len(set(values.values())) > 1:
            raise ValueError(f"{knob.variable} has to be the same on all ranks, got {values}: let the launcher set it")
    return everyone[0]


def _see(session: Session) -> None:
    """Ends a wait that makes no sense any more, since a rank was lost."""
    if session.reported():
        raise session.failure("connect", OPENING, None, None, timed_out=False)
