"""The centralized algorithms in NumPy, for all ranks at once.

Written from the papers and from the steps in the algorithms' docstrings. An algorithm is told all ranks' gradients of a step
and returns the mean that all of them receive. Codecs are the bit-exact oracles of this package, with one float32 operation
for each of docs/compressed-collectives.md; PowerSGD is in float64.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

import numpy as np
import numpy.typing as npt

from tests.oracles import block_quantizers, powersgd, sparse
from tests.oracles.block_quantizers import FLOAT8, Spec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
BOOL = npt.NDArray[np.bool_]
Named = dict[str, F32]
Shapes = Mapping[str, tuple[int, ...]]

# ------------------------------------------------------------------------------------------------------------- codes


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


# ------------------------------------------------------------------------------------------------------- collectives


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


# ----------------------------------------------------------------------------------------------------------- buckets


class Bucket:
    """Tensors one behind the other, each from a multiple of so many elements on.

    Gaps are zero; no payload says anything of them, and nothing is remembered.

    Args:
        shapes: Of the tensors, in their order.
        align: Elements to whose multiples tensors are aligned.
        ranks: How many ranks.
    """

    def __init__(self, shapes: Shapes, align: int, ranks: int) -> None:
        self.shapes = shapes
        self.slices: dict[str, slice] = {}
        end = 0
        for name, shape in shapes.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end += -(-math.prod(shape) // align) * align
        self.n = end
        self.own = np.zeros(end, np.bool_)
        for part in self.slices.values():
            self.own[part] = True
        self.memory = Memory([np.zeros(end, np.float32) for _ in range(ranks)], np.zeros(end, np.float32))
        self.velocity = [np.zeros(end, np.float32) for _ in range(ranks)]

    def flat(self, named: Named) -> F32:
        """Lays out tensors; those that lack are zero."""
        out = np.zeros(self.n, np.float32)
        for name, part in self.slices.items():
            if name in named:
                out[part] = named[name].reshape(-1)
        return out

    def named(self, flat: F32) -> Named:
        """Takes the vector apart."""
        return {name: flat[part].reshape(self.shapes[name]) for name, part in self.slices.items()}


Schedule = Mapping[int, Code | None]


def at(schedule: Schedule, step: int) -> Code | None:
    """Returns the code of a step."""
    return schedule[max(start for start in schedule if start <= step)]


# -------------------------------------------------------------------------------------------------------- algorithms


class Algorithm:
    """An algorithm's ranks.

    Args:
        shapes: Of the parameters, in the order of registration.
        ranks: How many ranks.
    """

    def __init__(self, shapes: Shapes, ranks: int) -> None:
        self.shapes = shapes
        self.ranks = ranks
        self.steps = 0

    def step(self, gradients: Sequence[Named]) -> Named:
        """Returns the gradients that all ranks receive."""
        mean = self.exchanged(gradients) if self.ranks > 1 else gradients[0]
        self.steps += 1
        return mean

    def exchanged(self, gradients: Sequence[Named]) -> Named:
        """Does it, with more than one rank."""
        return {name: plain([g[name] for g in gradients]) for name in self.shapes}

    def remembered(self, rank: int) -> dict[str, Named]:
        """Returns what a rank knows of earlier steps, by kind and name."""
        return {}


class Compressed(Algorithm):
    """Gradients travel as payloads.

    Args:
        shapes: As for `Algorithm`.
        ranks: As for `Algorithm`.
        code: The code, or codes by the step from which on they are used.
        feedback: Whether ranks keep residuals; None leaves it to the code.
        owner_feedback: Whether owners do; None as `feedback`.
        warmup: Steps without compression at the beginning.
        groups: Other codes of parameters that match a pattern.
        exact: Names of parameters that are not compressed.
        each: Whether each parameter has a bucket of its own, instead of those of equal codes together.
        seed: Of random numbers.
    """

    def __init__(
        self,
        shapes: Shapes,
        ranks: int,
        code: Code | Schedule | None,
        *,
        feedback: bool | None = None,
        owner_feedback: bool | None = None,
        warmup: int = 0,
        groups: Mapping[str, Code | Schedule | None] | None = None,
        exact: Sequence[str] = (),
        each: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(shapes, ranks)
        self.feedback, self.owner_feedback = feedback, owner_feedback
        self.warmup, self.seed, self.exact = warmup, seed, exact
        given = [(pattern, _schedule(c)) for pattern, c in (groups or {}).items()] + [("*", _schedule(code))]
        every = [c for _, schedule in given for c in schedule.values() if c is not None]
        align = max((c.block for c in every), default=1)
        # Gradients come in the reverse order of registration; a bucket is complete with its last.
        members: dict[Hashable, list[str]] = {}
        self.schedules: dict[Hashable, Schedule] = {}
        for name in reversed(list(shapes)):
            row = next(i for i, (pattern, _) in enumerate(given) if fnmatch(name, pattern))
            key: Hashable = (row, name) if each else row
            members.setdefault(key, []).append(name)
            self.schedules[key] = given[row][1]
        order = list(reversed(list(shapes)))
        self.keys = sorted(members, key=lambda key: order.index(members[key][-1]))
        self.buckets = [
            Bucket({name: shapes[name] for name in members[key] if name not in exact}, align, ranks)
            for key in self.keys
        ]

    def code(self, index: int) -> Code | None:
        """Returns what encodes a bucket in this step."""
        return None if self.steps < self.warmup else at(self.schedules[self.keys[index]], self.steps)

    def exchanged(self, gradients: Sequence[Named]) -> Named:
        out = {name: plain([g[name] for g in gradients]) for name in self.exact}
        for index, bucket in enumerate(self.buckets):
            out |= bucket.named(self.exchange(index, bucket, [bucket.flat(g) for g in gradients]))
        return out

    def exchange(self, index: int, bucket: Bucket, vectors: list[F32]) -> F32:
        """Returns the mean of a bucket."""
        code = self.code(index)
        sends = code is not None and bucket.n > 0
        feedback = owner = False
        if code is not None and sends:
            feedback = code.feeds_back if self.feedback is None else self.feedback
            owner = feedback if self.owner_feedback is None else self.owner_feedback
            owner = owner and code.travels == "twice"
        # What cannot be remembered any more is part of the gradient.
        if not owner:
            vectors = [x + bucket.memory.owner for x in vectors]
            bucket.memory.owner[:] = 0
        if not feedback:
            vectors = [x + e for x, e in zip(vectors, bucket.memory.worker, strict=True)]
            for e in bucket.memory.worker:
                e[:] = 0
        if code is None or not sends:
            return plain(vectors)
        return average(
            code, vectors, bucket.memory, feedback, owner, powersgd.fold(self.seed, self.steps, index), bucket.own
        )

    def remembered(self, rank: int) -> dict[str, Named]:
        out: dict[str, Named] = {"worker": {}, "owner": {}}
        for bucket in self.buckets:
            out["worker"] |= bucket.named(bucket.memory.worker[rank])
            out["owner"] |= bucket.named(bucket.memory.owner)
        return out


def _schedule(code: Code | Schedule | None) -> Schedule:
    return code if isinstance(code, Mapping) else {0: code}


class Clipped(Compressed):
    """TernGrad: each tensor is clipped to a multiple of its root mean square before it is sent.

    Args:
        shapes: As for `Compressed`.
        ranks: As for `Compressed`.
        code: As for `Compressed`.
        clip: The multiple.
    """

    def __init__(self, shapes: Shapes, ranks: int, code: Code, clip: float) -> None:
        super().__init__(shapes, ranks, code)
        self.clip = clip

    def exchange(self, index: int, bucket: Bucket, vectors: list[F32]) -> F32:
        for vector in vectors:
            for part in bucket.slices.values():
                most = np.float32(self.clip * math.sqrt(np.mean(vector[part].astype(np.float64) ** 2)))
                vector[part] = np.clip(vector[part], -most, most)
        return super().exchange(index, bucket, vectors)


class Vote(Algorithm):
    """signSGD with majority vote: the sign of most ranks' signs; that of zero, and a tie, is +1."""

    def exchanged(self, gradients: Sequence[Named]) -> Named:
        ballots = {name: sum(np.where(g[name] < 0, -1, 1) for g in gradients) for name in self.shapes}
        return {name: np.where(votes < 0, -1, 1).astype(np.float32) for name, votes in ballots.items()}


