"""Rules around any codec: one pass over memory with block codecs, and the same steps one after the other with others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Codec
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers import elementwise
from bagua_kernels.launchers.arguments import Weights, checked_weights
from bagua_kernels.quotient import divide_
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule


def is_fused(codec: Codec) -> bool:
    """True if `encode_rule` and `decode_apply` make one pass over memory each with this codec.

    They do with every block codec but `TernGrad(shared=True)`, whose scales come from outside. With other codecs they make
    several passes, to the same result.
    """
    return isinstance(codec, BlockCodec) and not codec.linear


@torch.no_grad()
def encode_rule(
    codec: Codec,
    message: MessageRule,
    arrays: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    *,
    seed: int = 0,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
    weights: torch.Tensor | Sequence[float] | None = None,
) -> torch.Tensor:
    """Encodes what a rule computes from several arrays, and updates them by what the payload decodes to.

    Args:
        codec: any codec; see `is_fused`.
        message: the rule, for example of `bagua_kernels.rules.gossip`.
        arrays: the rule's arrays, each of shape (n,); those that the rule writes are updated.
        scalars: the rule's scalars.
        seed: of stochastic rounding.
        out: the payload; made if None.
        counts: as for `BlockCodec.encode_rule`, and of no use to other codecs.
        replicas: shape (ranks, n), float32: the rule's last array is the sum of the rows, and not among `arrays`.
        weights: of the rows, as for `BlockCodec.decode_sum`.

    Returns:
        The payload. Errors as in `BlockCodec.encode_rule`.
    """
    if is_fused(codec):
        assert isinstance(codec, BlockCodec)
        options: dict[str, Any] = {"counts": counts, "replicas": replicas, "weights": weights}
        return codec.encode_rule(message, arrays, scalars, seed=seed, out=out, **options)
    if replicas is not None:
        total = torch.zeros(replicas.shape[1], dtype=torch.float32, device=replicas.device)
        arrays = [*arrays, _summed(replicas, total, checked_weights(weights, len(replicas), replicas.device))]
    if len(arrays) != message.arrays or not arrays:
        raise ValueError(f"rule {message.name!r} takes {message.arrays} arrays, got {len(arrays)}")
    if len(scalars) != message.scalars:
        raise ValueError(f"rule {message.name!r} takes {message.scalars} scalars, got {len(scalars)}")
    before, value, after = stages(message)
    if before is not None:
        elementwise.apply(before, arrays, scalars)
    sent = torch.empty(arrays[0].numel(), dtype=torch.float32, device=arrays[0].device)
    elementwise.apply(value, [sent, *arrays], scalars)
    payload = codec.encode(sent, seed=seed, out=out)
    if after is not None:
        elementwise.apply(after, [codec.decode(payload, sent), *arrays], scalars)
    return payload


@torch.no_grad()
def decode_apply(
    codec: Codec,
    payloads: torch.Tensor,
    update: ElementwiseRule,
    arrays: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    *,
    scale: float = 1.0,
    weights: torch.Tensor | Sequence[float] | None = None,
    replicas: torch.Tensor | None = None,
    each: Sequence[int] = (),
) -> None:
    """Decodes payloads and applies a rule to their weighted sum; see `BlockCodec.decode_apply`.

    Args:
        codec: any codec; see `is_fused`.
        payloads: shape (ranks, payload_size(n)), uint8.
        update: the rule, whose second array is the sum.
        arrays: the rule's other arrays, each of shape (n,); updated.
        scalars: the rule's scalars.
        scale: factor of the sum.
        weights: one float32 for each payload; None stands for ones.
        replicas: shape (ranks, n), float32, contiguous: what payload j decodes to is added to row j.
        each: places of further arrays of the rule: array `each[j]` is what payload j decodes to.
    """
    if is_fused(codec):
        assert isinstance(codec, BlockCodec)
        options: dict[str, Any] = {"scale": scale, "weights": weights, "replicas": replicas, "each": each}
        codec.decode_apply(payloads, update, arrays, scalars, **options)
        return
    total = torch.zeros(arrays[0].numel(), dtype=torch.float32, device=payloads.device)
    single: dict[int, torch.Tensor] = {}

    def decoded() -> Iterator[torch.Tensor]:
        room = torch.empty_like(total)
        for place, payload in enumerate(payloads):
            codec.decode(payload, room)
            if replicas is not None:
                replicas[place].add_(room)
            if place < len(each):
                single[each[place]] = room.clone()
            yield room

    single[1] = _summed(decoded(), total, checked_weights(weights, len(payloads), payloads.device)).mul_(scale)
    others = iter(arrays)
    elementwise.apply(update, [single[i] if i in single else next(others) for i in range(update.arrays)], scalars)


@torch.no_grad()
def decode_add(codec: Codec, payloads: torch.Tensor, replicas: torch.Tensor) -> torch.Tensor:
    """Adds what each payload decodes to to its own row of `replicas`; see `BlockCodec.decode_add`.

    Args:
        codec: any codec; see `is_fused`.
        payloads: shape (ranks, payload_size(n)), uint8.
        replicas: shape (ranks, n), float32, contiguous; updated.

    Returns:
        `replicas`.
    """
    if is_fused(codec):
        assert isinstance(codec, BlockCodec)
        return codec.decode_add(payloads, replicas)
    room = torch.empty_like(replicas[0]) if len(replicas) else replicas
    for payload, replica in zip(payloads, replicas, strict=True):
        replica.add_(codec.decode(payload, room))
    return replicas


def _summed(terms: Iterable[torch.Tensor], total: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Adds terms, each times its weight, to a total that is zero; returns it."""
    for place, term in enumerate(terms):
        # Not with `alpha`, which would round the product and the sum once.
        total.add_(term if weights.factors is None else term * weights.factors[place])
    return divide_(total, weights.divisor) if weights.divisor != 1.0 else total


@functools.cache
def stages(message: MessageRule) -> tuple[ElementwiseRule | None, ElementwiseRule, ElementwiseRule | None]:
    """The three stages of a rule, as rules of their own.

    Returns:
        `before`, with the same arrays. `value`, with one more array in front, which it writes. `after`, with the decoded values
        in front.
    """
    names = [f"v{i}" for i in range(message.arrays)] + [f"s{i}" for i in range(message.scalars)]
    text = f"def sent({', '.join(['out', *names])}):\n    return value({', '.join(names)})\n"
    sent = function_from_source(text, "sent", {"__name__": __name__, "value": message.value})
    before = after = None
    if message.before is not None:
        before = ElementwiseRule(f"{message.name}_before", message.before, message.arrays, message.before_writes)
    if message.after is not None:
        writes = tuple(1 + position for position in message.after_writes)
        after = ElementwiseRule(f"{message.name}_after", message.after, message.arrays + 1, writes)
    return before, ElementwiseRule(f"{message.name}_value", sent, message.arrays + 1, (0,)), after
