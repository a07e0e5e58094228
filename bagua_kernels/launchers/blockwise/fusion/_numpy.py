"""Rules around a block quantizer in NumPy: each step by itself, on whole vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numpy import array, load, meant, plain, store_results
from bagua_kernels.launchers.blockwise._numpy import decoded, in_blocks, own_elements, weighted_sum, write_payload
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, Rows, Sources
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer


@meant
def encode_rule(
    rule: BlockQuantizer,
    message: MessageRule,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    payload: torch.Tensor,
    form: BlockForm,
    seed: int | None,
    counts: torch.Tensor | None,
    rows: Rows | None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.fusion.encode_rule`."""
    matrix = own_elements(form, counts)
    own = matrix.reshape(-1)[: form.n]
    total = [] if rows is None else [weighted_sum(array(rows.replicas), rows.weights)]

    def values() -> list[Any]:
        return [*map(load, arrays), *total, *map(np.float32, scalars)]

    if message.before is not None:
        store_results(arrays.__getitem__, message.before_writes, plain(message.before)(*values()), own)
    write_payload(rule, in_blocks(plain(message.value)(*values()), form), matrix, payload, form, seed)
    if message.after is not None:
        sent = decoded(rule, form, *map(array, form.parts(payload)))
        store_results(arrays.__getitem__, message.after_writes, plain(message.after)(sent, *values()), own)


@meant
def decode_apply(
    rule: BlockQuantizer,
    update: ElementwiseRule,
    mixture: Mixture,
    sources: Sources,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    form: BlockForm,
) -> None:
    """See `bagua_kernels.launchers.blockwise.fusion.decode_apply`."""
    own = own_elements(form, sources.counts).reshape(-1)[: form.n]
    words, codes = map(array, sources.whole.parts(sources.payloads, sources.first))

    def vectors() -> Iterator[Any]:
        for rank in range(len(words)):
            value = decoded(rule, form, words[rank], codes[rank])
            if sources.replicas is not None:
                replica = array(sources.replicas)[rank]
                np.add(replica, value, out=replica, where=own)
            yield value

    values: dict[int, Any] = {mixture.position: weighted_sum(vectors(), sources.weights) * np.float32(sources.scale)}
    if update.writes:
        places = dict(zip(mixture.others(update), arrays, strict=True))
        values |= {place: decoded(rule, form, words[j], codes[j]) for j, place in enumerate(mixture.each)}
        values |= {place: load(tensor) for place, tensor in places.items()}
        ordered = [values[place] for place in range(update.arrays)]
        results = plain(update.function)(*ordered, *map(np.float32, scalars))
        store_results(places.__getitem__, update.writes, results, own)
