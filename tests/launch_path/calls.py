"""Calls of the public functions that launch kernels, which together launch every kernel of every launcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagua_kernels import optim
from bagua_kernels.compression import BlockCodec, ChunkedTopK
from bagua_kernels.launchers import arguments, blockwise, chunks, elementwise, multitensor, select
from bagua_kernels.launchers.blockwise import Rows
from bagua_kernels.launchers.chunks import Record
from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, FACTOR, MASTER, Table, Variant
from bagua_kernels.rules.gossip import ADDED, CHOCO, DCD, DCD_TOTAL
from bagua_kernels.rules.optimizers import ADAM, LAMB_MOMENTS, ElementwiseRule
from bench.gpu.fake_driver import untouched

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Vectors from here on are in memory that nothing may touch.
LONG = 1 << 31
# The address of an odd vector is this many elements behind a multiple of 16 bytes.
ODD = 1
# Few entries are enough for kernels whose grid depends on the vector.
ENTRIES = 100


@dataclass(frozen=True)
class Shape:
    """The arguments that a call is made with.

    Attributes:
        dtype: of the vectors that can have several dtypes.
        n: elements of a vector.
        odd: elements by which vectors lie behind a multiple of 16 bytes.
        ranks: the number of payloads.
    """

    dtype: torch.dtype = FLOAT32
    n: int = 1009
    odd: int = 0
    ranks: int = 3

    def vector(self, dtype: torch.dtype | None = None, n: int | None = None) -> torch.Tensor:
        """A vector at an address that is odd if the shape is."""
        return untouched((self.n if n is None else n) + self.odd, dtype or self.dtype)[self.odd :]

    def payloads(self, codec: BlockCodec | ChunkedTopK) -> torch.Tensor:
        """Payloads of all ranks, which always begin at multiples of 16 bytes."""
        size = codec.payload_size(self.n)
        return untouched(self.ranks * size, torch.uint8).view(self.ranks, size)

    def counts(self, codec: BlockCodec) -> torch.Tensor:
        """The number of a block's own elements, for each block."""
        return self.vector(torch.int32, -(-self.n // codec.block))

    def rows(self) -> torch.Tensor:
        """A float32 vector for each rank."""
        return self.vector(FLOAT32, self.ranks * self.n).view(self.ranks, self.n)

    def weights(self) -> torch.Tensor:
        """A weight for each rank."""
        return self.vector(FLOAT32, self.ranks)


def scalars(rule: ElementwiseRule) -> int:
    return len(inspect.signature(rule.function).parameters) - rule.arrays


# Calls of a block codec.


def encode(codec: BlockCodec, shape: Shape) -> None:
    codec.encode(shape.vector(), out=shape.payloads(codec)[0], seed=5)


def encode_counted(codec: BlockCodec, shape: Shape) -> None:
    codec.encode(shape.vector(), out=shape.payloads(codec)[0], seed=5, counts=shape.counts(codec))


def chunks_of(codec: BlockCodec, shape: Shape) -> tuple[Rows, torch.Tensor]:
    """Chunks of a vector, one for each rank, and a message for their payloads."""
    span = max(1, -(-shape.n // (shape.ranks * codec.block))) * codec.block
    rows = Rows(shape.n, span, span, shape.ranks)
    size = codec.payload_size(span)
    return rows, untouched(shape.ranks * size, torch.uint8).view(shape.ranks, size)


def encode_rows(codec: BlockCodec, shape: Shape) -> None:
    rows, message = chunks_of(codec, shape)
    codec.encode_rows(shape.vector(), message, rows, seeds=[5] * rows.count)


def encode_rows_counted(codec: BlockCodec, shape: Shape) -> None:
    rows, message = chunks_of(codec, shape)
    codec.encode_rows(shape.vector(), message, rows, seeds=[5] * rows.count, counts=shape.counts(codec))


def decode_rows(codec: BlockCodec, shape: Shape) -> None:
    rows, message = chunks_of(codec, shape)
    codec.decode_rows(message, shape.vector(), rows)


def encode_given(codec: BlockCodec, shape: Shape) -> None:
    seed = 5 if codec.stochastic else None
    blockwise.encode(codec.rule, shape.vector(), shape.payloads(codec)[0], block=codec.block, seed=seed, given=True)


def encode_pieces(codec: BlockCodec, shape: Shape) -> None:
    pieces = [shape.vector(), shape.vector(n=1), shape.vector(n=2 * codec.block)]
    n = sum(arguments.padded(piece.numel(), codec.block) for piece in pieces)
    codec.encode_pieces(pieces, out=untouched(codec.payload_size(n), torch.uint8), seed=5)


def encode_feedback(codec: BlockCodec, shape: Shape) -> None:
    codec.encode_feedback(shape.vector(), shape.vector(FLOAT32), out=shape.payloads(codec)[0], factor=0.5, seed=5)


def encode_choco(codec: BlockCodec, shape: Shape) -> None:
    arrays = [shape.vector(), shape.vector(FLOAT32)]
    codec.encode_rule(CHOCO, arrays, [1.0], out=shape.payloads(codec)[0], seed=5, counts=shape.counts(codec))


def encode_dcd(codec: BlockCodec, shape: Shape) -> None:
    arrays = [shape.vector(), shape.vector(FLOAT32), shape.vector(FLOAT32)]
    codec.encode_rule(DCD_TOTAL, arrays, out=shape.payloads(codec)[0], seed=5)


def encode_replicas(codec: BlockCodec, shape: Shape) -> None:
    arrays = [shape.vector(), shape.vector(FLOAT32)]
    options: dict[str, Any] = {"replicas": shape.rows(), "weights": shape.weights()}
    codec.encode_rule(DCD, arrays, out=shape.payloads(codec)[0], seed=5, **options)


def decode(codec: BlockCodec, shape: Shape) -> None:
    codec.decode(shape.payloads(codec)[0], shape.vector())


def decode_sum(codec: BlockCodec, shape: Shape) -> None:
    codec.decode_sum(shape.payloads(codec), shape.vector(), scale=0.5)


def decode_sum_weighted(codec: BlockCodec, shape: Shape) -> None:
    codec.decode_sum(shape.payloads(codec), shape.vector(), weights=shape.weights())


def decode_mean(codec: BlockCodec, shape: Shape) -> None:
    codec.decode_sum(shape.payloads(codec), shape.vector(), weights=[1 / shape.ranks] * shape.ranks)


def decode_apply(codec: BlockCodec, shape: Shape) -> None:
    arrays = [shape.vector(), *(shape.vector(FLOAT32) for _ in range(ADAM.arrays - 2))]
    codec.decode_apply(shape.payloads(codec), ADAM, arrays, [0.5] * scalars(ADAM), scale=1 / shape.ranks)


def decode_gossip(codec: BlockCodec, shape: Shape) -> None:
    options: dict[str, Any] = {"weights": shape.weights(), "replicas": shape.rows(), "counts": shape.counts(codec)}
    codec.decode_apply(shape.payloads(codec), ADDED, [shape.vector(FLOAT32)], **options)


def decode_add(codec: BlockCodec, shape: Shape) -> None:
    codec.decode_add(shape.payloads(codec), shape.rows())


def reduce(codec: BlockCodec, shape: Shape) -> None:
    codec.reduce(shape.payloads(codec), shape.n, out=shape.payloads(codec)[0], scale=0.5, seed=5)


def reduce_counted(codec: BlockCodec, shape: Shape) -> None:
    options: dict[str, Any] = {"counts": shape.counts(codec), "seed": 5}
    codec.reduce(shape.payloads(codec), shape.n, out=shape.payloads(codec)[0], **options)


@dataclass(frozen=True)
class Call:
    """A call of a public function.

    Attributes:
        run: makes the call; takes a codec before the shape if `kernels` is one of a block codec.
        kernels: the names of the kernels that it launches.
        typed: False if the kernel's types do not depend on the shape's dtype.
    """

    run: Callable[..., None]
    kernels: tuple[str, ...]
    typed: bool = True

    @property
    def __name__(self) -> str:
        return self.run.__name__


# What codecs are used for in one direction only has a kernel that is compiled for float32.
BLOCKWISE = (
    *(Call(run, ("encode_kernel",)) for run in (encode, encode_counted, encode_given)),
    *(Call(run, ("encode_rows_kernel",)) for run in (encode_rows, encode_rows_counted)),
    Call(decode_rows, ("decode_rows_kernel",)),
    Call(encode_pieces, ("encode_pieces_kernel",)),
    *(Call(run, ("message_kernel",)) for run in (encode_feedback, encode_choco, encode_dcd, encode_replicas)),
    Call(decode, ("decode_kernel",)),
    *(Call(run, ("decode_sum_kernel",)) for run in (decode_sum, decode_sum_weighted, decode_mean)),
    Call(decode_apply, ("apply_kernel",)),
    *(Call(run, ("apply_kernel",), typed=False) for run in (decode_gossip, decode_add)),
    *(Call(run, ("reduce_kernel",), typed=False) for run in (reduce, reduce_counted)),
)


# Calls of the other launchers.


def apply_adam(shape: Shape) -> None:
    arrays = [shape.vector(), *(shape.vector(FLOAT32) for _ in range(ADAM.arrays - 1))]
    elementwise.apply(ADAM, arrays, [0.5] * scalars(ADAM))


def select_write(shape: Shape) -> None:
    found = select.Collected(shape.vector(), 1 << 29)
    found.write(shape.vector(torch.int16, ENTRIES), shape.vector(FLOAT32, ENTRIES))


def chunk_ends(shape: Shape) -> torch.Tensor:
    return shape.vector(torch.int32, -(-shape.n // select.CHUNK))


def select_place(shape: Shape) -> None:
    select.place(chunk_ends(shape), shape.vector(torch.int16, ENTRIES), shape.vector(n=ENTRIES), shape.vector())


def select_add(shape: Shape) -> None:
    flags = torch.zeros(2, dtype=torch.int32)
    parts = (chunk_ends(shape), shape.vector(torch.int16, ENTRIES), shape.vector(FLOAT32, ENTRIES))
    # The sum over ranks begins with zeros, which would touch the memory of a long vector.
    select.OP.backend(flags.device).place(*parts, shape.vector(FLOAT32), flags, add=True)


def select_permuted(shape: Shape) -> None:
    select.permuted(shape.n, min(shape.n, ENTRIES), 5, torch.device("cpu"))


RECORD = Record(64, 4096)


def chunks_encode(shape: Shape) -> None:
    codec = ChunkedTopK(RECORD.k, RECORD.chunk)
    codec.encode(shape.vector(), out=shape.payloads(codec)[0])


def chunks_encode_outer(shape: Shape) -> None:
    codec = ChunkedTopK(RECORD.k, RECORD.chunk)
    codec.encode_outer(shape.vector(FLOAT32), shape.vector(), shape.vector(FLOAT32), 0.9, out=shape.payloads(codec)[0])


def chunks_add(shape: Shape) -> None:
    record = Record(RECORD.k, RECORD.chunk)
    rows = untouched(record.size(shape.n), torch.uint8)
    flags = torch.zeros(1, dtype=torch.int32)
    senders = shape.vector(torch.int32)
    # As for `select_add`.
    chunks.OP.backend(flags.device).add(record.of(rows, shape.n), shape.vector(FLOAT32), record, senders, flags)


def over_many(shape: Shape, rule: ElementwiseRule, extras: tuple[str, ...] = (), stochastic: bool = False) -> None:
    beside = {MASTER: FLOAT32, COMPENSATION: shape.dtype, AVERAGE: FLOAT32}
    dtypes = (shape.dtype, shape.dtype, *[FLOAT32] * (rule.arrays - 2), *(beside[extra] for extra in extras))
    variant = Variant(rule, dtypes, scalars(rule), extras, stochastic)
    sizes = (shape.n, 1, 5000)
    table = Table([[shape.vector(dtype, size) for size in sizes] for dtype in dtypes])
    rows = np.zeros((len(sizes), variant.width), np.float32)
    rows[:, FACTOR] = 1.0
    keys = np.zeros((len(sizes), 2), np.uint32) if stochastic else None
    multitensor.launch(variant, table, rows, keys)


def update_many(shape: Shape) -> None:
    over_many(shape, ADAM)


def update_many_and_sum(shape: Shape) -> None:
    over_many(shape, LAMB_MOMENTS)


def update_many_with_master(shape: Shape) -> None:
    over_many(shape, ADAM, (MASTER, AVERAGE))


def update_many_with_compensation(shape: Shape) -> None:
    over_many(shape, ADAM, (COMPENSATION,))


def update_many_stochastic(shape: Shape) -> None:
    over_many(shape, ADAM, stochastic=shape.dtype == BFLOAT16)


OTHERS = (
    Call(apply_adam, ("over_range",)),
    Call(select_write, ("count_kernel", "write_kernel")),
    *(Call(run, ("place_kernel",), typed=False) for run in (select_place, select_add)),
    Call(select_permuted, ("permute_kernel",), typed=False),
    *(Call(run, ("encode_kernel",)) for run in (chunks_encode, chunks_encode_outer)),
    Call(chunks_add, ("add_kernel",), typed=False),
    Call(update_many_and_sum, ("over_pieces", "sum_pieces")),
    *(
        Call(run, ("over_pieces",))
        for run in (
            *(update_many, update_many_with_master),
            *(update_many_with_compensation, update_many_stochastic),
        )
    ),
)


# Whole optimizers, by name: how each is made from parameters.
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: optim.AdamW(parameters),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "LAMB": lambda parameters: optim.LAMB(parameters, lr=0.1),
    "LARS": lambda parameters: optim.LARS(parameters, lr=0.1),
    "Lion": lambda parameters: optim.Lion(parameters),
    "RMSprop": lambda parameters: optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Adagrad": lambda parameters: optim.Adagrad(parameters),
    "Adadelta": lambda parameters: optim.Adadelta(parameters),
    "Adamax": lambda parameters: optim.Adamax(parameters),
    "NAdam": lambda parameters: optim.NAdam(parameters),
    "RAdam": lambda parameters: optim.RAdam(parameters),
    "Rprop": lambda parameters: optim.Rprop(parameters),
    "ASGD": lambda parameters: optim.ASGD(parameters),
}