class DGC(Compressed):
    """Deep Gradient Compression.

    Args:
        shapes: As for `Compressed`.
        ranks: As for `Compressed`.
        ratios: Part of the elements that is sent, by the step from which on it is.
        momentum: Of the velocity.
        nesterov: Whether the velocity is Nesterov's.
        masking: Whether the velocity of what was sent becomes zero.
        clip: Norm to whose part by the root of the ranks each tensor is clipped.
        warmup: As for `Compressed`.
        each: As for `Compressed`.
    """

    def __init__(
        self,
        shapes: Shapes,
        ranks: int,
        ratios: Mapping[int, float],
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        clip: float | None = None,
        warmup: int = 0,
        each: bool = False,
    ) -> None:
        schedule = {start: Largest(ratio=ratio) for start, ratio in ratios.items()}
        super().__init__(shapes, ranks, schedule, warmup=warmup, each=each)
        self.momentum, self.nesterov, self.masking, self.clip = np.float32(momentum), nesterov, masking, clip

    def exchange(self, index: int, bucket: Bucket, vectors: list[F32]) -> F32:
        code = self.code(index)
        sent = []
        for g, u, v in zip(vectors, bucket.velocity, bucket.memory.worker, strict=True):
            if self.clip is not None:
                for part in bucket.slices.values():
                    norm = float(np.linalg.norm(g[part].astype(np.float64)))
                    g[part] *= np.float32(min(1.0, self.clip / math.sqrt(self.ranks) / norm))
            if self.nesterov:
                u[:] = self.momentum * (u + g)
                v += u + g
            else:
                u[:] = self.momentum * u + g
                v += u
            if code is None:
                sent.append(v.copy())
                v[:] = 0
                continue
            assert isinstance(code, Largest)
            mask = code.chosen(v)
            sent.append(np.where(mask, v, np.float32(0)))
            v[mask] = 0
            if self.masking:
                u[mask] = 0
        return total(sent) * np.float32(1 / self.ranks)

    def remembered(self, rank: int) -> dict[str, Named]:
        velocities = [bucket.named(bucket.velocity[rank]) for bucket in self.buckets]
        return {**super().remembered(rank), "velocity": {k: v for named in velocities for k, v in named.items()}}


