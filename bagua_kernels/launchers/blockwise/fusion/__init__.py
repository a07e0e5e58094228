"""Fuses rules over several arrays with a block quantizer: one rule before its blocks are encoded, one after they are decoded.

`encode_rule` computes what is encoded, encodes it, and updates arrays by what it decodes to. `decode_apply` decodes several
payloads, adds them up with weights, adds each one to its own replica, and applies a rule to the sum. Each is one pass over
memory, and gives the same bits as its steps one after the other. Arguments are checked here, once for all backends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import Weights, checked_seed, checked_weights
from bagua_kernels.launchers.blockwise.form import check_counts, check_payload, form_of
from bagua_kernels.launchers.blockwise.fusion.sources import Rows, Sources, check_arrays, check_replicas
from bagua_kernels.rules.gossip import NOTHING
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

OP = Op(__name__)


def encode_rule(
    rule: BlockQuantizer,
    message: MessageRule,
    arrays: Sequence[torch.Tensor],
    scalars: Sequence[float],
    payload: torch.Tensor,
    *,
    block: int,
    seed: int | None,
    counts: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
    weights: torch.Tensor | Sequence[float] | None = None,
) -> None:
    """Encodes what a rule computes from arrays, and updates the arrays by what the payload decodes to.

    If there are replicas, the rule's last array is their sum, `w_0 r_0 + w_1 r_1 + …`. It is summed up as `decode_apply` does.

    Args:
        rule: the quantizer.
        message: what is encoded, and what becomes of the arrays.
        arrays: each of shape (n,), float32, float16 or bfloat16, contiguous; those that the rule writes are updated. An array
            that is only read may be a row of the replicas.
        scalars: the rule's scalars, float32.
        payload: shape (size,), uint8; overwritten.
        block: elements a block.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.
        counts: as for `blockwise.encode`; other elements of the arrays stay as they are.
        replicas: shape (ranks, n), float32, contiguous; None if the rule's last array is among `arrays`.
        weights: as for `decode_apply`, of the replicas.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a number of arrays or scalars, a shape, size, device, alignment, block or seed does not fit.
    """
    if len(arrays) != message.arrays - (replicas is not None) or not arrays:
        beside = "" if replicas is None else f", of which one is the sum of the replicas, and {message.arrays - 1} more"
        raise ValueError(f"rule {message.name!r} takes {message.arrays} arrays{beside}, got {len(arrays)}")
    if replicas is not None and message.arrays - 1 in (*message.before_writes, *message.after_writes):
        raise ValueError(f"rule {message.name!r} writes its last array, which cannot be the sum of replicas")
    if len(scalars) != message.scalars:
        raise ValueError(f"rule {message.name!r} takes {message.scalars} scalars, got {len(scalars)}")
    check_arrays(list(arrays), payload.device)
    form = form_of(rule, arrays[0].numel(), block)
    check_payload("payload", payload, form, (form.size,), payload.device)
    seed = checked_seed(seed)
    check_counts(counts, form, payload.device)
    rows = None
    if replicas is not None:
        check_replicas(replicas, None, form.n, payload.device)
        rows = Rows(replicas, checked_weights(weights, len(replicas), payload.device))
    elif weights is not None:
        raise ValueError("weights are those of replicas, got them without replicas")
    if form.n:
        numbers = tuple(float(s) for s in scalars)
        OP.backend(payload.device).encode_rule(rule, message, tuple(arrays), numbers, payload, form, seed, counts, rows)


def decode_apply(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    update: ElementwiseRule,
    arrays: Sequence[torch.Tensor],
    scalars: Sequence[float],
    *,
    block: int,
    scale: float = 1.0,
    weights: torch.Tensor | Sequence[float] | None = None,
    replicas: torch.Tensor | None = None,
    each: Sequence[int] = (),
    counts: torch.Tensor | None = None,
    position: int = 1,
    first: int = 0,
    total: int | None = None,
) -> None:
    """Decodes payloads and applies a rule to what they sum up to, without writing the sum.

    The sum is `scale * (w_0 d_0 + w_1 d_1 + …)`, from the left, with a rounding to float32 after each product and each sum.
    Without weights there are no products. If all weights are 1/n, for n payloads, the plain sum is divided by n instead.

    Args:
        rule: the quantizer.
        payloads: shape (ranks, size), uint8.
        update: a rule of which one array is the sum, for example an optimizer's, whose gradient it is.
        arrays: the rule's arrays that are not decoded, in their order, each of shape (n,), float32, float16 or bfloat16,
            contiguous; updated.
        scalars: the rule's scalars.
        block: elements a block.
        scale: factor of the sum of the payloads.
        weights: shape (ranks,), float32 on the device of the payloads, or numbers. None stands for ones.
        replicas: shape (ranks, n), float32, contiguous: what payload j decodes to is added to row j. Must not overlap the arrays.
        each: places of further arrays of the rule: array `each[j]` is what payload j decodes to.
        counts: shape (blocks of the arrays,), int32: as for `blockwise.encode`. Other elements stay as they are.
        position: the sum's place among the rule's arrays.
        first: the block of the payloads with which the arrays begin.
        total: elements that the payloads are of; n by default.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a number of arrays, a shape, size, device, alignment or block is wrong. The rule writes what is decoded. The
            arrays are longer than the payloads.
    """
    places = (position, *each)
    outside = len(set(places)) < len(places) or not all(0 <= p < update.arrays for p in places)
    if outside or set(places) & {*update.writes}:
        raise ValueError(
            f"arrays {', '.join(map(str, places))} of rule {update.name!r} cannot be decoded: they must be different arrays "
            "that are only read"
        )
    if len(arrays) != update.arrays - len(places) or not arrays or not update.writes:
        beside = "the gradient" if not each else f"the {len(places)} that are decoded"
        raise ValueError(
            f"rule {update.name!r} takes {update.arrays - len(places)} arrays beside {beside}, got {len(arrays)}"
        )
    wanted = _parameters(update.function) - update.arrays
    if len(scalars) != wanted:
        raise ValueError(f"rule {update.name!r} takes {wanted} scalars, got {len(scalars)}")
    check_arrays(list(arrays), payloads.device)
    form = form_of(rule, arrays[0].numel(), block)
    whole = form if total is None else form_of(rule, total, block)
    if first < 0 or first * block + form.n > whole.n:
        raise ValueError(f"payloads of {whole.n} elements do not hold {form.n} from block {first} of {block} on")
    check_payload("payloads", payloads, whole, (-1, whole.size), payloads.device)
    if len(each) > len(payloads):
        raise ValueError(f"rule {update.name!r} gets {len(each)} single payloads, got {len(payloads)}")
    checked = checked_weights(weights, len(payloads), payloads.device)
    if replicas is not None:
        check_replicas(replicas, len(payloads), form.n, payloads.device)
    check_counts(counts, form, payloads.device)
    if form.n:
        sources = Sources(payloads, whole, first, scale, checked, replicas, counts)
        mixture = sources.mixture(position, tuple(each))
        numbers = tuple(float(s) for s in scalars)
        OP.backend(payloads.device).decode_apply(rule, update, mixture, sources, tuple(arrays), numbers, form)


def decode_add(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    replicas: torch.Tensor,
    *,
    block: int,
    counts: torch.Tensor | None = None,
) -> None:
    """Adds what each payload decodes to to its own replica.

    Args:
        rule: the quantizer.
        payloads: shape (ranks, size), uint8.
        replicas: shape (ranks, n), float32, contiguous; updated.
        block: elements a block.
        counts: as for `decode_apply`.

    Raises:
        ValueError: a shape, dtype, size, device, alignment or block is wrong.
    """
    check_replicas(replicas, None, replicas.shape[-1], payloads.device)
    form = form_of(rule, replicas.shape[1], block)
    check_payload("payloads", payloads, form, (len(replicas), form.size), payloads.device)
    check_counts(counts, form, payloads.device)
    if form.n and len(replicas):
        sources = Sources(payloads, form, 0, 1.0, Weights(), replicas, counts)
        OP.backend(payloads.device).decode_apply(rule, NOTHING, sources.mixture(0, ()), sources, (), (), form)


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)
