"""Python objects over a communicator's tensor operations: pickled, and carried as bytes.

Pickle runs code when it is read, so ranks must trust one another, as they must for everything else that they share.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bagua_kernels.comm.communicator import Communicator


def broadcast(communicator: Communicator, obj: Any, src: int) -> Any:
    """Returns the object of rank `src` on every rank."""
    length = torch.zeros(1, dtype=torch.int64, device=communicator.device)
    data = _pack(obj, communicator.device) if communicator.rank == src else None
    if data is not None:
        length.fill_(data.numel())
    communicator.broadcast(length, src).wait()
    if data is None:
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=communicator.device)
    communicator.broadcast(data, src).wait()
    return _unpack(data)


def all_gather(communicator: Communicator, obj: Any) -> list[Any]:
    """Returns the objects of all ranks, in rank order."""
    data, lengths = _pad(communicator, _pack(obj, communicator.device))
    everything = data.new_empty(communicator.size, data.numel())
    communicator.all_gather(everything, data).wait()
    return [_unpack(row[:length]) for row, length in zip(everything, lengths, strict=True)]


def gather(communicator: Communicator, obj: Any, dst: int) -> list[Any] | None:
    """Returns the objects of all ranks on rank `dst`, None elsewhere."""
    data, lengths = _pad(communicator, _pack(obj, communicator.device))
    if communicator.rank != dst:
        communicator.gather(data, dst=dst).wait()
        return None
    everything = data.new_empty(communicator.size, data.numel())
    communicator.gather(data, everything, dst).wait()
    return [_unpack(row[:length]) for row, length in zip(everything, lengths, strict=True)]


def scatter(communicator: Communicator, objs: Sequence[Any] | None, src: int) -> Any:
    """Returns the object that rank `src` holds for this rank."""
    size, device = communicator.size, communicator.device
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    packed: list[torch.Tensor] = []
    if communicator.rank == src:
        if objs is None or len(objs) != size:
            got = "None" if objs is None else f"{len(objs)} objects"
            raise ValueError(f"scatter_object on the source rank {src} expects {size} objects, one a rank, got {got}")
        packed = [_pack(obj, device) for obj in objs]
        lengths.copy_(torch.tensor([data.numel() for data in packed], dtype=torch.int64))
    communicator.broadcast(lengths, src).wait()
    width = int(lengths.max().item())
    mine = torch.empty(width, dtype=torch.uint8, device=device)
    table = None
    if packed:
        table = torch.zeros(size, width, dtype=torch.uint8, device=device)
        for row, data in zip(table, packed, strict=True):
            row[: data.numel()] = data
    communicator.scatter(mine, table, src).wait()
    return _unpack(mine[: int(lengths[communicator.rank].item())])


def _pad(communicator: Communicator, data: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    length = torch.tensor([data.numel()], dtype=torch.int64, device=communicator.device)
    lengths = length.new_empty(communicator.size)
    communicator.all_gather(lengths, length).wait()
    sizes = [int(size) for size in lengths.tolist()]
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data
    return padded, sizes


def _pack(obj: Any, device: torch.device) -> torch.Tensor:
    data = bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
