"""The centralized algorithms in NumPy, for all ranks at once.

Written from the papers and from the steps in the algorithms' docstrings. An algorithm is told all ranks' gradients of a step
and returns the mean that all of them receive. Codecs are the bit-exact oracles of this package, with one float32 operation
for each of docs/compressed-collectives.md; PowerSGD is in float64.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from fnmatch import fnmatch

import numpy as np

from tests.oracles import powersgd
from tests.oracles.payloads import (
    F32,
    F64,
    Code,
    Largest,
    Memory,
    average,
    plain,
    total,
)

Named = dict[str, F32]
Shapes = Mapping[str, tuple[int, ...]]


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
