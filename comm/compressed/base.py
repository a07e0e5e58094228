"""What every all-reduce of this package offers, and the plain one that each becomes for short vectors."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.residuals import Kept, restore, save
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Steps, Together, drive
from bagua_kernels.compression import Codec


@runtime_checkable
class MakesAllReduce(Protocol):
    """A communicator that has compressed all-reduces of its own."""

    def all_reduce_for(self, codec: Codec, n: int, exact: int, dtype: torch.dtype, **options: Any) -> AllReduce:
        """See the function of this name."""


DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Takes some elements of the mean, and their payload.
Deliver = Callable[[slice, torch.Tensor], None]
# Gives some elements of this rank's vector, tensor by tensor.
Source = Callable[[slice], Sequence[torch.Tensor]]


class AllReduce(abc.ABC):
    """Averages vectors of one size over all ranks, with the same bits on all of them; made by `all_reduce_for`.

    All ranks make it with equal arguments, which is not verified: ranks that disagree get wrong sizes or wrong numbers.
    Vectors shorter than `plain_below`, and those of a single rank, are averaged without compression and have no residuals.

    Args:
        codec: how vectors are encoded; equal on all ranks.
        communicator: the ranks that take part.
        n: elements of the vector.
        exact: elements of the exact part, of which every rank sends each 2 (P - 1) / P times, with P ranks.
        dtype: of both, float32, float16 or bfloat16.
        plain_below: number of elements below which vectors are sent plainly.

    Attributes:
        plain: True if vectors are sent plainly.
        delivers: True if it can hand out the mean's payloads instead of decoding them.
        reads_pieces: True if it can be given many tensors instead of one vector.

    Raises:
        TypeError: `codec` is not a codec, or the dtype cannot be encoded.
        ValueError: a number is negative.
    """

    def __init__(
        self, codec: Codec, communicator: Communicator, n: int, exact: int, dtype: torch.dtype, plain_below: int
    ) -> None:
        check_configuration(codec, dtype, n=n, exact=exact, plain_below=plain_below)
        self.codec = codec
        self.communicator = communicator
        self.n = n
        self.exact = exact
        self.dtype = dtype
        self.plain = communicator.size == 1 or n < plain_below
        self.delivers = False
        self.reads_pieces = False

    def __call__(
        self,
        x: torch.Tensor,
        exact: torch.Tensor | None = None,
        *,
        seed: int | None = None,
        source: Source | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        """Replaces `x` by its mean, compressed, and `exact` by its mean in full precision, over all ranks.

        Args:
            x: shape (n,), contiguous, on the communicator's device.
            exact: shape (exact,), contiguous; may be left out if that is 0.
            seed: identifies this message, equal on all ranks: `fold_seed(seed, step, bucket)`. May be left out
                where the codec draws no random numbers, or `plain`.
            source: returns the elements of any part that begins and ends at multiples of the codec's block, if they are
                not in `x`. They are contiguous vectors, each to be padded to such a multiple. Only where `reads_pieces`.
            deliver: called instead of writing to `x`, as soon as a part of the mean has arrived. Its arguments are the
                part's elements and its payload, which must be read at once. Only where `delivers`.

        Raises:
            TypeError: a dtype is another than that given at construction.
            ValueError: a shape or device does not fit, a vector is not contiguous, a seed is lacking, or `source` or
                `deliver` cannot be had.
            CommunicationError: a rank was lost or did not take part in time.
        """
        drive(self.steps(x, exact, seed=seed, source=source, deliver=deliver))

    @torch.no_grad()
    def steps(
        self,
        x: torch.Tensor,
        exact: torch.Tensor | None = None,
        *,
        seed: int | None = None,
        source: Source | None = None,
        deliver: Deliver | None = None,
    ) -> Steps:
        """Does what a call does, but yields each communication instead of waiting for it.

        The caller waits for what is yielded and then resumes the generator; meanwhile it can resume others:

            for work in all_reduce.steps(x, seed=seed):
                work.wait()

        All ranks resume the generators of one communicator in the same order. One object has one vector under way at a time.
        Arguments are checked when the generator is first resumed.

        Args:
            x: as for a call.
            exact: as for a call.
            seed: as for a call.
            source: as for a call.
            deliver: as for a call.

        Yields:
            The communications, in the order in which they have been started.

        Raises:
            TypeError: as for a call.
            ValueError: as for a call.
        """
        if deliver is not None and not self.delivers:
            raise ValueError(f"{type(self).__name__} of {self.codec!r} has no payloads of the mean; leave out deliver")
        if source is not None and not self.reads_pieces:
            raise ValueError(f"{type(self).__name__} of {self.codec!r} reads one vector; leave out source")
        exact = x.new_empty(0) if exact is None else exact
        check_vector("x", x, self.n, self.dtype, self.communicator)
        check_vector("exact", exact, self.exact, self.dtype, self.communicator)
        seed = check_seed(self.codec, seed, self.plain)
        if self.plain:
            yield average(self.communicator, x, exact)
        else:
            yield from self._exchange(x, exact, seed, source, deliver)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residuals: "worker", what this rank's payloads lacked, and "owner", what those of its chunk's mean lacked.

        Each is a float32 copy in the order of the vector's elements. A rank loads its own again.
        """
        return save(self.residuals())

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes the residuals of `state_dict`, whatever the number of pieces; what is lacking starts at zero again.

        What this collective has no residual for is dropped: that of a vector which is now sent plainly, for one.

        Raises:
            ValueError: a residual is that of another number of elements.
        """
        restore(self.residuals(), state)

    def residuals(self) -> dict[str, Kept | None]:
        """The residuals themselves, by the names of `state_dict`; None where one is not kept."""
        return {}

    @contextlib.contextmanager
    def withheld(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Within this block nothing of the residuals of some elements is sent, and nothing is kept of what is sent of them.

        Args:
            spans: the begin and end of each range of elements of the vector.
        """
        with contextlib.ExitStack() as stack:
            for name, residuals in self.residuals().items():
                if residuals is not None and spans:
                    start = self._start(name)
                    stack.enter_context(
                        residuals.withheld([(max(0, begin - start), end - start) for begin, end in spans])
                    )
            yield

    def _start(self, name: str) -> int:
        """The place in the vector of a residual's first element."""
        return 0

    def vectors(self) -> dict[str, torch.Tensor]:
        """The residuals as vectors of `n` elements, float32; collective.

        Other than those of `state_dict`, they fit any other all-reduce of `n` elements, of other codecs and numbers of ranks
        too: "owner" is the same on all ranks, put together from the owners of all chunks.
        """
        return self.state_dict()

    def own_vectors(self) -> dict[str, torch.Tensor]:
        """What this rank has of `vectors`; of "owner", whose parts other ranks have, zeros elsewhere. Not collective."""
        return self.state_dict()

    def load_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Takes what `vectors` gave; as `load_state_dict`."""
        self.load_state_dict(vectors)

    @abc.abstractmethod
    def _exchange(
        self, x: torch.Tensor, exact: torch.Tensor, seed: int, source: Source | None, deliver: Deliver | None
    ) -> Steps:
        """Does it, with checked arguments, more than one rank, and compression."""


def average(communicator: Communicator, x: torch.Tensor, exact: torch.Tensor) -> Together:
    """Starts to average both without compression.

    In two messages even if one lies right behind the other in memory: they may not on another rank.
    """
    return Together([communicator.all_reduce(part, ReduceOp.AVG) for part in (x, exact) if part.numel()])


def check_configuration(codec: Codec, dtype: torch.dtype, **numbers: int) -> None:
    """Raises unless the codec is one, the dtype can be encoded, and the numbers are 0 or more."""
    if not isinstance(codec, Codec):
        raise TypeError(f"expected a codec, got {codec!r}; bagua_kernels.compression.from_spec makes one from text")
    if dtype not in DTYPES:
        raise TypeError(f"vectors must be of dtype float32, float16, bfloat16, got {dtype}; convert them with .to()")
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"{name} must be 0 or more, got {number}")


def draws(codec: Codec) -> bool:
    """True if what a codec encodes depends on its seed."""
    return bool(codec.stochastic) or bool(getattr(codec, "shared_seed", False))


def check_seed(codec: Codec, seed: int | None, plain: bool) -> int:
    """Returns the seed, or 0 where none is needed: the codec draws no random numbers, or it is not applied.

    Raises:
        ValueError: one is needed. A default would give all messages the same random numbers, whose errors then add up.
    """
    if seed is None and draws(codec) and not plain:
        raise ValueError(f"{codec!r} draws random numbers: pass seed=fold_seed(seed, step, bucket)")
    return 0 if seed is None else seed


def check_vector(name: str, x: torch.Tensor, n: int, dtype: torch.dtype, communicator: Communicator) -> None:
    """Raises unless `x` is a contiguous vector of `n` elements of a dtype, on the communicator's device."""
    if x.dtype != dtype:
        raise TypeError(f"{name} must be of {dtype}, as the collective was made for, got {x.dtype}")
    if x.shape != (n,) or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and of shape {(n,)}, as the collective was made for, got {tuple(x.shape)} with "
            f"strides {x.stride()}"
        )
    if x.device != communicator.device:
        raise ValueError(f"{name} must be on the communicator's {communicator.device}, got {x.device}; move it there")
