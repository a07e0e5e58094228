"""A bucket: many tensors laid out in one flat buffer, each from a block boundary."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

# A link sends a bucket while the next one fills. Where it is about as fast as backward it would be idle before one much larger.
_GROWTH = 6
# Backward drops its reference to a gradient a moment after it has called the gradient's hook.
_PATIENCE = 5  # times that its memory is looked at, 0.1 ms apart


class Bucket:
    """One flat buffer with a view for each of several tensors.

    Every view starts at a multiple of `align` elements and the gaps are zero, so that no block of a quantizer ever spans two
    tensors: a block over a layer of large and a layer of small gradients would destroy the small ones.

    Attributes:
        index: position among the buckets of a model.
        kind: what its tensors have in common beside dtype and device: how they are to be encoded, for one.
        names: of its tensors, for what is remembered of them.
        flat: shape (n,), the views and the gaps between them; n is a multiple of `align`.
        exact: further elements of the same buffer, for what must not be compressed: whole tensors, and then `flags`.
        flags: the last elements of `exact`.
        whole: `flat` and then `exact`.
        views: one view of the buffer for each tensor, with the tensor's shape and, if that is dense, its strides.
        spans: where each tensor's elements lie in `whole`, in the order of memory.
        align: the alignment of tensors of `flat`, in elements.
        gaps: the elements of `flat` between the end of each view and the next boundary.
        frozen: positions of tensors whose parameters are frozen now; what is remembered of them stays as it is.
        lent: tensors by position that stand for their views, which hold nothing of use meanwhile, nor do the gaps behind them.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        align: int,
        exact: Sequence[bool] | None = None,
        flags: int = 0,
        index: int = 0,
        kind: Hashable = None,
        names: Sequence[str] = (),
    ) -> None:
        """Lays out buffers for tensors like these.

        Args:
            tensors: of one dtype and on one device; only their shapes, strides, dtype and device are used.
            align: the alignment of tensors of `flat`, in elements.
            exact: for each tensor whether it lies in the exact part; none does if None.
            flags: number of further elements.
            index: position among the buckets of a model.
            kind: see above.
            names: of the tensors.

        Raises:
            ValueError: there is no tensor, or the tensors differ in dtype or device.
        """
        kinds = {(t.dtype, t.device) for t in tensors}
        if len(kinds) != 1:
            raise ValueError(f"a bucket holds tensors of one dtype on one device, got {sorted(map(str, kinds))}")
        ((dtype, device),) = kinds
        aside = [False] * len(tensors) if exact is None else list(exact)
        steps = [1 if out else align for out in aside]
        sizes = [-(-t.numel() // step) * step for t, step in zip(tensors, steps, strict=True)]
        offsets = [0] * len(tensors)
        ends = []
        end = 0
        for part in (False, True):
            for position, size in enumerate(sizes):
                if aside[position] is part:
                    offsets[position] = end
                    end += size
            ends.append(end)
        self.index = index
        self.align = align
        self.kind = kind
        self.names = list(names)
        self.spans = [slice(offset, offset + t.numel()) for t, offset in zip(tensors, offsets, strict=True)]
        self._ends = (ends[0], end)
        # What lies in `flat`, in the order of memory.
        self._order = [position for position, out in enumerate(aside) if not out]
        self._starts = [offsets[position] for position in self._order]
        self._formats = [(t.shape, dense_strides(t)) for t in tensors]
        self._boundaries = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        self.lent: dict[int, torch.Tensor] = {}
        self.frozen: list[int] = []
        self._use(torch.zeros(end + flags, dtype=dtype, device=device))

    def _use(self, memory: torch.Tensor) -> None:
        """Takes a vector for the buffer."""
        flat, end = self._ends
        self.whole, self.flat, self.exact, self.flags = memory, memory[:flat], memory[flat:], memory[end:]
        self.views = [
            memory.as_strided(*format_, memory.storage_offset() + span.start)
            for format_, span in zip(self._formats, self.spans, strict=True)
        ]
        self.gaps = [memory[span.stop : end] for span, end in zip(self.spans, self._boundaries, strict=True)]

    def shown(self, slot: int) -> torch.Tensor:
        """Returns a new tensor in the memory of a view, to be a gradient.

        `leave` notices if it is kept beyond that. What is done to it, such as `detach_()`, is not done to the view.
        """
        return self.views[slot].detach()

    def leave(self, gradients: Iterable[torch.Tensor | None]) -> bool:
        """Takes new memory, with zeros in it, if other tensors lie in this; returns True if it did.

        Args:
            gradients: what may lie in this memory, since it is to be overwritten: those that parameters have now.
        """
        storage = self.whole.untyped_storage()
        # By the buffer, its parts, and `storage`.
        others = _references(storage, 5 + len(self.views) + len(self.gaps))
        if others > 0:
            others -= sum(g is not None and g.untyped_storage()._cdata == storage._cdata for g in gradients)
        if others <= 0:
            return False
        self._use(torch.zeros_like(self.whole))
        return True

    def discard(self) -> None:
        """Drops the memory for good; tensors that others have in it keep it."""
        self.whole = self.flat = self.exact = self.flags = self.whole.new_empty(0)
        self.views, self.gaps = [], []

    def move_to(self, memory: torch.Tensor) -> None:
        """Takes the first elements of a vector for the buffer, which other buckets use at other times.

        Args:
            memory: of the same dtype and device; the caller writes all of `whole` before each use.
        """
        self._use(memory[: self.whole.numel()])

    def clear_gaps(self, vector: torch.Tensor) -> None:
        """Sets the elements of a vector like `flat` that belong to no tensor to zero; a codec leaves something in them."""
        for span, end in zip(self.spans, self._boundaries, strict=True):
            vector[span.stop : end].zero_()

    def sources(self) -> list[torch.Tensor]:
        """Where the elements of each tensor are: in its view, or lent."""
        return [self.lent.get(slot, view) for slot, view in enumerate(self.views)]

    @property
    def own(self) -> list[slice]:
        """Where the elements of tensors lie in `flat`; the others are in gaps."""
        return [self.spans[position] for position in self._order]

    def pieces(self, part: slice) -> list[torch.Tensor]:
        """The elements of a part of `flat` that begins and ends at multiples of `align`: vectors, where they are.

        Each is to be filled up to a multiple of `align`, as in `flat`.
        """
        found = []
        for slot in self._order[max(0, bisect_right(self._starts, part.start) - 1) :]:
            span = self.spans[slot]
            if span.start >= part.stop:
                break
            begin, end = max(span.start, part.start), min(span.stop, part.stop)
            if begin < end:
                whole = self.lent.get(slot, self.views[slot]).as_strided((span.stop - span.start,), (1,))
                found.append(whole[begin - span.start : end - span.start])
        return found

    def collect(self, slots: Iterable[int] | None = None) -> None:
        """Copies what is lent into its views: of these positions, or all of it."""
        for slot in list(self.lent) if slots is None else slots:
            if slot in self.lent:
                self.fill(slot, self.lent[slot])

    def lend(self, slot: int, tensor: torch.Tensor) -> bool:
        """Lets a tensor stand for its view, if it has the view's memory format and plain numbers; returns whether it does."""
        if not self._plain(slot, tensor):
            return False
        self.lent[slot] = tensor.detach()
        return True

    def _plain(self, slot: int, tensor: torch.Tensor) -> bool:
        view = self.views[slot]
        alike = tensor.shape == view.shape and tensor.stride() == view.stride() and tensor.dtype == view.dtype
        # Tensors whose memory does not hold their numbers are for PyTorch to read.
        return alike and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())

    def compressed(self, slot: int) -> bool:
        """True if a tensor lies in `flat`, which is to be compressed."""
        return self.spans[slot].stop <= self.flat.numel()

    def fill(self, slot: int, tensor: torch.Tensor | None) -> None:
        """Copies a tensor into its view, unless it is that view already, and zeroes the gap behind it.

        The gap is zeroed each time because a lossy codec turns its zeros into something else.

        Args:
            slot: position of the view.
            tensor: of the view's shape; None stands for zeros.
        """
        view, gap = self.views[slot], self.gaps[slot]
        self.lent.pop(slot, None)
        if tensor is None:
            view.zero_()
        elif tensor.data_ptr() != view.data_ptr() or tensor.stride() != view.stride():
            view.copy_(tensor.detach())
        if gap.numel():
            gap.zero_()

    def fill_together(self, tensors: Mapping[int, torch.Tensor | None], weight: float = 1.0) -> None:
        """Does what `fill` does for several tensors, multiplied by a weight, in few launches: a GPU's cost time of the host.

        Args:
            tensors: by the position of the view; None stands for zeros.
            weight: by which the views are multiplied.
        """
        copied, views = list[torch.Tensor](), list[torch.Tensor]()
        cleared = [gap for slot in tensors if (gap := self.gaps[slot]).numel()]
        for slot, tensor in tensors.items():
            view = self.views[slot]
            self.lent.pop(slot, None)
            if tensor is None:
                cleared.append(view)
            elif not self._plain(slot, tensor):
                view.copy_(tensor.detach())
            elif tensor.data_ptr() != view.data_ptr():
                copied.append(tensor.detach())
                views.append(view)
        if copied:
            torch._foreach_copy_(views, copied)
        if cleared:
            torch._foreach_zero_(cleared)
        if weight != 1.0:
            # One by one: a weight is rare, and `_foreach_mul_` rounds it to bfloat16 on a CPU.
            for slot in tensors:
                self.views[slot].mul_(weight)


def _references(storage: torch.UntypedStorage, own: int) -> int:
    """How many tensors have a memory beside those that are known; 1 where PyTorch cannot count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 1 if count is None else int(count(storage._cdata)) - own


def is_exclusive(tensor: torch.Tensor) -> bool:
    """True if the memory is PyTorch's and has no other tensor in it: gradients of several parameters may share one."""
    count, storage = getattr(torch._C, "_storage_Use_Count", None), tensor.untyped_storage()
    if count is None or not storage.resizable() or storage.nbytes() != tensor.nbytes:
        return False
    for look in range(_PATIENCE):
        if look:
            time.sleep(1e-4)
        # By the tensor, and by `storage`.
        if count(storage._cdata) == 2:
            return True
    return False


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if they cover its elements without gap or overlap, else those of a contiguous tensor.

    A gradient with its parameter's strides lets fused optimizers treat both as linear memory.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def partition(
    tensors: Sequence[torch.Tensor],
    bucket_bytes: int,
    kinds: Sequence[Hashable] | None = None,
    first_bytes: int | None = None,
) -> list[list[int]]:
    """Splits tensors, in the given order, into buckets of one kind, dtype and device each.

    A bucket closes once it holds at least `bucket_bytes`; tensors of different kinds fill different buckets meanwhile.

    Args:
        tensors: what to distribute.
        bucket_bytes: target size in bytes.
        kinds: of the tensors; all the same if None.
        first_bytes: target size of the first bucket that closes, 1 or more, if it is to be smaller. Each later bucket is up to
            `_GROWTH` times as large as the one before.

    Returns:
        The positions of each bucket's tensors; buckets are ordered by the position of their last tensor, the moment from which
        all of it is there.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    target = bucket_bytes if first_bytes is None else min(first_bytes, bucket_bytes)
    for position, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        kind = (tensor.dtype, tensor.device, None if kinds is None else kinds[position])
        open_buckets.setdefault(kind, []).append(position)
        sizes[kind] = sizes.get(kind, 0) + nbytes
        if sizes[kind] >= target:
            buckets.append(open_buckets.pop(kind))
            del sizes[kind]
            target = min(bucket_bytes, _GROWTH * target)
    buckets.extend(open_buckets.values())
    return sorted(buckets, key=lambda bucket: bucket[-1])
