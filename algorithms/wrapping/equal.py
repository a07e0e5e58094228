"""Makes what ranks hold equal, and sends only what differs: digests of the bytes are compared first."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bagua_kernels.algorithms.wrapping.optimizer_state import put_state, tensors_of
from bagua_kernels.algorithms.wrapping.replicas import bytes_of, synchronize
from bagua_kernels.algorithms.wrapping.sending import Sending
from bagua_kernels.algorithms.wrapping.structure import Structure
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.comm.communicator import gather_json

_BRIEF = 64 << 10  # bytes that are sent at once: to compare them would take as long
_SHORT = 1 << 10  # bytes of a tensor that is sent anyway, such as a count of steps
_PIECE = 1 << 20  # words of 32 bits that a GPU takes at a time
_FACTOR = 6364136223846793005  # odd, so that no word's share of the digest is lost


def make_equal(
    tensors: Sequence[torch.Tensor], communicator: Communicator, src: int = 0, what: str = "a model"
) -> None:
    """As `synchronize`, but sends only the tensors whose bytes differ on some rank; collective.

    Args:
        tensors: equal shapes and dtypes on all ranks, on the communicator's device; those of rank `src` are not written.
        communicator: of all ranks.
        src: the rank whose values become everyone's.
        what: they are, for the line about long sending.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if communicator.size == 1 or not tensors:
        return
    if sum(tensor.nbytes for tensor in tensors) > _BRIEF:
        own = digests(tensors, communicator.device)
        if _same(own, communicator):
            return
        tensors = differing(tensors, own, communicator, src)
    with Sending(what, sum(tensor.nbytes for tensor in tensors), communicator):
        synchronize(tensors, communicator, src)


def differing(
    tensors: Sequence[torch.Tensor], own: torch.Tensor, communicator: Communicator, src: int = 0
) -> list[torch.Tensor]:
    """Returns the tensors whose digests differ from rank `src`'s on some rank, the same places on all; collective.

    Args:
        tensors: as many on all ranks.
        own: what `digests` returned for them.
        communicator: of all ranks.
        src: the rank to compare with.
    """
    theirs = own.clone()
    communicator.broadcast(theirs, src).wait()
    differs = (theirs != own).any(1).to(torch.uint8)
    communicator.all_reduce(differs, ReduceOp.MAX).wait()
    # waits: at start.
    return [tensor for tensor, wrong in zip(tensors, differs.tolist(), strict=True) if wrong]


def share_state(optimizer: torch.optim.Optimizer, communicator: Communicator, src: int = 0) -> None:
    """Gives an optimizer the state of rank `src`'s, unless all ranks have the same one already; collective.

    Tensors are sent as those of a model are, and arrive on this rank's own device. The rest is sent as one object.
    """
    if communicator.size == 1:
        return
    state = optimizer.state_dict()
    texts, tensors = list[str](), list[torch.Tensor]()
    for part in _parts(state):
        if isinstance(part, torch.Tensor):
            texts.append(f"{part.dtype} {tuple(part.shape)} {part.device.type}")
            tensors.append(part)
        else:
            texts.append(part)
    text = digest_of("\n".join(texts).encode(), communicator.device)
    if _same(torch.cat([text, digests(tensors, communicator.device)]), communicator):
        return
    own = Structure.of(state, communicator.device) if communicator.rank == src else None
    theirs = communicator.broadcast_object(own, src)
    tensors = theirs.room(communicator.device) if own is None else own.tensors
    with Sending("an optimizer's state", sum(tensor.nbytes for tensor in tensors), communicator):
        synchronize(tensors, communicator, src)
    if own is None:
        put_state(optimizer, theirs.filled(tensors))


def share_state_nearly(optimizer: torch.optim.Optimizer, communicator: Communicator, src: int = 0) -> None:
    """As `share_state`, but for long tensors, which keep what they have; collective.

    Where an optimizer has none of the same form for a parameter, it gets zeros.
    """
    own = Structure.of(optimizer.state_dict(), communicator.device) if communicator.rank == src else None
    theirs = communicator.broadcast_object(own, src)
    tensors = theirs.room(communicator.device) if own is None else own.tensors
    synchronize([each for each in tensors if each.nbytes <= _SHORT], communicator, src)
    if own is not None:
        return
    held = tensors_of(optimizer)
    for each in tensors:
        if each.nbytes > _SHORT:
            each.zero_()
    put_state(optimizer, theirs.filled(tensors))
    for key, tensor in tensors_of(optimizer).items():
        before = held.get(key)
        if tensor.nbytes > _SHORT and before is not None and before.shape == tensor.shape:
            tensor.copy_(before)


