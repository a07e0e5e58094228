"""Vectors that codecs find difficult, for tests of the oracles and of the codecs."""

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import grids

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINIEST = 2.0**-149
BLOCKS = (32, 64, 256, 4096)
KINDS = ("gaussian", "heavy", "constant", "one_hot", "subnormal", "offset", "ties", "zeros", "mixed_scales")

deterministic = settings(derandomize=True, deadline=None, database=None, max_examples=150 if grids.EVERYTHING else 15)


def f32(*values: float) -> F32:
    """Returns a float32 vector."""
    return np.array(values, dtype=np.float32)


def same_bits(a: F32, b: F32) -> bool:
    """Compares including the sign of zeros and the bits of NaN."""
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def make(kind: str, n: int, scale: float, seed: int) -> F32:
    """Returns a finite test vector."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(n)
    if kind == "heavy":
        z = np.sign(z) * np.exp(3 * rng.standard_normal(n))
    elif kind == "constant":
        z = np.full(n, z[0])
    elif kind == "one_hot":
        z = np.where(np.arange(n) == rng.integers(n), z, 0)
    elif kind == "subnormal":
        return (rng.integers(-300, 300, n) * FLOAT32_TINIEST * 2.0 ** rng.integers(0, 16)).astype(np.float32)
    elif kind == "offset":
        z = 1 + z * 10.0 ** rng.uniform(-8, 0)
    elif kind == "ties":
        z = (rng.integers(0, 255, n) + rng.choice([0, 0.5, 1], n)) / 255
    elif kind == "zeros":
        z = rng.choice([0.0, -0.0], n) * rng.choice([-1.0, 1.0])
        z[rng.integers(n)] = rng.choice([0.0, -0.0, 1.0, -1.0])
    elif kind == "mixed_scales":
        z = np.sign(z) * 10.0 ** rng.uniform(-45, 0, n)
    return np.clip(z * scale, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


@st.composite
def vectors(draw: st.DrawFn) -> F32:
    """Draws finite vectors of 1 to 1000 elements at all scales of float32."""
    scale = draw(st.sampled_from([1e-38, 1.0, 3e38]) | st.floats(-38, 38).map(lambda e: min(10.0**e, 3e38)))
    return make(draw(st.sampled_from(KINDS)), draw(st.integers(1, 1000)), scale, draw(st.integers(0, 2**32)))


def raw_vectors(allow_nonfinite: bool) -> st.SearchStrategy[F32]:
    """Draws short vectors of arbitrary float32 values."""
    values = st.floats(width=32, allow_nan=allow_nonfinite, allow_infinity=allow_nonfinite)
    return hnp.arrays(np.float32, st.integers(0, 80), elements=values)
