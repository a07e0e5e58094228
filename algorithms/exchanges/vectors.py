"""Vectors like a bucket's, taken apart into one tensor per parameter and put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from bagua_kernels.bucket import Bucket
from bagua_kernels.quotient import divide_

Named = Mapping[str, torch.Tensor]


def scatter(bucket: Bucket, vector: torch.Tensor, *, copies: bool = True) -> dict[str, torch.Tensor]:
    """Returns each tensor's share of a vector like `bucket.flat`, or like that and the exact tensors.

    Shares are flat, in the order of the tensor's indices: a run may go on with another memory format.

    Args:
        bucket: the tensors.
        vector: to be taken apart.
        copies: False for shares that are views of the vector where they can be.
    """
    return {
        name: _flat(_shaped(vector, span, view), copies)
        for name, span, view in _shares(bucket)
        if span.start < span.stop <= vector.numel()
    }


def copied(x: torch.Tensor, spare: torch.Tensor | None) -> torch.Tensor:
    """Returns a copy, in the memory of `spare` if that is like it: the system clears new memory, which takes as long."""
    like = spare is not None and (spare.shape, spare.dtype, spare.device) == (x.shape, x.dtype, x.device)
    if spare is not None and like and spare.stride() == x.stride():
        return spare.copy_(x)
    return x.clone()


def _flat(share: torch.Tensor, copies: bool) -> torch.Tensor:
    flat = share.reshape(-1)
    return flat.clone() if copies and flat.data_ptr() == share.data_ptr() else flat


def gather(bucket: Bucket, named: Named, exact: bool = False) -> torch.Tensor:
    """Undoes `scatter`, for a bucket of any tensors; what is lacking is zero.

    Args:
        bucket: its tensors.
        named: their shares.
        exact: True if the vector covers exact tensors too.

    Raises:
        ValueError: a tensor has another number of elements than its parameter.
    """
    numel = bucket.whole.numel() - bucket.flags.numel() if exact else bucket.flat.numel()
    dtype = torch.promote_types(bucket.whole.dtype, torch.float32)
    vector = torch.zeros(numel, dtype=dtype, device=bucket.flat.device)
    for name, span, view in _shares(bucket):
        if span.stop > vector.numel() or name not in named:
            continue
        count, share = span.stop - span.start, named[name]
        if share.numel() != count:
            raise ValueError(f"the state of {name!r} has {share.numel()} elements, the parameter {count}")
        _shaped(vector, span, view).copy_(share.view(view.shape))
    return vector


def _shares(bucket: Bucket) -> Iterator[tuple[str, slice, torch.Tensor]]:
    yield from zip(bucket.names, bucket.spans, bucket.views, strict=True)


def _shaped(vector: torch.Tensor, span: slice, view: torch.Tensor) -> torch.Tensor:
    """The part of a vector that lies beside a tensor, in the tensor's shape and strides."""
    return vector.as_strided(view.shape, view.stride(), vector.storage_offset() + span.start)


def euclidean_norm(x: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of a tensor of one element or more, a float64 scalar; not finite if an element is not.

    Squares are taken in units of the power of two above the greatest magnitude: others may leave the range of float32.
    The units of k x are k times those of x for any power of two k.
    """
    x = x.detach()
    if x.device.type == "cpu":
        # There a number is at hand, and most gradients need no units: their norm has the same bits without.
        norm = torch.linalg.vector_norm(x, dtype=torch.float32)
        if 2.0**-40 < float(norm) < 2.0**60:
            return torch.Tensor.double(norm)
    low, high = torch.aminmax(x)
    _, exponent = torch.frexp(torch.maximum(low.abs(), high.abs()).float())
    # The power and its inverse are both to be normal numbers.
    unit = torch.ldexp(torch.ones((), dtype=torch.float64, device=x.device), exponent.clamp(-125, 126))
    scaled = x.float() * unit.reciprocal().float()
    norm = torch.linalg.vector_norm(scaled, dtype=torch.float32)
    return torch.Tensor.double(norm) * unit


def check_trained(names: Collection[str], trained: Collection[str]) -> None:
    """Refuses the state of a module that trained other parameters.

    Args:
        names: of the parameters in the state.
        trained: of those that the module trains.

    Raises:
        ValueError: they differ.
    """
    if differ := sorted(set(names) ^ set(trained)):
        raise ValueError(
            f"the state is that of a module with other trainable parameters; {differ} are not in both: before it is "
            "loaded, freeze the parameters that were frozen when it was saved"
        )


def mean_of(several: Sequence[Mapping[str, Named]]) -> dict[str, Named]:
    """The mean of what several ranks remember, by keys and names; one rank's own is returned bit for bit.

    Each mean of several is taken when it is read: all of them, of large models, need memory beside what they are copied to.
    """
    if len(several) == 1:
        return {key: dict(named) for key, named in several[0].items()}
    # By the last one that has a key, whose names all are to have.
    names = {key: sorted(named) for one in several for key, named in one.items()}
    return {key: _Means([one[key] for one in several], found) for key, found in names.items()}


class _Means(Mapping[str, torch.Tensor]):
    """Means of tensors by name, each of which is made again when it is read again."""

    def __init__(self, several: Sequence[Named], names: Sequence[str]) -> None:
        self._several, self._names = several, dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return _mean([one[name] for one in self._several])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, in which means of less are exact enough; of float64 and of whole numbers in float64."""
    mean = mean_in_order(tensors)
    return mean.float() if tensors[0].is_floating_point() and tensors[0].dtype != torch.float64 else mean


def mean_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean in float64, with the sum from the first tensor on; without a copy of each of them."""
    total = tensors[0].to(torch.float64, copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor)
    return divide_(total, len(tensors))
