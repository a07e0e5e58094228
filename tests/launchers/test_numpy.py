"""The NumPy backend gives the bytes of the compiled one, whatever numbers, lengths, dtypes, seeds, counts and weights come."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_kernels import knobs
from bagua_kernels.launchers import blockwise, chunks, elementwise, multitensor, select
from bagua_kernels.launchers.blockwise.form import form_of
from bagua_kernels.launchers.blockwise.rows import Rows
from bagua_kernels.rules import gossip, messages, mixing, optimizers, outer
from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import PLAIN_SGD, ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer
from tests.cases import DTYPES
from tests.compression.codecs import ALL, Case
from tests.grids import grid
from tests.launchers.test_multitensor import MIXTURES, VALUES, columns_of, rows_of, variant_of

# A kernel per example has to be compiled for these tests.
few_examples = settings(max_examples=settings().max_examples // 2)
# And these have items for each codec.
fewer_examples = settings(max_examples=max(2, settings().max_examples // 10))

Tensors = list[torch.Tensor]
RULES = [
    rule
    for module in (optimizers, gossip, outer)
    for rule in vars(module).values()
    if isinstance(rule, ElementwiseRule) and rule.writes and not rule.sums
]
RULES += [mixing.mixed(3, 1), mixing.mixed(5, 0), mixing.flows(2)]
VARIANTS = [variant_of(rule) for rule in vars(optimizers).values() if isinstance(rule, ElementwiseRule)]
VARIANTS += [*MIXTURES.values(), *(variant_of(v.rule, *[torch.float64] * v.rule.arrays) for v in VARIANTS)]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 1.0], np.float32)

lengths = st.sampled_from([1, 2, 15, 16, 17, 31, 255, 256, 257, 1009, 4097, 20_000]) | st.integers(1, 20_000)
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
seeds = st.integers(0, 2**64 - 1)
floats = st.sampled_from(DTYPES)


def vector(rng: np.random.Generator, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of some magnitude, or equal ones; a few are special values."""
    spread = rng.choice([0.0, 1.0, 8.0])
    values = rng.standard_normal(n) * 2.0 ** (
        rng.integers(-140, 120) * rng.integers(0, 2) + spread * rng.standard_normal(n)
    )
    if rng.integers(4) == 0:
        values[:] = values[0]
    with np.errstate(over="ignore", under="ignore"):
        values = values.astype(np.float32)
    if rng.integers(2):
        places = rng.integers(0, n, int(rng.integers(1, 4)))
        values[places] = rng.choice(SPECIAL, len(places))
    return torch.from_numpy(values).to(dtype)


