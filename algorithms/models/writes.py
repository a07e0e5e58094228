"""Writes to flat parameters by others than the optimizer and the exchanges, such as `load_state_dict`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.bucket import Bucket

_ELEMENTS = 16  # of a parameter, spread over it, whose values are compared
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Sample:
    """Some elements of a bucket: their places, and their values.

    Attributes:
        owners: the number of the parameter within the bucket to which each element belongs.
        seen: the values when they were looked at last.
        before: those when they were looked at last before the last step.
        after: those that the last step or exchange has left.
    """

    flat: torch.Tensor
    places: torch.Tensor
    owners: torch.Tensor
    seen: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    def now(self) -> torch.Tensor:
        return self.flat.index_select(0, self.places)

    def kept(self) -> tuple[int, int]:
        """Returns how many elements keep the values of the last step, and of how many.

        Elements count that the last step has moved, in parameters of which any element was written since.
        """
        written = self.now() != self.after
        counted = (self.after != self.before) & torch.isin(self.owners, self.owners[written])
        # waits: where something was written.
        return int((counted & ~written).sum()), int(counted.sum())


class Writes:
    """Finds out whether parameters have other values than the last step, or the last exchange, has left.

    A few elements of each parameter are compared bit by bit. Autograd's counters of writes would not do. What is written and
    put back, as a running mean is for an evaluation, is no write here, and a write to `.data` is one.

    On a GPU the counters come first, so that nothing waits for the device where there was no write. There writes to `.data`
    alone are not seen.
    """

    def __init__(self, flat: FlatParameters) -> None:
        """Begins with the present values.

        Args:
            flat: the parameters.
        """
        self._flat = flat
        self._parameters = list(flat.parameters.values())
        self._samples = [_sample(bucket) for bucket in flat.buckets]
        self._on_gpu = any(sample.flat.is_cuda for sample in self._samples)
        self._versions = self._seen = self._count()
        self._squares = [0.0, 0.0]  # of what was written after the last step, and after the one before

    @torch.no_grad()
    def begin_step(self) -> None:
        """Remembers the values before a step."""
        self._squares = [0.0, self._squares[0]]
        for sample in self._samples:
            sample.before = sample.seen

    def marks(self) -> list[torch.Tensor]:
        """Returns what `mark` remembered last, for `restore`."""
        return [sample.after for sample in self._samples]

    def restore(self, marks: list[torch.Tensor]) -> None:
        """Goes on as if `mark` had not been called since."""
        for sample, after in zip(self._samples, marks, strict=True):
            sample.after = after
        # Of any other number of writes: the values are looked at.
        self._versions = -1

    @torch.no_grad()
    def mark(self) -> None:
        """Remembers the values that a step or an exchange has left."""
        for sample in self._samples:
            sample.after = sample.seen = sample.now()
        self._versions = self._seen = self._count()

    @torch.no_grad()
    def found(self, *, beside_training: bool = False) -> bool:
        """Returns True if parameters have other values than at the last `mark`.

        Args:
            beside_training: True on another thread than the one that trains.
        """
        if not beside_training:
            self._seen = self._count()
        if self._on_gpu and self._versions == self._count():
            return False
        equal = True
        for sample in self._samples:
            now = sample.now()
            # waits: on a GPU where autograd has counted a write, of which there are few.
            equal = torch.equal(_bits(now), _bits(sample.after)) and equal
            if not beside_training:
                sample.seen = now
        return not equal

    @torch.no_grad()
    def changed(self) -> bool:
        """Returns True if parameters have other values than when they were looked at last; on the training thread."""
        if self._on_gpu and self._seen == self._count():
            return False
        equal = True
        for sample in self._samples:
            before, sample.seen = sample.seen, sample.now()
            # waits: on a GPU where autograd has counted a write between two passes of a step.
            equal = torch.equal(_bits(before), _bits(sample.seen)) and equal
        self._seen = self._count()
        return not equal

    @torch.no_grad()
    def belongs_to_step(self) -> bool:
        """Returns True if what was written is part of a step, as `clamp_` and masks after each step are.

        It moves parameters no further than the last step did, or than what was written after the step before, times 4. Or it
        keeps the step's values in a quarter of the elements, which other weights would not do.
        """
        written = step = 0.0
        for sample in self._samples:
            # waits: where something was written.
            written += float((sample.now().double() - sample.after.double()).square().sum())
            # waits: as above.
            step += float((sample.after.double() - sample.before.double()).square().sum())
        self._squares[0] = written
        if written <= max(step, 16 * self._squares[1]):
            return True
        kept, counted = map(sum, zip(*(sample.kept() for sample in self._samples), strict=True))
        return 0 < counted <= 4 * kept

    def count(self) -> int:
        """Returns how many writes autograd has counted, to which those to `.data` do not belong."""
        return sum(parameter._version for parameter in self._parameters)

    def _count(self) -> int:
        return self.count() if self._on_gpu else 0


def checksums(flat: FlatParameters) -> list[int]:
    """Returns a checksum of the bytes of each parameter, in the order of the buckets."""
    # waits: where parameters were written.
    found = [view.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for b in flat.buckets for view in b.views]
    return [zlib.crc32(each.numpy().tobytes()) for each in found]


def digest(vectors: Iterable[torch.Tensor]) -> int:
    """Returns a checksum of the bytes of all vectors together."""
    found = 0
    for each in vectors:
        # waits: after a loss.
        found = zlib.crc32(each.view(torch.uint8).cpu().numpy().data, found)
    return found


def first_difference(flat: FlatParameters, own: Sequence[int], other: Sequence[int]) -> str:
    """Returns the name of the first parameter whose checksums differ; empty if there is none."""
    names = [name for bucket in flat.buckets for name in bucket.names]
    return next((name for name, a, b in zip(names, own, other, strict=False) if a != b), "")


def _sample(bucket: Bucket) -> _Sample:
    spans = [
        torch.linspace(span.start, span.stop - 1, min(_ELEMENTS, span.stop - span.start), dtype=torch.float64).long()
        for span in bucket.own
        if span.stop > span.start
    ]
    numbers = [torch.full_like(span, number) for number, span in enumerate(spans)]
    empty = torch.empty(0, dtype=torch.int64)
    # waits: at start.
    places, owners = (torch.cat([empty, *each]).to(bucket.flat.device) for each in (spans, numbers))
    values = bucket.flat.detach().index_select(0, places)
    return _Sample(bucket.flat, places, owners, values, values, values)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_WORDS[values.element_size()])
