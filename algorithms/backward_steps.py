"""The optimizer's step, taken bucket by bucket while backward goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from bagua_kernels.bucket import Bucket
from bagua_kernels.comm.compressed import Deliver
from bagua_kernels.compression import BlockCodec, Codec
from bagua_kernels.optim.compressed import PayloadStep
from bagua_kernels.optim.fused import Fused
from bagua_kernels.optim.part import Part
from bagua_kernels.optim.twin import Twin


class BackwardSteps:
    """Updates the parameters of each bucket as soon as their mean has arrived; their `grad` is not set.

    A parameter without a gradient on this rank waits for the end of backward, when it is known whether any rank has one.
    Means that arrive as payloads of a block codec are decoded in the same pass over memory that updates the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Prepares for an optimizer.

        Args:
            optimizer: one of `bagua_kernels.optim`.
            parameters: those whose gradients are exchanged, by name. What the optimizer does not have keeps its gradient.

        Raises:
            TypeError: the optimizer is none of this package, or has options with which it leaves steps to PyTorch.
        """
        if not isinstance(optimizer, Fused):
            raise TypeError(
                "apply_in_backward=True takes steps of single parameters: pass an optimizer of bagua_kernels.optim, got "
                f"{'none' if optimizer is None else type(optimizer).__name__}"
            )
        for group in optimizer.param_groups:
            if group.get("differentiable") or (group.get("capturable") and not group["params"][0].is_cuda):
                raise TypeError(
                    "apply_in_backward=True goes neither with differentiable nor, on a CPU, with capturable"
                )
        self._twin = Twin(optimizer)
        self._originals = dict(parameters)
        # What stands for them, and has the gradients.
        self._parameters: dict[str, torch.Tensor] = {}
        self._parts: dict[tuple[int, str], Part] = {}
        self._ready: dict[int, dict[str, None]] = {}
        self._taken: set[str] = set()

    def forget(self) -> None:
        """Drops what was prepared for buckets, since these are laid out anew."""
        self._parts.clear()

    def updates(self, name: str) -> bool:
        """Whether the optimizer has a parameter."""
        return name in self._parameters

    def start(self) -> None:
        """Begins a backward pass: steps are taken with what the optimizer's options are now."""
        same = self._twin.begin()
        if not same or not self._parameters:
            self._parts.clear()
            twins = self._twin.parameters
            self._parameters = {name: twins[p] for name, p in self._originals.items() if p in twins}

    def taken(self, name: str) -> bool:
        """Whether the parameter has had its step in this backward pass."""
        return name in self._taken

    def begin(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """Takes note of which of a bucket's tensors have a gradient here."""
        ready = self._ready[bucket.index] = dict[str, None]()
        for name, view, here in zip(bucket.names, bucket.views, present, strict=True):
            if here and name in self._parameters:
                ready[name] = None
                self._parameters[name].grad = view

    @contextmanager
    def deliver(self, bucket: Bucket, codec: Codec) -> Iterator[Deliver | None]:
        """What takes the mean's payloads and updates parameters by them; None if the mean has to be decoded before."""
        encoded = [name for slot, name in enumerate(bucket.names) if bucket.compressed(slot)]
        if not isinstance(codec, BlockCodec) or not encoded or not set(encoded) <= set(self._ready[bucket.index]):
            yield None
            return
        with self._part(bucket.index, "encoded", encoded).from_payloads(codec) as step:
            yield None if step is None else functools.partial(self._apply, bucket, codec, step)
        if step is not None:
            self._end(encoded)
            for name in encoded:
                del self._ready[bucket.index][name]

    def _apply(self, bucket: Bucket, codec: BlockCodec, step: PayloadStep, part: slice, payload: torch.Tensor) -> None:
        total = part.stop - part.start
        for name, span in zip(bucket.names, bucket.spans, strict=True):
            begin, end = max(span.start, part.start), min(span.stop, part.stop)
            if begin < end:
                step.apply(
                    self._parameters[name],
                    payload[None],
                    span=slice(begin - span.start, end - span.start),
                    first=(begin - part.start) // codec.block,
                    total=total,
                )

    def finish(self, bucket: Bucket) -> None:
        """Updates what has a gradient here and `deliver` did not update."""
        ready = list(self._ready.pop(bucket.index))
        if ready:
            self._part(bucket.index, "all", [name for name in bucket.names if name in self._parameters]).step()
            self._end(ready)

    def finish_late(self, late: Mapping[str, torch.Tensor]) -> None:
        """When all exchanges have ended, updates parameters by gradients that came from other ranks only."""
        for name, mean in late.items():
            self._parameters[name].grad = mean
        if late:
            self._part(-1, "all", list(self._parameters)).step()
            self._end(list(late))
        self._taken.clear()
        self._twin.end()

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._parameters[name].grad = None
        self._taken.update(names)

    def _part(self, bucket: int, which: str, names: Sequence[str]) -> Part:
        """The parameters of these names; those of them that have no gradient are left alone."""
        key = (bucket, which)
        if key not in self._parts:
            self._parts[key] = Part(self._twin.optimizer, [self._parameters[name] for name in names])
        return self._parts[key]