def check(run: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Both backends give the same bytes, NaNs of any bits being equal."""
    found = []
    for backend in ("numba_cpu", "numpy"):
        with knobs.override(knobs.BACKEND, backend):
            found.append(run())
    for place, (compiled, plain) in enumerate(zip(*found, strict=True)):
        assert compiled.dtype == plain.dtype
        if compiled.is_floating_point():
            numbers = ~compiled.isnan()
            assert torch.equal(numbers, ~plain.isnan()), f"tensor {place}"
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[compiled.element_size()]
            compiled, plain = compiled[numbers].view(bits), plain[numbers].view(bits)
        assert torch.equal(compiled, plain), f"tensor {place}, at {(compiled != plain).nonzero()[:5].tolist()}"


def clones(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [tensor.clone() for tensor in tensors]


def scalars_of(rule: ElementwiseRule, rng: np.random.Generator) -> tuple[float, ...]:
    names = list(inspect.signature(rule.function).parameters)[rule.arrays :]
    return tuple(float(rng.choice(VALUES.get(name, (0.3, 1.0, 2.5)))) for name in names)


@few_examples
@given(rule=st.sampled_from(RULES), rng=generators, n=lengths, double=st.booleans())
def test_elementwise(rule: ElementwiseRule, rng: np.random.Generator, n: int, double: bool) -> None:
    dtypes = [torch.float64] * rule.arrays if double else [DTYPES[i] for i in rng.integers(0, 3, rule.arrays)]
    arrays = [vector(rng, n, dtype) for dtype in dtypes]
    scalars = scalars_of(rule, rng)

    def run() -> Tensors:
        changed = clones(arrays)
        elementwise.apply(rule, changed, scalars)
        return changed

    check(run)


def fused(x, y, z):
    return tl.fma(x, y, z)


FUSED = ElementwiseRule("fused", fused, arrays=3, writes=(2,))


@given(rng=generators, n=st.integers(1, 300))
def test_products_and_sums_that_round_once(rng: np.random.Generator, n: int) -> None:
    """Of float64, also where the product overflows, is tiny, or cancels all but its last bits."""

    def numbers() -> np.ndarray[Any, Any]:
        any_bits = rng.integers(0, 1 << 64, n, np.uint64).view(np.float64)
        small = rng.standard_normal(n) * 2.0 ** rng.integers(-540, -500, n)
        special = rng.choice([*SPECIAL.astype(np.float64), 5e-324, 2.0**-1022, 1.7e308, 1 + 2.0**-52], n)
        whole = rng.integers(-8, 9, n) * 2.0 ** rng.integers(-60, 60, n)
        return np.choose(rng.integers(0, 5, n), [any_bits, small, special, whole, rng.standard_normal(n)])

    x, y, z = numbers(), numbers(), numbers()
    with np.errstate(all="ignore"):
        z = np.where(rng.integers(0, 2, n), z, -(x * y) * (1 + rng.choice([0.0, 2.0**-52, -(2.0**-52), 2.0**-30], n)))
    arrays = [torch.from_numpy(each) for each in (x, y, z)]

    def run() -> Tensors:
        changed = clones(arrays)
        elementwise.apply(FUSED, changed, ())
        return changed

    check(run)


@few_examples
@given(variant=st.sampled_from(VARIANTS), rng=generators, sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_multitensor(variant: multitensor.Variant, rng: np.random.Generator, sizes: list[int]) -> None:
    columns = columns_of(variant, tuple(sizes), special=not variant.rule.sums)
    rows = rows_of(variant, len(sizes))
    rows[:, multitensor.SKIP] = rng.integers(0, 4, len(sizes)) == 0
    keys = rng.integers(0, 1 << 32, (len(sizes), 2), np.uint32)

    def run() -> Tensors:
        changed = [clones(column) for column in columns]
        sums = multitensor.launch(variant, multitensor.Table(changed), rows, keys)
        totals.append(sums)
        return [tensor for column in changed for tensor in column]

    totals: list[torch.Tensor | None] = []
    check(run)
    assert (totals[0] is None) == (totals[1] is None) == (not variant.rule.sums)
    if totals[0] is not None and totals[1] is not None:
        # Each backend adds up float64 terms in an order of its own.
        torch.testing.assert_close(totals[0], totals[1], rtol=1e-11, atol=0.0)


def own_counts(rng: np.random.Generator, blocks: int, block: int) -> torch.Tensor | None:
    """Numbers of own elements per block, some of which are out of range, or None."""
    if rng.integers(2):
        return None
    counts = np.where(rng.integers(0, 2, blocks), block, rng.integers(-3, block + 9, blocks))
    return torch.from_numpy(counts.astype(np.int32))


def payload_for(rule: BlockQuantizer, n: int, block: int, ranks: int | None = None, beyond: int = 0) -> torch.Tensor:
    """Memory for payloads, with something in it; rows may have more behind them."""
    size = form_of(rule, n, block).size
    shape = (size,) if ranks is None else (ranks, size + beyond)
    return torch.full(shape, 77, dtype=torch.uint8)[..., :size]


def payloads_of(rng: np.random.Generator, rule: BlockQuantizer, n: int, block: int, ranks: int) -> torch.Tensor:
    payloads = payload_for(rule, n, block, ranks, beyond=16 * int(rng.integers(0, 3)))
    for payload in payloads:
        blockwise.encode(rule, vector(rng, n), payload, block=block, seed=int(rng.integers(1 << 40)))
    return payloads


def weights_of(rng: np.random.Generator, ranks: int) -> tuple[float, ...] | None:
    choice = rng.integers(3)
    return None if choice == 0 else (1 / ranks,) * ranks if choice == 1 else tuple(rng.standard_normal(ranks))


# Codecs of one rule and one block differ in what gives them seeds.
QUANTIZERS = {(repr(case.codec.rule), case.codec.block): case for case in reversed(ALL)}


@grid(case=QUANTIZERS.values(), cover=1)
@fewer_examples
@given(rng=generators, n=lengths, dtype=floats, seed=seeds | st.none())
def test_blocks(case: Case, rng: np.random.Generator, n: int, dtype: torch.dtype, seed: int | None) -> None:
    rule, block, x = case.codec.rule, case.codec.block, vector(rng, n, dtype)
    form = form_of(rule, n, block)
    counts = own_counts(rng, form.blocks, block)
    payloads, scale = payloads_of(rng, rule, n, block, int(rng.integers(1, 7))), float(rng.choice([1.0, 1 / 3, -0.7]))
    weights = weights_of(rng, len(payloads))
    chunk = block * int(rng.integers(1, 4))
    rows = Rows(total=n, span=chunk, width=chunk - int(rng.integers(0, block)), count=-(-n // chunk))

    def run() -> Tensors:
        encoded, sums = payload_for(rule, n, block), payload_for(rule, n, block)
        in_rows = payload_for(rule, rows.width, block, rows.count)
        outs = [torch.full((n,), 3.0, dtype=dtype) for _ in range(3)]
        blockwise.encode(rule, x, encoded, block=block, seed=seed, counts=counts)
        blockwise.decode(rule, encoded, outs[0], block=block)
        blockwise.decode_sum(rule, payloads, outs[1], scale=scale, block=block, weights=weights)
        blockwise.reduce(rule, payloads, sums, n=n, scale=scale, block=block, seed=seed, counts=counts)
        row_seeds = None if seed is None else [seed // (row + 1) for row in range(rows.count)]
        blockwise.encode_rows(rule, x, in_rows, rows, block=block, seeds=row_seeds, counts=counts)
        blockwise.decode_rows(rule, in_rows, outs[2], rows, block=block)
        scaled = encoded.clone()
        scaled[: form.scale_bytes] = payloads[0, : form.scale_bytes]
        blockwise.encode(rule, x, scaled, block=block, seed=seed, given=True)
        return [encoded, sums, in_rows, scaled, *outs]

    check(run)


@grid(case=QUANTIZERS.values(), cover=1)
@fewer_examples
@given(rng=generators, sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=5), dtype=floats)
def test_pieces(case: Case, rng: np.random.Generator, sizes: list[int], dtype: torch.dtype) -> None:
    rule, block = case.codec.rule, case.codec.block
    pieces = [vector(rng, size + 1, dtype)[:size] for size in sizes]

    def run() -> Tensors:
        payload = payload_for(rule, sum(-(-size // block) * block for size in sizes), block)
        blockwise.encode_pieces(rule, pieces, payload, block=block, seed=int(sum(sizes)))
        return [payload]

    check(run)


def stepped(x, momentum, decay):
    return momentum * decay + x


def added_to(x, momentum, decay):
    return x + momentum


def left_over(sent, x, momentum, decay):
    return x - sent, sent * decay


MESSAGES = [messages.FEEDBACK, gossip.CHOCO, gossip.DCD, gossip.DCD_TOTAL]
MESSAGES += [MessageRule("step", added_to, 2, stepped, (1,), left_over, (0, 1))]


@grid(case=QUANTIZERS.values(), message={message.name: message for message in MESSAGES}, cover=1)
@fewer_examples
@given(rng=generators, n=lengths, seed=seeds)
def test_rules_before_and_after_a_message(
    case: Case, message: MessageRule, rng: np.random.Generator, n: int, seed: int
) -> None:
    rule, block = case.codec.rule, case.codec.block
    summed = message.arrays - 1 not in (*message.before_writes, *message.after_writes) and bool(rng.integers(2))
    arrays = [vector(rng, n, DTYPES[int(rng.integers(3))]) for _ in range(message.arrays - summed)]
    replicas = torch.stack([vector(rng, n) for _ in range(int(rng.integers(1, 5)))]) if summed else None
    weights = weights_of(rng, len(replicas)) if replicas is not None else None
    counts = own_counts(rng, form_of(rule, n, block).blocks, block)
    scalars = tuple(rng.choice([0.5, 1.0, 0.9], message.scalars))

    def run() -> Tensors:
        changed, payload = clones(arrays), payload_for(rule, n, block)
        beside = {"counts": counts, "replicas": replicas, "weights": weights}
        blockwise.encode_rule(rule, message, changed, scalars, payload, block=block, seed=seed, **beside)
        return [payload, *changed]

    check(run)


@grid(
    case=QUANTIZERS.values(), update={rule.name: rule for rule in (PLAIN_SGD, optimizers.ADAM, gossip.ADDED)}, cover=1
)
@fewer_examples
@given(rng=generators, n=lengths)
def test_updates_by_payloads(case: Case, update: ElementwiseRule, rng: np.random.Generator, n: int) -> None:
    rule, block = case.codec.rule, case.codec.block
    ranks = int(rng.integers(1, 7))
    first = int(rng.integers(0, 3))
    total = n + first * block + int(rng.integers(0, 2 * block))
    payloads, weights = payloads_of(rng, rule, total, block, ranks), weights_of(rng, ranks)
    arrays = [vector(rng, n, DTYPES[int(rng.integers(3))]) for _ in range(update.arrays - 1)]
    replicas = torch.stack([vector(rng, n) for _ in range(ranks)]) if rng.integers(2) else None
    counts = own_counts(rng, form_of(rule, n, block).blocks, block)

    def run() -> Tensors:
        changed = clones(arrays)
        rows = None if replicas is None else replicas.clone()
        beside = {"scale": 0.4, "weights": weights, "replicas": rows, "counts": counts, "first": first, "total": total}
        scalars = scalars_of(update, np.random.default_rng(n))
        blockwise.decode_apply(rule, payloads, update, changed, scalars, block=block, **beside)
        return changed + ([] if rows is None else [rows])

    check(run)


@grid(case=QUANTIZERS.values(), cover=1)
@fewer_examples
@given(rng=generators, n=lengths)
def test_updates_by_the_mean_and_a_payload(case: Case, rng: np.random.Generator, n: int) -> None:
    rule, block, update = case.codec.rule, case.codec.block, outer.REBASED
    payloads, start = payloads_of(rng, rule, n, block, 3), vector(rng, n)
    replicas = torch.stack([vector(rng, n) for _ in range(3)])

    def run() -> Tensors:
        changed, rows = start.clone(), replicas.clone()
        blockwise.decode_apply(rule, payloads, update, [changed], (), block=block, each=(2,), weights=(1 / 3,) * 3)
        blockwise.decode_add(rule, payloads, rows, block=block)
        return [changed, rows]

    check(run)


long_lengths = lengths | st.integers(65_000, 140_000)


@given(rng=generators, n=long_lengths, dtype=floats, share=st.floats(0, 1), seed=seeds)
def test_select(rng: np.random.Generator, n: int, dtype: torch.dtype, share: float, seed: int) -> None:
    x = vector(rng, n, dtype)
    residual = vector(rng, n) if rng.integers(2) else None
    keys = (x.float().numpy().view(np.int32) & 0x7FFFFFFF).astype(np.int64)
    threshold = int(np.quantile(keys, share))
    picked = int(rng.integers(0, n + 1))

    def run() -> Tensors:
        kept = None if residual is None else residual.clone()
        found = select.Collected(x, threshold, kept, expected=int(n * (1 - share)))
        room = found.count + 3
        offsets, values = torch.full((room,), 7, dtype=torch.int16), torch.full((room,), 9.0)
        found.write(offsets, values)
        ends = found.ends.to(torch.int32)
        placed, summed = torch.zeros(n), torch.full((n,), 5.0)
        assert select.place(ends, offsets, values, placed) == 0
        rows = [torch.stack([each, each]) for each in (ends, offsets, values)]
        assert select.place_sum(*rows, summed, 1 / 3) == 0
        order = select.permuted(n, picked, seed, x.device)
        return [ends, offsets, values, placed, summed, order, *([] if kept is None else [kept])]

    check(run)


@given(rng=generators, n=lengths, damage=st.sampled_from(["ends", "beyond", "order", "offset"]))
def test_select_finds_the_same_damage(rng: np.random.Generator, n: int, damage: str) -> None:
    n = n + 3
    ends = torch.tensor([3], dtype=torch.int32)
    offsets, values = torch.tensor([0, 1, n - 1]).to(torch.int16), torch.ones(3)
    if damage in ("ends", "beyond"):
        ends[0] = -1 if damage == "ends" else 4
    offsets[2] = {"order": 1, "offset": n}.get(damage, n - 1)
    for backend in ("numba_cpu", "numpy"):
        with knobs.override(knobs.BACKEND, backend):
            found = select.place(ends, offsets, values, torch.zeros(n))
            assert found == (select.BAD_ENDS if damage in ("ends", "beyond") else select.BAD_OFFSETS)


records = st.sampled_from(
    [chunks.Record(k, chunk) for k, chunk in ((1, 32), (3, 64), (64, 4096), (100, 256), (32, 32))]
)


@given(rng=generators, n=lengths, dtype=floats, record=records, mode=st.sampled_from(["plain", "residual", "start"]))
def test_chunks(rng: np.random.Generator, n: int, dtype: torch.dtype, record: chunks.Record, mode: str) -> None:
    x, start, residual = vector(rng, n, dtype), vector(rng, n), vector(rng, n)
    beta, ranks = float(rng.choice([1.0, 0.9])), int(rng.integers(1, 4))

    def run() -> Tensors:
        kept = residual.clone()
        found = torch.full((ranks, record.chunks(n), record.words), 77, dtype=torch.int32)
        beside: dict[str, Any] = {} if mode == "plain" else {"residual": kept, "beta": beta}
        for row in found:
            chunks.encode(x, row, record, **beside, start=start if mode == "start" else None)
        outs = [torch.full((n,), 5.0), torch.full((n,), 5.0)]
        assert chunks.decode_sum(found, outs[0], record, 1 / 3)
        assert chunks.decode_sum(found, outs[1], record, contributors=True)
        return [found, kept, *outs]

    check(run)


@given(rng=generators, n=lengths, record=records)
def test_chunks_refuse_the_same_records(rng: np.random.Generator, n: int, record: chunks.Record) -> None:
    found = torch.zeros(2, record.chunks(n), record.words, dtype=torch.int32)
    for row in found:
        chunks.encode(vector(rng, n), row, record)
    flat = found.view(-1)
    place, bit = int(rng.integers(flat.numel())), int(rng.integers(32))
    flat[place] ^= torch.tensor(1 << bit).to(torch.int32)
    good, out = [], torch.zeros(n)
    for backend in ("numba_cpu", "numpy"):
        with knobs.override(knobs.BACKEND, backend):
            good.append(chunks.decode_sum(found, out, record))
    assert good[0] == good[1]


@pytest.mark.parametrize("n", [600, 90_000])
def test_every_block_codec_at_the_sizes_of_a_model(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for case in ALL:
        check(functools.partial(lambda codec: [codec.encode(x, seed=3)], case.codec))