def in_common(described: Mapping[Hashable, str], communicator: Communicator) -> list[Any]:
    """Returns the keys that all ranks have with the same description, in the same order on all; collective.

    Only a digest is sent where all ranks have the same ones.

    Args:
        described: texts by keys, whose own texts are equal where the keys are.
        communicator: of all ranks.
    """
    by_text = {f"{key!r} {text}": key for key, text in described.items()}
    texts = sorted(by_text)
    if communicator.size > 1 and not _same(digest_of("\n".join(texts).encode(), communicator.device), communicator):
        texts = sorted(set(texts).intersection(*gather_json(communicator, texts)))
    return [by_text[text] for text in texts]


def digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns 128 bits for the bytes of each tensor, shape (tensors, 2), int64; NaN and the sign of zero count.

    Args:
        tensors: dense ones.
        device: of the result.
    """
    longest = max((tensor.nbytes for tensor in tensors), default=0)
    weights = {each.device: _weights(longest, each.device) for each in tensors if each.device.type != "cpu"}
    found = []
    for tensor in tensors:
        data = bytes_of(tensor)
        if tensor.device.type == "cpu":
            found.append(digest_of(data.numpy().data, device))
        else:
            # waits: at start.
            found.append(sum_of_words(data, weights[tensor.device]).to(device).view(1, 2))
    return torch.cat(found) if found else torch.empty(0, 2, dtype=torch.int64, device=device)


def _same(own: torch.Tensor, communicator: Communicator) -> bool:
    """Returns True if all ranks pass the same digests; collective."""
    return agreements([own], communicator)[0]


def agreements(own: Sequence[torch.Tensor], communicator: Communicator) -> list[bool]:
    """Returns, for each group of digests, True if all ranks pass the same ones; one collective.

    Args:
        own: groups of digests, as many on all ranks.
        communicator: of all ranks.
    """
    # waits: at start.
    mine = torch.cat([digest_of(each.cpu().numpy().tobytes(), communicator.device) for each in own])
    everyone = mine.new_empty(communicator.size * mine.numel())
    communicator.all_gather(everyone, mine.view(-1)).wait()
    rows = everyone.view(communicator.size, len(own), 2)
    # waits: at start.
    return [bool(same) for same in (rows == rows[0]).all(2).all(0).tolist()]


def digest_of(data: bytes | memoryview, device: torch.device) -> torch.Tensor:
    """Returns 128 bits of the SHA-256 of some bytes, shape (1, 2), int64.

    Args:
        data: the bytes, which are not copied.
        device: of the result.
    """
    found = np.frombuffer(hashlib.sha256(data).digest()[:16], dtype=np.int64)
    # waits: at start.
    return torch.from_numpy(found.copy()).to(device).view(1, 2)


def _weights(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns odd random numbers for the words of so many bytes, the same on all ranks."""
    length = max(1, min(_PIECE, -(-nbytes // 4)))
    random = np.random.Generator(np.random.PCG64(0)).integers(-(1 << 63), 1 << 63, (length, 2), dtype=np.int64) | 1
    # waits: at start.
    return torch.from_numpy(np.ascontiguousarray(random.T)).to(device)


@torch.no_grad()
def sum_of_words(data: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns two sums, modulo 2^64, of the words of 32 bits in some bytes, each times an odd random number.

    A GPU computes it about as fast as it reads. Where one word differs, so do both sums. Where more do, sums are equal by chance
    once in 2^64 at least.

    Args:
        data: the bytes, flat.
        weights: the random numbers; made where they are not given.
    """
    if weights is None:
        weights = _weights(data.numel(), data.device)
    rest = data.numel() % 4
    if rest or data.storage_offset() % 4:
        # Ones that cannot be viewed as words.
        data = torch.cat([data, data.new_zeros((4 - rest) % 4)])
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for piece in data.view(torch.int32).split(_PIECE):
        wide = piece.to(torch.int64)
        total = total * _FACTOR + torch.stack([(row[: len(wide)] * wide).sum() for row in weights])
    return total


def _parts(value: Any) -> Iterator[str | torch.Tensor]:
    """Yields the tensors of a state, and texts that differ where anything else does."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value.detach()
        else:
            yield os.urandom(16).hex()  # equal to none: it is sent
    elif isinstance(value, Mapping):
        yield f"{len(value)} entries"
        for key, each in value.items():
            yield from _parts(key)
            yield from _parts(each)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _parts(each)
    elif isinstance(value, float):
        yield "nan" if math.isnan(value) else value.hex()
    elif value is None or isinstance(value, bool | int | str):
        yield f"{type(value).__name__} {value!r}"
    else:
        try:
            yield hashlib.sha256(pickle.dumps(value)).hexdigest()
        except Exception:  # whatever cannot be pickled is not sent either: the error comes there
            yield os.urandom(16).hex()