class PowerSGD(Algorithm):
    """PowerSGD.

    Args:
        shapes: As for `Algorithm`.
        ranks: As for `Algorithm`.
        rank: Columns of the factors.
        start: Steps without compression at the beginning.
        min_compression: How many times smaller factors must be.
        warm: Whether a step begins with the right factors of the last.
        alternate: Whether a step makes one factor, in turn.
        seed: Of the right factors.
    """

    def __init__(
        self,
        shapes: Shapes,
        ranks: int,
        rank: int = 1,
        *,
        start: int = 0,
        min_compression: float = 2.0,
        warm: bool = True,
        alternate: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(shapes, ranks)
        self.start, self.warm, self.seed = start, warm, seed
        self.matrices: dict[str, powersgd.Ranks | powersgd.AlternatingRanks] = {}
        self.columns: dict[str, int] = {}
        for name, shape in shapes.items():
            if len(shape) < 2:
                continue
            n, m = shape[0], math.prod(shape[1:])
            self.columns[name] = min(rank, n, m)
            if (n + m) * self.columns[name] * min_compression <= n * m:
                first = self.drawn(name, m, 0)
                self.matrices[name] = (
                    powersgd.AlternatingRanks(first, self.drawn(name, n, 1), ranks)
                    if alternate
                    else powersgd.Ranks(first, ranks, (n, m))
                )

    def drawn(self, name: str, m: int, step: int) -> F64:
        """Returns a random factor."""
        return powersgd.first_right(self.seed, step, name, m, self.columns[name])

    def exchanged(self, gradients: Sequence[Named]) -> Named:
        out = super().exchanged(gradients)
        if self.steps < self.start:
            return out
        for name, matrix in self.matrices.items():
            shape = self.shapes[name]
            given = [g[name].astype(np.float64).reshape(shape[0], -1) for g in gradients]
            drawn = () if self.warm else (self.drawn(name, given[0].shape[1], self.steps - self.start),)
            out[name] = matrix.step(given, *drawn).astype(np.float32).reshape(shape)
        return out

    def remembered(self, rank: int) -> dict[str, Named]:
        return {"residual": {n: m.residuals[rank].astype(np.float32) for n, m in self.matrices.items()}}
