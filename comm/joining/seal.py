"""Signatures of Python objects that travel as pickles.

Pickle runs code when it is read, and a backend such as Gloo cannot distinguish a rank from a stranger. Therefore every
object is sent with a signature by the job's secret. It is checked before the object is read and before memory is allocated
for it.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError

_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.sha256().digest_size
HEADER = _LENGTH.size + _DIGEST + Secret.NBYTES  # length of the object, its digest, signature of both


class Seal:
    """Signs the objects of one communicator, and checks signatures.

    A signature is valid for one operation (name and number), one source and one destination. An object that was sent
    before, or elsewhere, is therefore not accepted as another.

    Args:
        secret: of the communicator alone, the same on its ranks.
    """

    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self._numbers = itertools.count()

    def open(self, operation: str, abort: Callable[[str], None]) -> Sealing:
        """Returns what signs the objects of the next operation; all ranks call it in one order.

        Args:
            operation: its name.
            abort: ends the communicator where a signature is wrong, so that the other ranks do not wait for this one.
        """
        return Sealing(self.secret.derive("objects", operation, str(next(self._numbers))), operation, abort)


class Sealing:
    """Signs and checks the objects of one operation."""

    def __init__(self, key: Secret, operation: str, abort: Callable[[str], None]) -> None:
        self._key = key
        self._operation = operation
        self._abort = abort

    def header(self, data: torch.Tensor, src: int, dst: int = -1) -> torch.Tensor:
        """Returns the header of an object of rank `src`, for rank `dst` or, at -1, for all."""
        body = _LENGTH.pack(data.numel()) + hashlib.sha256(data.numpy().data).digest()
        return _tensor(body + self._key.sign(body, f"{src}>{dst}".encode()))

    def length(self, header: torch.Tensor, src: int, dst: int = -1) -> int:
        """Returns the length of an object of rank `src`.

        Raises:
            CommunicationError: if the header was not signed by a rank of the job, for this operation.
        """
        # waits: objects are sent at start and for checkpoints.
        data = header.cpu().numpy().tobytes()
        body, signature = data[: -Secret.NBYTES], data[-Secret.NBYTES :]
        if not self._key.verify(signature, body, f"{src}>{dst}".encode()):
            raise self._refusal(
                f"{self._operation} received an object of rank {src} that is not signed with this job's secret, and has "
                "not read it: see that all ranks issue the same operations in the same order, and that nobody else "
                "reaches the ranks' connections"
            )
        return int(_LENGTH.unpack(body[: _LENGTH.size])[0])

    def read(self, data: torch.Tensor, header: torch.Tensor, src: int) -> Any:
        """Returns the object whose header `length` has checked.

        Raises:
            CommunicationError: if these are not the bytes that were signed.
        """
        # waits: objects are sent at start and for checkpoints.
        found = data.cpu().numpy().tobytes()
        # The digest is part of what was signed and no secret, so an ordinary comparison will do.
        # waits: objects are sent at start and for checkpoints.
        if hashlib.sha256(found).digest() != header.cpu().numpy().tobytes()[_LENGTH.size :][:_DIGEST]:
            raise self._refusal(
                f"{self._operation} received other bytes than rank {src} has signed, and has not read them"
            )
        return pickle.loads(found)

    def _refusal(self, text: str) -> CommunicationError:
        self._abort(text)
        return CommunicationError(text)


def pack(obj: Any) -> torch.Tensor:
    """Returns an object as bytes, on the CPU."""
    return _tensor(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))


def room(length: int, device: torch.device | None = None) -> torch.Tensor:
    """Returns memory for bytes, on the CPU by default."""
    return torch.empty(length, dtype=torch.uint8, device="cpu" if device is None else device)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)
