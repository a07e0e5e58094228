"""Python objects over a communicator's tensor operations: pickled, signed, and carried as bytes.

Pickle runs code when it is read, and a backend such as Gloo cannot tell a rank from a stranger. So every object travels
with a signature by the job's secret, which is checked before a byte of the object is read, or memory taken for it.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError

if TYPE_CHECKING:
    from bagua_kernels.comm.communicator import Communicator

_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.sha256().digest_size
_HEADER = _LENGTH.size + _DIGEST + Secret.NBYTES  # length of the object, its digest, signature of both


class Seal:
    """Signs the objects of one communicator, and checks signatures.

    A signature holds for one operation, by its name and number, one source and one destination, so that an object which
    was sent before, or elsewhere, is not taken for another.

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
        found = data.cpu().numpy().tobytes()
        # The digest is part of what was signed and no secret, so an ordinary comparison will do.
        if hashlib.sha256(found).digest() != header.cpu().numpy().tobytes()[_LENGTH.size :][:_DIGEST]:
            raise self._refusal(
                f"{self._operation} received other bytes than rank {src} has signed, and has not read them"
            )
        return pickle.loads(found)

    def _refusal(self, text: str) -> CommunicationError:
        self._abort(text)
        return CommunicationError(text)


def broadcast(communicator: Communicator, obj: Any, src: int) -> Any:
    """Returns the object of rank `src` on every rank."""
    device, mine = communicator.device, communicator.rank == src
    data = _pack(obj) if mine else _tensor(b"")
    sealing = communicator._sealing("broadcast_object")
    header = (sealing.header(data, src) if mine else _room(_HEADER)).to(device)
    communicator.broadcast(header, src).wait()
    data = data.to(device) if mine else _room(sealing.length(header, src), device)
    communicator.broadcast(data, src).wait()
    return sealing.read(data, header, src)


def all_gather(communicator: Communicator, obj: Any) -> list[Any]:
    """Returns the objects of all ranks, in rank order."""
    data = _pack(obj)
    sealing = communicator._sealing("all_gather_object")
    padded, headers, lengths = _headers(communicator, sealing, data)
    everything = padded.new_empty(communicator.size, padded.numel())
    communicator.all_gather(everything, padded).wait()
    return _read(sealing, everything, headers, lengths)


def gather(communicator: Communicator, obj: Any, dst: int) -> list[Any] | None:
    """Returns the objects of all ranks on rank `dst`, None elsewhere."""
    data = _pack(obj)
    sealing = communicator._sealing("gather_object")
    padded, headers, lengths = _headers(communicator, sealing, data)
    if communicator.rank != dst:
        communicator.gather(padded, dst=dst).wait()
        return None
    everything = padded.new_empty(communicator.size, padded.numel())
    communicator.gather(padded, everything, dst).wait()
    return _read(sealing, everything, headers, lengths)


def scatter(communicator: Communicator, objs: Sequence[Any] | None, src: int) -> Any:
    """Returns the object that rank `src` holds for this rank."""
    size, device, rank = communicator.size, communicator.device, communicator.rank
    packed: list[torch.Tensor] = []
    if rank == src:
        if objs is None or len(objs) != size:
            got = "None" if objs is None else f"{len(objs)} objects"
            raise ValueError(f"scatter_object on the source rank {src} expects {size} objects, one a rank, got {got}")
        packed = [_pack(obj) for obj in objs]
    sealing = communicator._sealing("scatter_object")
    headers = _room(size * _HEADER, device).view(size, _HEADER)
    if packed:
        headers.copy_(torch.stack([sealing.header(data, src, dst) for dst, data in enumerate(packed)]))
    communicator.broadcast(headers, src).wait()
    lengths = [sealing.length(header, src, dst) for dst, header in enumerate(headers)]
    width = max(lengths)
    mine, table = _room(width, device), None
    if packed:
        table = torch.zeros(size, width, dtype=torch.uint8, device=device)
        for row, data in zip(table, packed, strict=True):
            row[: data.numel()] = data
    communicator.scatter(mine, table, src).wait()
    return sealing.read(mine[: lengths[rank]], headers[rank], src)


def _headers(
    communicator: Communicator, sealing: Sealing, data: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns this rank's data, as long as the longest, and the headers and lengths of all ranks."""
    header = sealing.header(data, communicator.rank).to(communicator.device)
    headers = header.new_empty(communicator.size, _HEADER)
    communicator.all_gather(headers, header).wait()
    lengths = [sealing.length(row, src) for src, row in enumerate(headers)]
    padded = header.new_zeros(max(lengths))
    padded[: data.numel()] = data
    return padded, headers, lengths


def _read(sealing: Sealing, everything: torch.Tensor, headers: torch.Tensor, lengths: list[int]) -> list[Any]:
    return [
        sealing.read(row[:length], header, src)
        for src, (row, header, length) in enumerate(zip(everything, headers, lengths, strict=True))
    ]


def _pack(obj: Any) -> torch.Tensor:
    return _tensor(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _room(0)


def _room(length: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device="cpu" if device is None else device)
