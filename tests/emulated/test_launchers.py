"""Each function of each launcher once, on few elements, with the bytes of the NumPy backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch

from bagua_kernels import knobs
from bagua_kernels.launchers import blockwise, chunks, elementwise, multitensor, select
from bagua_kernels.launchers.blockwise.form import form_of
from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, FACTOR, MASTER, Table, Variant
from bagua_kernels.rules import gossip, outer
from bagua_kernels.rules.magnitude import absmax
from bagua_kernels.rules.messages import FEEDBACK
from bagua_kernels.rules.optimizers import ADAM, LAMB_MOMENTS, ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer, minmax
from tests.conftest import Target
from tests.emulated.same import on_both
from tests.grids import grid
from tests.oracles.vectors import make

LAUNCHERS = (blockwise, elementwise, multitensor, select, chunks)
# Public functions of the launchers that launch nothing, or that backends use.
HELPERS = {
    *("blockwise.check_counts", "blockwise.check_payload", "blockwise.form_of"),
    *("elementwise.check_array", "elementwise.call_lines"),
    *("multitensor.load_backend", "multitensor.has_float64", "multitensor.needs_tensors"),
    *("multitensor.in_order_of_memory", "multitensor.bindings"),
    *("select.place_in_turn", "select.half_bits", "select.round_keys", "chunks.add_in_turn"),
}
BLOCK, N, RANKS, SEED = 32, 71, 3, (7 << 32) + 5
BLOCKS = -(-N // BLOCK)
# Two words of scale and whole bytes; one word, half bytes and stochastic rounding.
RULES = {"minmax_8": minmax(8), "absmax_4_7": absmax(4, 7)}
RECORD = chunks.Record(5, 32)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

Tensors = list[torch.Tensor]


class Here:
    """Makes inputs on a device."""

    def __init__(self, device: torch.device, rule: BlockQuantizer) -> None:
        self.device, self.rule = device, rule

    def vector(self, seed: int = 0, n: int = N, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
        return torch.from_numpy(make("heavy", n, 1.0, seed)).to(dtype).to(self.device)

    def rows(self, seed: int = 0) -> torch.Tensor:
        return torch.stack([self.vector(seed + rank) for rank in range(RANKS)])

    def full(self, n: int, value: float, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
        return torch.full((n,), value, dtype=dtype, device=self.device)

    def payload(self, n: int = N) -> torch.Tensor:
        """Memory for a payload, with something in it."""
        return self.full(form_of(self.rule, n, BLOCK).size, 77, torch.uint8)

    def payloads(self, n: int = N) -> torch.Tensor:
        """Payloads of all ranks."""

        def make(here: Here) -> Tensors:
            found = [here.payload(n) for _ in range(RANKS)]
            for rank, payload in enumerate(found):
                blockwise.encode(self.rule, here.vector(rank, n), payload, block=BLOCK, seed=SEED + rank)
            return found

        return torch.stack(self.given(make))

    def given(self, make: Callable[[Here], Tensors]) -> Tensors:
        """Inputs that NumPy makes, which takes no time."""
        with knobs.override(knobs.BACKEND, "numpy"):
            return [tensor.to(self.device) for tensor in make(Here(torch.device("cpu"), self.rule))]

    def counts(self) -> torch.Tensor:
        """A full block, one with few elements of its own, and one with none."""
        return torch.tensor([BLOCK, 5, 0], dtype=torch.int32, device=self.device)


def encode(here: Here) -> Tensors:
    plain, counted, given = here.payload(), here.payload(), here.payloads()[1]
    blockwise.encode(here.rule, here.vector(dtype=BFLOAT16), plain, block=BLOCK, seed=SEED)
    blockwise.encode(here.rule, here.vector(), counted, block=BLOCK, seed=None, counts=here.counts())
    blockwise.encode(here.rule, here.vector(), given, block=BLOCK, seed=SEED, given=True)
    return [plain, counted, given]


def encode_pieces(here: Here) -> Tensors:
    pieces = [here.vector(size, size) for size in (BLOCK + 1, 3)]
    out = here.payload(3 * BLOCK)
    blockwise.encode_pieces(here.rule, pieces, out, block=BLOCK, seed=SEED)
    return [out]


def feedback(here: Here) -> Tensors:
    residual, out = here.vector(1), here.payload()
    blockwise.feedback(here.rule, here.vector(), residual, out, block=BLOCK, factor=0.5, seed=SEED)
    return [out, residual]


def decode(here: Here) -> Tensors:
    outs = [here.full(N, 3.0), here.full(N, 3.0, BFLOAT16)]
    for out in outs:
        blockwise.decode(here.rule, here.payloads()[0], out, block=BLOCK)
    return outs


def decode_sum(here: Here) -> Tensors:
    outs = [here.full(N, 3.0), here.full(N, 3.0)]
    blockwise.decode_sum(here.rule, here.payloads(), outs[0], scale=1 / 3, block=BLOCK)
    blockwise.decode_sum(here.rule, here.payloads(), outs[1], scale=1.0, block=BLOCK, weights=(0.5, 0.25, -1.0))
    return outs


def reduce(here: Here) -> Tensors:
    outs = [here.payload(), here.payload()]
    blockwise.reduce(here.rule, here.payloads(), outs[0], n=N, scale=1 / 3, block=BLOCK, seed=SEED)
    blockwise.reduce(
        here.rule, here.payloads(), outs[1], n=N, scale=1 / 3, block=BLOCK, seed=None, counts=here.counts()
    )
    return outs


ROWS = blockwise.Rows(total=N, span=BLOCK, width=BLOCK - 3, count=BLOCKS)


def encode_rows(here: Here) -> Tensors:
    out = torch.stack([here.payload(ROWS.width) for _ in range(ROWS.count)])
    seeds = [(row + 1) * SEED for row in range(ROWS.count)]
    blockwise.encode_rows(here.rule, here.vector(), out, ROWS, block=BLOCK, seeds=seeds)
    return [out]


def encode_rows_of_pieces(here: Here) -> Tensors:
    """Rows behind which there are more bytes; each must have the bytes of `encode_pieces`."""
    pieces = [[here.vector(10 * row + size, size) for size in (BLOCK + 1, 3)] for row in range(RANKS)]
    seeds = [(row + 1) * SEED for row in range(RANKS)]
    expected = torch.stack([here.payload(3 * BLOCK) for _ in range(RANKS)])
    for each, out, seed in zip(pieces, expected, seeds, strict=True):
        blockwise.encode_pieces(here.rule, each, out, block=BLOCK, seed=seed)
    size = expected.shape[1]
    message = here.full(RANKS * (size + 16), 77, torch.uint8).view(RANKS, -1)
    blockwise.encode_rows_of_pieces(here.rule, pieces, message[:, :size], block=BLOCK, seeds=seeds)
    assert torch.equal(message[:, :size], expected)
    return [message]


def decode_rows(here: Here) -> Tensors:
    out = here.full(N, 3.0)
    blockwise.decode_rows(here.rule, here.payloads(ROWS.width), out, ROWS, block=BLOCK)
    return [out]


def encode_rule(here: Here) -> Tensors:
    fed, outs = [here.vector(), here.vector(1)], [here.payload() for _ in range(3)]
    blockwise.encode_rule(here.rule, FEEDBACK, fed, (0.5,), outs[0], block=BLOCK, seed=SEED)
    choco = [here.vector(), here.vector(1)]
    blockwise.encode_rule(here.rule, gossip.CHOCO, choco, (0.5,), outs[1], block=BLOCK, seed=None, counts=here.counts())
    dcd, weights = [here.vector(), here.vector(1)], (0.5, 0.25, 0.25)
    beside = {"replicas": here.rows(2), "weights": weights}
    blockwise.encode_rule(here.rule, gossip.DCD, dcd, (), outs[2], block=BLOCK, seed=SEED, **beside)
    return [*outs, *fed, *choco, *dcd]


def decode_apply(here: Here) -> Tensors:
    adam = [here.vector(dtype=BFLOAT16), here.vector(1), here.vector(2).abs()]
    blockwise.decode_apply(here.rule, here.payloads(), ADAM, adam, [0.5] * scalars(ADAM), block=BLOCK, scale=1 / 3)
    total, replicas = here.vector(), here.rows()
    beside = {"weights": (0.5, 0.25, 0.25), "replicas": replicas, "counts": here.counts()}
    blockwise.decode_apply(here.rule, here.payloads(), gossip.ADDED, [total], (), block=BLOCK, **beside)
    start, weights = here.vector(3), (1 / 3,) * RANKS
    blockwise.decode_apply(
        here.rule, here.payloads(), outer.REBASED, [start], (), block=BLOCK, each=(2,), weights=weights
    )
    return [*adam, total, replicas, start]


def decode_add(here: Here) -> Tensors:
    replicas = here.rows()
    blockwise.decode_add(here.rule, here.payloads(), replicas, block=BLOCK)
    return [replicas]


def apply(here: Here) -> Tensors:
    arrays = [here.vector(dtype=BFLOAT16), here.vector(1), here.vector(2), here.vector(3).abs()]
    elementwise.apply(ADAM, arrays, [0.5] * scalars(ADAM))
    return arrays


def scalars(rule: ElementwiseRule) -> int:
    return len(inspect.signature(rule.function).parameters) - rule.arrays


def launched(
    here: Here, rule: ElementwiseRule, dtypes: Sequence[torch.dtype], extras: tuple[str, ...] = (), random: bool = False
) -> Tensors:
    """The columns of several tensors after an update, and the sums, if there are any, as float32."""
    variant = Variant(rule, tuple(dtypes), scalars(rule), extras, random)
    sizes = (N, 1, 2)
    # Squares are not negative.
    columns = [[here.vector(i, size, dtype).abs() for size in sizes] for i, dtype in enumerate(dtypes)]
    rows = np.full((len(sizes), variant.width), 0.5, np.float32)
    rows[:, FACTOR] = 1.0
    rows[:, multitensor.SKIP] = 0.0
    keys = np.arange(2 * len(sizes), dtype=np.uint32).reshape(-1, 2) if random else None
    sums = multitensor.launch(variant, Table(columns), rows, keys)
    # Backends add up float64 terms in orders of their own.
    return [tensor for column in columns for tensor in column] + ([] if sums is None else [sums.float()])


def launch(here: Here) -> Tensors:
    mixed = (BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)
    return [
        *launched(here, ADAM, mixed, random=True),
        *launched(here, ADAM, (*mixed, FLOAT32, FLOAT32), (MASTER, AVERAGE)),
        *launched(here, ADAM, (*mixed, BFLOAT16), (COMPENSATION,)),
        *launched(here, LAMB_MOMENTS, (FLOAT32,) * LAMB_MOMENTS.arrays),
    ]


def collect(here: Here) -> Tensors:
    """The ends, the offsets and the values of what `select.Collected` finds of a sum, and what is left of it."""
    residual = here.vector(1)
    found = select.Collected(here.vector(), int(np.float32(1.0).view(np.int32)), residual)
    # More than there are, so that what is behind must not be touched.
    offsets, values = here.full(N, 7, torch.int16), here.full(N, 9.0)
    found.write(offsets, values)
    return [found.ends.to(torch.int32), offsets, values, residual]


def entries(here: Here) -> Tensors:
    """The ends, the offsets and the values of some entries."""
    return here.given(collect)[:3]


def place(here: Here) -> Tensors:
    out = here.full(N, 0.0)
    assert select.place(*entries(here), out) == 0
    return [out]


def place_sum(here: Here) -> Tensors:
    out = here.full(N, 5.0)
    rows = (torch.stack([part, part]) for part in entries(here))
    assert select.place_sum(*rows, out, 1 / 3) == 0
    return [out]


def permuted(here: Here) -> Tensors:
    # Little below a power of four, where places are found at the first attempts.
    return [select.permuted(61, 61, SEED, here.device)]


def encode_chunks(here: Here) -> Tensors:
    """Records of a vector, of its sum with a residual, and of its difference from another one; and the residuals."""
    found = here.full(RANKS * RECORD.chunks(N) * RECORD.words, 77, torch.int32).view(RANKS, -1, RECORD.words)
    residuals = [here.vector(1), here.vector(1)]
    chunks.encode(here.vector(dtype=BFLOAT16), found[0], RECORD)
    chunks.encode(here.vector(), found[1], RECORD, residual=residuals[0], beta=0.5)
    chunks.encode(here.vector(), found[2], RECORD, residual=residuals[1], beta=0.5, start=here.vector(2))
    return [found, *residuals]


def add_chunks(here: Here) -> Tensors:
    records, *_ = here.given(encode_chunks)
    outs = [here.full(N, 5.0), here.full(N, 5.0)]
    assert chunks.decode_sum(records, outs[0], RECORD, 1 / 3)
    assert chunks.decode_sum(records, outs[1], RECORD, contributors=True)
    return outs


OF_BLOCKS: dict[str, Callable[[Here], Tensors]] = {
    f"blockwise.{call.__name__}": call
    for call in (
        *(encode, encode_pieces, feedback, decode, decode_sum, reduce, encode_rows, decode_rows),
        encode_rows_of_pieces,
        *(encode_rule, decode_apply, decode_add),
    )
}
OTHERS: dict[str, Callable[[Here], Tensors]] = {
    "elementwise.apply": apply,
    "multitensor.launch": launch,
    "select.Collected": collect,
    "select.place": place,
    "select.place_sum": place_sum,
    "select.permuted": permuted,
    "chunks.encode": encode_chunks,
    "chunks.decode_sum": add_chunks,
}


@grid(call=OF_BLOCKS, rule=RULES)
def test_functions_on_blocks(target: Target, call: Callable[[Here], Tensors], rule: BlockQuantizer) -> None:
    on_both(target, lambda device: call(Here(device, rule)))


@grid(call=OTHERS)
def test_other_functions(target: Target, call: Callable[[Here], Tensors]) -> None:
    on_both(target, lambda device: call(Here(device, RULES["minmax_8"])))


def test_each_function_is_called(target: Target) -> None:
    found = {
        f"{launcher.__name__.rpartition('.')[2]}.{name}"
        for launcher in LAUNCHERS
        for name, function in vars(launcher).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and function.__module__.startswith(launcher.__name__)
    }
    assert found | {"select.Collected"} == HELPERS | OF_BLOCKS.keys() | OTHERS.keys()
