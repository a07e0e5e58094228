"""What one message does to a vector, and what a mean of payloads is; see `algorithms`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.oracles import block_quantizers, powersgd, sparse
from tests.oracles.block_rules import FLOAT8, Spec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
BOOL = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Code:
    """What a payload makes of a vector, and how payloads travel.

    Attributes:
        block: Elements that share scales.
        omega: Relative variance of an unbiased code, None of a biased one.
        travels: In two passes over owners, to everyone, or as a sum.
        shared: Whether ranks share seeds.
    """

    block: int = 1
    omega: float | None = None
    travels: Literal["twice", "gathered", "summed"] = "twice"
    shared: bool = False

    @property
    def feeds_back(self) -> bool:
        """Whether residuals are kept by default."""
        return self.omega is None

    def through(self, x: F32, seed: int, own: BOOL) -> F32:
        """Returns the decoded payload of a vector, of which the elements `own` are tensors', and others fill blocks up."""
        raise NotImplementedError


@dataclass(frozen=True)
class Block(Code):
    """A block quantizer."""

    spec: Spec = field(default=Spec("minmax", 256))

    def through(self, x: F32, seed: int, own: BOOL) -> F32:
        counts = np.pad(own, (0, -own.size % self.block)).reshape(-1, self.block).sum(axis=1)
        payload = block_quantizers.encode(self.spec, x, seed, counts=counts)
        return np.where(own, block_quantizers.decode(self.spec, payload, x.size), np.float32(0))


def block(spec: Spec) -> Block:
    """Returns the code of a quantizer, with the variance that docs/codecs.md declares."""
    return Block(spec.block, variance(spec), "twice", False, spec)


def variance(spec: Spec) -> float | None:
    """Returns the bound of the relative variance of a quantizer, None if it is biased."""
    b, top = spec.block, spec.top
    if spec.kind == "natural":
        return 1 / 8
    if not spec.stochastic:
        return None
    if spec.kind == "minmax":
        return (b - 2) / (2 * top**2)
    if spec.kind == "fp8":
        form = FLOAT8[spec.format]
        spacing = 2.0 ** (1 - form.bias - form.mantissa)
        return 4.0 ** -(form.mantissa + 1) + (b - 1) * (spacing / (2 * form.largest)) ** 2
    if spec.norm == "l2":
        return min(b / (4 * top**2), math.sqrt(b) / top)
    return min((b - 1) / (4 * top**2), math.sqrt(b - 1) / (2 * top))


@dataclass(frozen=True)
class Largest(Code):
    """The elements of largest magnitude."""

    travels: Literal["twice", "gathered", "summed"] = "gathered"
    ratio: float = 0.01

    def chosen(self, x: F32) -> BOOL:
        """Returns where elements are sent."""
        mask = np.zeros(x.size, np.bool_)
        mask[sparse.topk(x, sparse.kept(self.ratio, x.size))] = True
        return mask

    def through(self, x: F32, seed: int, own: BOOL) -> F32:
        return np.where(self.chosen(x), x, np.float32(0))


@dataclass(frozen=True)
class Drawn(Code):
    """Elements that the seed chooses, on all ranks the same."""

    travels: Literal["twice", "gathered", "summed"] = "summed"
    shared: bool = True
    ratio: float = 0.01

    def through(self, x: F32, seed: int, own: BOOL) -> F32:
        return sparse.dense(x, np.array(sparse.permutation(x.size, sparse.kept(self.ratio, x.size), seed)))


@dataclass(frozen=True)
class Whole(Code):
    """All elements as they are."""

    travels: Literal["twice", "gathered", "summed"] = "summed"

    @property
    def feeds_back(self) -> bool:
        return False

    def through(self, x: F32, seed: int, own: BOOL) -> F32:
        return x


@dataclass(frozen=True)
class Ternary(Code):
    """Three levels of scales that all ranks share."""

    travels: Literal["twice", "gathered", "summed"] = "summed"
    omega: float | None = 1.0

    def averaged(self, inputs: Sequence[F32], seeds: Sequence[int]) -> F32:
        """Returns the mean of all ranks' decoded payloads."""
        spec = Spec("absmax", self.block, levels=1, bits=8, stochastic=True, shared=True)
        rows = [np.pad(x, (0, -x.size % self.block)).reshape(-1, self.block) for x in inputs]
        scales = np.abs(np.stack(rows)).max(axis=(0, 2))
        payloads = [block_quantizers.encode(spec, x, s, scales) for x, s in zip(inputs, seeds, strict=True)]
        return plain([block_quantizers.decode(spec, p, inputs[0].size) for p in payloads])


@dataclass
class Memory:
    """What payloads of a vector lacked.

    Attributes:
        worker: Of each rank's own.
        owner: Of the means, put together from all owners.
    """

    worker: list[F32]
    owner: F32


def fed(code: Code, x: F32, residual: F32 | None, seed: int, own: BOOL) -> F32:
    """Returns what is sent of a vector and its residual, which is replaced by what that lacks."""
    if residual is None:
        return code.through(x, seed, own)
    a = x + residual
    sent = code.through(a * np.float32(1 if code.omega is None else 1 / (1 + code.omega)), seed, own)
    residual[:] = a - sent
    return sent


def chunks(n: int, owners: int, width: int) -> list[slice]:
    """Cuts a vector into one chunk an owner, at multiples of blocks and of 32 elements."""
    unit = -(-32 // width) * width
    chunk = -(-n // (unit * owners)) * unit
    return [slice(min(o * chunk, n), min((o + 1) * chunk, n)) for o in range(owners)]


def total(vectors: Sequence[F32]) -> F32:
    """Returns the sum in the order of the ranks."""
    out = np.zeros_like(vectors[0])
    for vector in vectors:
        out = out + vector
    return out


def average(
    code: Code, inputs: Sequence[F32], memory: Memory, feedback: bool, owner: bool, seed: int, own: BOOL
) -> F32:
    """Returns the compressed mean, and updates the memory."""
    ranks, n = len(inputs), inputs[0].size
    out = np.zeros(n, np.float32)
    for i, part in enumerate(chunks(n, ranks if code.travels == "twice" else 1, code.block)):
        if part.start == part.stop:
            continue
        first = [powersgd.fold(seed, 0, i) if code.shared else powersgd.fold(seed, 0, r, i) for r in range(ranks)]
        if isinstance(code, Ternary):
            return code.averaged(inputs, first)
        residuals = [e[part] if feedback else None for e in memory.worker]
        sent = [fed(code, x[part], e, s, own[part]) for x, e, s in zip(inputs, residuals, first, strict=True)]
        mean = total(sent) * np.float32(1 / ranks)
        if code.travels == "twice":
            mean = fed(code, mean, memory.owner[part] if owner else None, powersgd.fold(seed, 1, i), own[part])
        out[part] = mean
    return out


def plain(inputs: Sequence[F32]) -> F32:
    """Returns the mean of all ranks' vectors as it is."""
    mean: F64 = np.sum([x.astype(np.float64) for x in inputs], axis=0) / len(inputs)
    return mean.astype(np.float32)
