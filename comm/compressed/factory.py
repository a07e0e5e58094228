"""Which all-reduce suits a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bagua_kernels.caller_warnings import warn_caller
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.all_reduce import CompressedAllReduce
from bagua_kernels.comm.compressed.base import AllReduce, MakesAllReduce, check_configuration
from bagua_kernels.comm.compressed.linear import LinearAllReduce
from bagua_kernels.comm.compressed.sparse import SparseAllReduce
from bagua_kernels.compression import Codec
from bagua_kernels.compression.sparse.codec import SparseCodec


def all_reduce_for(
    codec: Codec,
    communicator: Communicator,
    n: int,
    exact: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    worker_residual: bool = False,
    owner_residual: bool = False,
    pieces: int | None = None,
    plain_below: int = 0,
    own: Sequence[slice] | None = None,
) -> AllReduce:
    """Makes the all-reduce that suits a codec.

    Linear codecs get `LinearAllReduce`, other sparsifiers `SparseAllReduce`, all others `CompressedAllReduce`. A communicator
    in two tiers has `TieredAllReduce`, which makes one of these for the ranks of one place on all nodes.

    Args:
        codec: how vectors are encoded; equal on all ranks.
        communicator: the ranks that take part.
        n: elements of the vector.
        exact: elements of the exact part.
        dtype: of both, float32, float16 or bfloat16.
        worker_residual: True if each rank keeps what its payloads lack.
        owner_residual: True if what the encoding of the mean loses is kept too. Only `CompressedAllReduce` encodes means.
        pieces: number of pieces that are pipelined; by default as suits.
        plain_below: number of elements below which vectors are sent plainly.
        own: where tensors lie in the vector, as for `CompressedAllReduce`; only its codecs have blocks to fill up.

    Raises:
        TypeError, ValueError: as the class chosen.
    """
    check_configuration(codec, dtype)
    options = {"worker_residual": worker_residual, "pieces": pieces, "plain_below": plain_below}
    if isinstance(communicator, MakesAllReduce):
        return communicator.all_reduce_for(codec, n, exact, dtype, owner_residual=owner_residual, own=own, **options)
    make: Callable[..., AllReduce] = partial(CompressedAllReduce, owner_residual=owner_residual, own=own)
    if codec.linear or isinstance(codec, SparseCodec):
        make = LinearAllReduce if codec.linear else SparseAllReduce
    return make(codec, communicator, n, exact, dtype, **options)


def measure_plain_below(codec: Codec, communicator: Communicator, **options: Any) -> int:
    """Deprecated: measures nothing any more.

    Args:
        codec: how vectors would be encoded.
        communicator: the ranks that would take part.
        **options: of the measurement.

    Returns:
        0, the default of `plain_below`: all vectors are compressed.
    """
    warn_caller(
        "measure_plain_below measures nothing any more and goes with the next release: pass a number of elements as "
        "plain_below, or leave it out to compress all vectors"
    )
    return 0
