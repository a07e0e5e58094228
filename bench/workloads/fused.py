"""Fused paths: each beside the sequence of our own calls that it replaces, a copy, and PyTorch.

The unfused sequences write into buffers that were made before, which is the best that a caller can do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bagua_kernels.compression import BlockCodec, MinMaxUInt8
from bagua_kernels.launchers.arguments import padded
from bagua_kernels.rules.gossip import DCD
from bench.workloads.codecs import INT8, SIGN, Codecs
from bench.workloads.elementwise import OPTIMIZERS
from bench.workloads.rivals import Rival, full_blocks, rivals
from bench.workloads.rows import SEED, Run, Workload, backend_rows, copy_row, gradient

RANKS = 4
SYMMETRIC: Codecs = {"AbsMaxInt8": INT8["AbsMaxInt8"]}
FEEDBACK: Codecs = SYMMETRIC | SIGN
GOSSIP: Codecs = {"MinMaxUInt8": MinMaxUInt8(stochastic=True)}

Ours = Callable[[BlockCodec], Run]
Theirs = Callable[[BlockCodec, Rival], Run]


def fused_group(
    group: str,
    codecs: Codecs,
    n: int,
    device: torch.device,
    moved: Callable[[BlockCodec], int],
    fused: Ours,
    unfused: Ours,
    theirs: Theirs,
) -> list[Workload]:
    """A copy, and for each codec the fused path, what it replaces, and PyTorch's ways."""
    rows = [copy_row(group, n, device)]
    for subject, codec in codecs.items():
        steps = f"{subject} unfused"
        size = moved(codec)
        rows += backend_rows(group, subject, size, functools.partial(fused, codec), device, unfused=steps)
        rows += backend_rows(group, steps, size, functools.partial(unfused, codec), device)
        for rival in rivals(codec, device):
            rows.append(Workload(group, subject, rival.name, size, functools.partial(theirs, codec, rival)))
    return rows


def payload_of(codec: BlockCodec, n: int, device: torch.device) -> torch.Tensor:
    return torch.empty(codec.payload_size(n), dtype=torch.uint8, device=device)


def feedback_group(n: int, device: torch.device) -> list[Workload]:
    """Reads the gradient and the residual, writes the residual and the payload."""

    def fused(codec: BlockCodec) -> Run:
        x, residual, payload = gradient(n, device), torch.zeros(n, device=device), payload_of(codec, n, device)
        return lambda: codec.encode_feedback(x, residual, seed=SEED, out=payload)

    def unfused(codec: BlockCodec) -> Run:
        x, payload = gradient(n, device), payload_of(codec, n, device)
        residual, total, decoded = (torch.zeros(n, device=device) for _ in range(3))

        def run() -> object:
            torch.add(x, residual, out=total)
            codec.encode(total, seed=SEED, out=payload)
            return torch.sub(total, codec.decode(payload, decoded), out=residual)

        return run

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        x = gradient(n, device)[: full_blocks(n, codec.block)]
        residual = torch.zeros_like(x)

        def run() -> object:
            total = x + residual
            return torch.sub(total, rival.decode(*rival.encode(total)), out=residual)

        return run

    def moved(codec: BlockCodec) -> int:
        return 12 * n + codec.payload_size(n)

    return fused_group("error feedback", FEEDBACK, n, device, moved, fused, unfused, theirs)


