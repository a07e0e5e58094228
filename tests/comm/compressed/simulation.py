"""The collectives as docs/compressed-collectives.md describes them, on a list of all ranks' vectors."""

from __future__ import annotations

from math import ceil

import torch

from bagua_kernels.compression import Codec, Contractive, fold_seed


def parts(codec: Codec, n: int, owners: int, pieces: int) -> list[tuple[int, int, slice]]:
    """(number, owner, elements) of each piece of each chunk."""
    unit = ceil(32 / codec.block) * codec.block
    chunk = ceil(n / (unit * owners)) * unit
    piece = ceil(chunk / unit / pieces) * unit
    found = []
    for owner in range(owners):
        begin, end = min(owner * chunk, n), min((owner + 1) * chunk, n)
        for k in range(pieces):
            part = slice(min(begin + k * piece, end), min(begin + (k + 1) * piece, end))
            if part.stop > part.start:
                found.append((k * owners + owner, owner, part))
    return found


def shares_seed(codec: Codec) -> bool:
    return type(codec).__name__ == "RandomK"


def seed_1(codec: Codec, seed: int, rank: int, number: int) -> int:
    return fold_seed(seed, 0, number) if shares_seed(codec) else fold_seed(seed, 0, rank, number)


def seed_2(codec: Codec, seed: int, number: int) -> int:
    again = shares_seed(codec) and isinstance(codec.bias, Contractive)
    return fold_seed(seed, 0, number) if again else fold_seed(seed, 1, number)


def encoded(codec: Codec, inputs: list[torch.Tensor], part: slice, seed: int, number: int) -> torch.Tensor:
    return torch.stack([codec.encode(x[part], seed=seed_1(codec, seed, r, number)) for r, x in enumerate(inputs)])


def decoded(codec: Codec, payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return codec.decode(payload, torch.empty_like(like))


def two_passes(codec: Codec, inputs: list[torch.Tensor], pieces: int, seed: int) -> torch.Tensor:
    ranks, out = len(inputs), torch.empty_like(inputs[0])
    for number, _, part in parts(codec, out.numel(), ranks, pieces):
        payloads = encoded(codec, inputs, part, seed, number)
        total = torch.zeros(part.stop - part.start)
        for payload in payloads:
            total += decoded(codec, payload, total)
        mean = total * (1 / ranks)
        out[part] = decoded(codec, codec.encode(mean, seed=seed_2(codec, seed, number)), out[part])
    return out


def sparse(codec: Codec, inputs: list[torch.Tensor], pieces: int, seed: int) -> torch.Tensor:
    ranks, out = len(inputs), torch.empty_like(inputs[0])
    for number, _, part in parts(codec, out.numel(), 1, pieces):
        total = torch.zeros(part.stop - part.start)
        for payload in encoded(codec, inputs, part, seed, number):
            total += decoded(codec, payload, total)
        out[part] = total * (1 / ranks)
    return out
