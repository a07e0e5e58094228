"""What a process that is to join gets of a model before: nearly what a member has, sent beside training."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bagua_kernels.comm.joining.installed import Installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.door import ask_in_turn, fill, knock, receive, send
from bagua_kernels.errors import MismatchError

_LEAST, _MOST = 16 << 10, 1 << 20  # bytes that are sent at a time
_QUICK = 0.001  # seconds for a piece, after which the next one is twice as long
_PAUSE = 10.0  # times the seconds that a piece took, before the next one
_LONGEST_PAUSE = 1.0  # seconds
_ROOM = 8 << 10  # bytes on their way, of which the system takes twice as many: training must not wait behind more


@runtime_checkable
class Drafted(Protocol):
    """What has a model that others may begin near."""

    def draft(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """Returns a description, made of what JSON has, and the tensors as they are, which training goes on changing."""


class Drafting(Protocol):
    """What begins near the model of a member."""

    def room_for(self, description: Any) -> Sequence[torch.Tensor]:
        """Returns the tensors that are to be filled, in the order of the description.

        Raises:
            ValueError: this process has another model.
        """

    def filled(self) -> None:
        """Notes that they have been filled."""


def lend(sock: socket.socket, drafted: Drafted | None) -> None:
    """Sends a draft, about a tenth of the time, so that training has the line for the rest; blocks, and ends quietly.

    Args:
        sock: a connection to the process that has asked, which is closed.
        drafted: of this member; None if it has no model yet.
    """
    with sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            if drafted is None:
                send(sock, {"draft": None})
                return
            description, tensors = drafted.draft()
            send(sock, {"draft": description})
            length = _LEAST
            for tensor in tensors:
                data = _bytes_of(tensor)
                begin = 0
                while begin < len(data):
                    before = time.monotonic()
                    sock.sendall(data[begin : begin + length])
                    begin += length
                    seconds = time.monotonic() - before
                    length = min(2 * length, _MOST) if seconds < _QUICK else max(length // 2, _LEAST)
                    time.sleep(min(_PAUSE * seconds, _LONGEST_PAUSE))
        except OSError:
            # The other process has ended, or asks another member.
            return


def fetch(doors: Sequence[tuple[str, int]], secret: Secret, seconds: float, draft: Drafting) -> None:
    """Fills a draft from one of the members, whichever sends all of it first; blocks.

    Args:
        doors: where members listen.
        secret: of the job.
        seconds: after which no member is asked any more, and after which one is given up from which nothing comes.
        draft: that is filled. It stays as it is where members have no model yet.

    Raises:
        CommunicationError: no member sent all of it.
        MismatchError: the job has another version of this package.
        ValueError: as `Drafting.room_for`.
    """
    ask_in_turn(
        doors,
        seconds,
        lambda door, left: _fetch(door, secret, seconds, draft),
        "no member sent the draft of its model",
    )


def _fetch(door: tuple[str, int], secret: Secret, seconds: float, draft: Drafting) -> None:
    sock, _ = knock(door, secret, seconds)
    with sock:
        sock.settimeout(seconds)
        send(sock, {"draft": True, "installed": Installed.here().told()})
        answer = receive(sock)
        if "refused" in answer:
            raise MismatchError(answer["refused"])
        if answer["draft"] is None:
            return
        for tensor in draft.room_for(answer["draft"]):
            data = torch.empty(tensor.nbytes, dtype=torch.uint8)
            fill(sock, data.numpy().data)
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
    draft.filled()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # waits: on a thread of its own.
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
