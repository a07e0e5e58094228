"""The bytes that a rank sends with an algorithm."""

from __future__ import annotations

import math

from bagua_kernels.algorithms import (
    D2,
    Algorithm,
    AsyncDecentralized,
    AsyncModelAverage,
    CompressedAllReduce,
    Decentralized,
    PowerSGD,
    RoundAlgorithm,
    SparseLoCo,
    StochasticGradientPush,
    Wagma,
)
from bagua_kernels.algorithms.choosing.cost.facts import Job
from bagua_kernels.algorithms.choosing.cost.methods import factors, gathered, to_peers, twice
from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.algorithms.gossip.mixing import topology_of
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop
from bagua_kernels.compression import Codec
from bagua_kernels.compression.sparse.codec import SparseCodec

_SIDE = 1024  # rows and columns of a matrix, about
_SAMPLE = 1 << 20  # elements, of which codecs' bytes are computed


def bytes_per_step(algorithm: Algorithm, parameters: int, ranks: int) -> float:
    """Returns the bytes that a rank sends, as a mean of the steps of a round; with codecs, once these are used.

    Of algorithms that average beside training it is the bytes of one average.

    Args:
        algorithm: an algorithm with the options that count.
        parameters: elements of the model, which are taken for square matrices.
        ranks: all ranks, each on a node of its own.
    """
    if ranks == 1:
        return 0.0
    interval = algorithm.interval if isinstance(algorithm, RoundAlgorithm) else 1
    return _of_exchange(algorithm, parameters, ranks) / interval


def _of_exchange(algorithm: Algorithm, elements: int, ranks: int) -> float:
    if isinstance(algorithm, PowerSGD):
        return factors(algorithm.config.rank, _of_matrices(elements), ranks)
    codec = _codec(algorithm)
    part = 1.0 if codec is None else codec.payload_size(_SAMPLE) / (4 * _SAMPLE)
    plain = Job(1.0, (), elements)
    if isinstance(algorithm, Decentralized | StochasticGradientPush | D2 | Differences):
        return part * to_peers("", len(topology_of(algorithm.peers, ranks).neighbours_out(0)), plain, ranks)
    if isinstance(algorithm, AsyncDecentralized):
        # A rank asks once, and answers once in the mean.
        return part * 2 * 4 * elements
    if isinstance(algorithm, Wagma):
        return part * twice("", plain, max(2, algorithm.group or 1 << round(math.log2(ranks) / 2)))
    if isinstance(algorithm, SparseLoCo) or (codec is not None and not codec.linear and isinstance(codec, SparseCodec)):
        return part * gathered("", plain, ranks)
    return part * twice("", plain, ranks)


def _of_matrices(elements: int) -> Job:
    """Returns a model of about as many elements, all of them in square matrices."""
    count = max(1, round(elements / _SIDE**2))
    side = max(1, round(math.sqrt(elements / count)))
    return Job(1.0, ((side, side),) * count)


def _codec(algorithm: Algorithm) -> Codec | None:
    """Returns the codec that is used in the end; None without one."""
    if isinstance(algorithm, CompressedAllReduce | OuterLoop):
        return next(reversed(algorithm.assignment.codecs), None)
    if isinstance(algorithm, Differences | AsyncModelAverage | AsyncDecentralized):
        return algorithm.codec
    return None