def reduce_group(n: int, device: torch.device) -> list[Workload]:
    """Reads a payload a rank, writes one."""

    def payloads_of(codec: BlockCodec) -> torch.Tensor:
        return codec.encode(gradient(n, device)).repeat(RANKS, 1)

    def fused(codec: BlockCodec) -> Run:
        payloads, out = payloads_of(codec), payload_of(codec, n, device)
        return lambda: codec.reduce(payloads, n, scale=1 / RANKS, out=out)

    def unfused(codec: BlockCodec) -> Run:
        payloads, out = payloads_of(codec), payload_of(codec, n, device)
        total, decoded = torch.empty(n, device=device), torch.empty(n, device=device)

        def run() -> object:
            codec.decode(payloads[0], total)
            for payload in payloads[1:]:
                total.add_(codec.decode(payload, decoded))
            return codec.encode(total.mul_(1 / RANKS), out=out)

        return run

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        encoded = rival.encode(gradient(n, device)[: full_blocks(n, codec.block)])
        payloads = [tuple(part.clone() for part in encoded) for _ in range(RANKS)]

        def run() -> object:
            total = rival.decode(*payloads[0])
            for parts in payloads[1:]:
                total += rival.decode(*parts)
            return rival.encode(total.mul_(1 / RANKS))

        return run

    def moved(codec: BlockCodec) -> int:
        return (RANKS + 1) * codec.payload_size(n)

    return fused_group(f"reduce of {RANKS}", INT8, n, device, moved, fused, unfused, theirs)


