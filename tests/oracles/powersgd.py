"""PowerSGD in NumPy, for all ranks at once.

`Ranks` is in float64, from algorithms 1 and 2 of Vogels et al., NeurIPS 2019. `sum_rows`, `orthonormal_bits` and
`product_bits` are the page docs/powersgd.md in float32, with one NumPy operation for each rounded operation.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from tests.oracles import minmax_uint8

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
MASK = 2**64 - 1


def splitmix(h: int) -> int:
    h = (h + 0x9E3779B97F4A7C15) & MASK
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
    return h ^ (h >> 31)


def fold(*numbers: int) -> int:
    h = 0x9E3779B97F4A7C15
    for number in numbers:
        h = splitmix(h ^ number)
    return h


def first_right(seed: int, step: int, name: str, columns: int, rank: int) -> F64:
    """Returns the random right factor that docs/powersgd.md defines; in step 1, of as many rows, the left one."""
    key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], dtype="<u8")[0]
    n = columns * rank
    bits = minmax_uint8.random(fold(seed, step, int(key)), 0, 12 * n).reshape(12, n)
    uniform = (bits >> np.uint32(8)).astype(np.float64) / 2**24
    normal = (uniform.sum(axis=0) - 6).astype(np.float32)
    return normal.astype(np.float64).reshape(columns, rank)


def orthonormalise(p: F64) -> F64:
    """Returns Gram-Schmidt on the columns of `p`, each by least squares on those before it."""
    done = np.zeros_like(p)
    for k in range(p.shape[1]):
        before, column = done[:, :k], p[:, k]
        rest = column - before @ np.linalg.lstsq(before, column, rcond=None)[0] if k else column
        if np.linalg.norm(rest) > 1e-6 * np.linalg.norm(column):
            done[:, k] = rest / np.linalg.norm(rest)
    return done


class Ranks:
    """One matrix on several ranks.

    Args:
        right: The first right factor.
        ranks: How many ranks.
        shape: Rows and columns of the matrix.
    """

    def __init__(self, right: F64, ranks: int, shape: tuple[int, int]) -> None:
        self.right = right
        self.residuals = [np.zeros(shape) for _ in range(ranks)]

    def step(self, gradients: list[F64], right: F64 | None = None) -> F64:
        """Returns the average that all ranks receive; `right`, if given, replaces the last right factor."""
        q = self.right if right is None else right
        inputs = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
        p = orthonormalise(np.mean([m @ q for m in inputs], axis=0))
        self.right = np.mean([m.T @ p for m in inputs], axis=0)
        output: F64 = p @ self.right.T
        self.residuals = [m - output for m in inputs]
        return output


class AlternatingRanks:
    """One matrix on several ranks that make one factor in each step, as github.com/epfml/powersgd does.

    Args:
        right: The first right factor.
        left: The left factor, in place of columns of zeros.
        ranks: How many ranks.
    """

    def __init__(self, right: F64, left: F64, ranks: int) -> None:
        # Of the side that a step projects onto: what was made last, and what is random.
        self.made = [right, np.zeros_like(left)]
        self.drawn = [right, left]
        self.steps = 0
        self.residuals = [np.zeros((len(left), len(right))) for _ in range(ranks)]

    def step(self, gradients: list[F64]) -> F64:
        """Returns the average that all ranks receive."""
        side = self.steps % 2
        self.steps += 1
        made = np.where(np.any(self.made[side] != 0, axis=0), self.made[side], self.drawn[side])
        basis = orthonormalise(made)
        inputs = [g + e for g, e in zip(gradients, self.residuals, strict=True)]
        seen = inputs if side == 0 else [m.T for m in inputs]
        factor = np.mean([m @ basis for m in seen], axis=0)
        self.made[1 - side] = factor
        output: F64 = factor @ basis.T if side == 0 else basis @ factor.T
        self.residuals = [m - output for m in inputs]
        return output


def best_error(matrix: F64, rank: int) -> float:
    """Returns the Frobenius norm of what the best approximation of a rank misses (Eckart and Young)."""
    return float(np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[rank:]))


def sum_rows(x: F32) -> F32:
    """Returns the sum over the first axis in the order of the page."""
    size = 1 << (len(x) - 1).bit_length()
    s = np.zeros((size, *x.shape[1:]), x.dtype)
    s[: len(x)] = x
    while size > 1:
        size //= 2
        s = s[:size] + s[size:]
    return s[0]


def orthonormal_bits(p: F32) -> F32:
    """Returns the orthonormal columns of a finite matrix as the page makes them."""
    p = p.copy()
    for k in range(p.shape[1]):
        largest = max(abs(p[:, k]).max(), np.float32(2.0**-126))
        p[:, k] /= np.float32(2.0 ** (np.frexp(largest)[1] - 1))
    for threshold in (np.float32(16 * 2.0**-23), np.float32(0.5)):
        limits = np.sqrt(sum_rows(p * p)) * threshold
        for k in range(p.shape[1]):
            norm = np.sqrt(sum_rows(p[:, k] * p[:, k]))
            p[:, k] = 0 if norm <= limits[k] else p[:, k] / norm
            for later in range(k + 1, p.shape[1]):
                p[:, later] -= p[:, k] * sum_rows(p[:, k] * p[:, later])
    return p


def product_bits(p: F32, q: F32) -> F32:
    """Returns `p q^T`, column by column."""
    total = np.outer(p[:, 0], q[:, 0])
    for k in range(1, p.shape[1]):
        total = total + np.outer(p[:, k], q[:, k])
    return total