def resnet50() -> Iterator[int]:
    """The sizes of the 161 parameters of ResNet-50 (He et al., CVPR 2016), 25,557,032 elements in all, in order."""

    def convolution(inputs: int, outputs: int, kernel: int) -> tuple[int, int, int]:
        # With the weight and the bias of the batch normalization after it.
        return inputs * outputs * kernel**2, outputs, outputs

    yield from convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(inputs, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:
                yield from convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    yield from (2048 * 1000, 1000)


def piece_sizes(n: int) -> list[int]:
    """The sizes of ResNet-50, over and over until there are `n` elements; the last is cut."""
    sizes: list[int] = []
    left = n
    parameters = itertools.cycle(resnet50())
    while left > 0:
        sizes.append(min(left, next(parameters)))
        left -= sizes[-1]
    return sizes


@functools.lru_cache(maxsize=1)
def pieces_of(n: int, device: torch.device) -> list[torch.Tensor]:
    """Gradients with memory of their own, as autograd leaves them."""
    return [piece.clone() for piece in gradient(n, device).split(piece_sizes(n))]


def pieces_group(n: int, device: torch.device) -> list[Workload]:
    """Reads all tensors, writes one payload. Each tensor starts a block, so that the payload is a little larger."""
    sizes = piece_sizes(n)

    def places_of(codec: BlockCodec) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A vector of all blocks, and each tensor's place in it; the gaps stay zero."""
        blocks = [padded(size, codec.block) for size in sizes]
        flat = torch.zeros(sum(blocks), device=device)
        return flat, [part[:size] for part, size in zip(flat.split(blocks), sizes, strict=True)]

    def fused(codec: BlockCodec) -> Run:
        pieces = pieces_of(n, device)
        payload = codec.encode_pieces(pieces)
        return lambda: codec.encode_pieces(pieces, out=payload)

    def in_steps(codec: BlockCodec, encode: Callable[[torch.Tensor], object]) -> Run:
        pieces = pieces_of(n, device)
        flat, places = places_of(codec)

        def run() -> object:
            torch._foreach_copy_(places, pieces)
            return encode(flat)

        return run

    def unfused(codec: BlockCodec) -> Run:
        payload = payload_of(codec, sum(padded(size, codec.block) for size in sizes), device)
        return in_steps(codec, lambda flat: codec.encode(flat, out=payload))

    def moved(codec: BlockCodec) -> int:
        return 4 * n + codec.payload_size(sum(padded(size, codec.block) for size in sizes))

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        return in_steps(codec, rival.encode)

    return fused_group("encode pieces", INT8, n, device, moved, fused, unfused, theirs)


def apply_group(name: str, n: int, device: torch.device) -> list[Workload]:
    """Reads one payload, such as a reduction gives, and reads and writes the parameters and the optimizer's state."""
    optimizer = OPTIMIZERS[name]

    def payloads_of(codec: BlockCodec) -> torch.Tensor:
        return codec.encode(gradient(n, device)).view(1, -1)

    def fused(codec: BlockCodec) -> Run:
        payloads, state = payloads_of(codec), optimizer.state(n, device)
        return lambda: codec.decode_apply(payloads, optimizer.rule, state, optimizer.scalars)

    def unfused(codec: BlockCodec) -> Run:
        payloads, state = payloads_of(codec), optimizer.state(n, device)
        gradients = torch.empty(n, device=device)
        return lambda: optimizer.step(state, codec.decode_sum(payloads, gradients))

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        x = gradient(n, device)[: full_blocks(n, codec.block)]
        parts = rival.encode(x)
        p = torch.zeros_like(x, requires_grad=True)
        step = optimizer.theirs([p], "fused").step

        def run() -> object:
            p.grad = rival.decode(*parts)
            return step()

        return run

    def moved(codec: BlockCodec) -> int:
        return optimizer.moved(n, codec.payload_size(n))

    return fused_group(f"decode and apply {name}", SYMMETRIC, n, device, moved, fused, unfused, theirs)


def gossip_group(n: int, device: torch.device) -> list[Workload]:
    """One step of low-precision gossip on a ring, without the wire: the difference is encoded, and three replicas are moved.

    Reads three replicas, twice, and the parameter, and writes all of them. Writes a payload and reads three.
    """
    ranks, own = 3, 1
    weights = (1 / ranks,) * ranks

    def vectors() -> tuple[torch.Tensor, torch.Tensor]:
        x = gradient(n, device)
        return x.clone(), torch.stack([x * scale for scale in (0.99, 1.0, 1.01)])

    def payloads_of(codec: BlockCodec) -> torch.Tensor:
        return codec.encode(gradient(n, device) * 1e-2, seed=SEED).repeat(ranks, 1)

    def fused(codec: BlockCodec) -> Run:
        (x, replicas), payloads = vectors(), payloads_of(codec)

        def run() -> object:
            codec.encode_rule(DCD, [x, replicas[own]], seed=SEED, out=payloads[own], replicas=replicas, weights=weights)
            return codec.decode_add(payloads, replicas)

        return run

    def in_steps(
        x: torch.Tensor,
        replicas: torch.Tensor,
        encode: Callable[[torch.Tensor], Sequence[Any]],
        decode: Callable[..., Any],
    ) -> Run:
        difference = torch.empty_like(x)

        def run() -> object:
            torch.add(replicas[0], replicas[1], out=difference)
            difference.add_(replicas[2]).div_(ranks).add_(x).sub_(replicas[own], alpha=2)
            for replica, payload in zip(replicas, encode(difference), strict=True):
                replica.add_(decode(payload))
            return x.copy_(replicas[own])

        return run

    def unfused(codec: BlockCodec) -> Run:
        (x, replicas), payloads = vectors(), payloads_of(codec)
        decoded = torch.empty_like(x)

        def encode(difference: torch.Tensor) -> torch.Tensor:
            codec.encode(difference, seed=SEED, out=payloads[own])
            return payloads

        return in_steps(x, replicas, encode, lambda payload: codec.decode(payload, decoded))

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        whole = full_blocks(n, codec.block)
        x, replicas = (vector[..., :whole].contiguous() for vector in vectors())
        neighbour = rival.encode(x * 1e-2)
        return in_steps(
            x, replicas, lambda z: [neighbour, rival.encode(z), neighbour], lambda parts: rival.decode(*parts)
        )

    def moved(codec: BlockCodec) -> int:
        return (2 + 3 * ranks) * 4 * n + (1 + ranks) * codec.payload_size(n)

    return fused_group("low-precision gossip", GOSSIP, n, device, moved, fused, unfused, theirs)


def groups(n: int, device: torch.device) -> list[list[Workload]]:
    return [
        reduce_group(n, device),
        feedback_group(n, device),
        gossip_group(n, device),
        pieces_group(n, device),
        *(apply_group(name, n, device) for name in OPTIMIZERS),
    ]
