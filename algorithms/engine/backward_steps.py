"""The optimizer's step, taken bucket by bucket while backward goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from bagua_kernels.bucket import Bucket
from bagua_kernels.comm.compressed import Deliver
from bagua_kernels.compression import BlockCodec, Codec
from bagua_kernels.launchers.multitensor import TensorUpdate
from bagua_kernels.optim.step.compressed import PayloadStep
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.part import Part
from bagua_kernels.optim.step.twin import Twin

_T = TypeVar("_T")


class BackwardSteps:
    """Updates the parameters of each bucket as soon as their mean has arrived; their `grad` is not set.

    A parameter without a gradient on this rank waits for the end of backward, when it is known whether any rank has one.
    Means that arrive as payloads of a block codec, or as thin factors, are decoded in the same pass over memory that updates the
    parameters.
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
        self._early_names: dict[int, set[str]] = {}
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

    def updated(self) -> list[str]:
        """The parameters that have had their step in this backward pass, while it is under way."""
        return sorted(self._taken)

    def taken(self, name: str) -> bool:
        """Whether the parameter has had its step in this backward pass."""
        return name in self._taken

    def begin(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """Takes note of which of a bucket's tensors have a gradient here."""
        ready = self._ready[bucket.index] = dict[str, None]()
        self._early_names.pop(bucket.index, None)
        for name, view, here in zip(bucket.names, bucket.views, present, strict=True):
            if here and name in self._parameters:
                ready[name] = None
                self._parameters[name].grad = view

    @contextmanager
    def deliver(self, bucket: Bucket, codec: Codec) -> Iterator[Deliver | None]:
        """What takes the mean's payloads and updates parameters by them; None if the mean has to be decoded before."""
        if not isinstance(codec, BlockCodec):
            yield None
            return
        encoded = [slot for slot in range(len(bucket.names)) if bucket.compressed(slot)]
        with self._early(bucket, encoded, lambda part: part.from_payloads(codec)) as step:
            yield None if step is None else functools.partial(self._apply, bucket, codec, step)

    @contextmanager
    def updates_of(self, bucket: Bucket, slots: Sequence[int]) -> Iterator[dict[int, TensorUpdate] | None]:
        """What updates parameters of some slots by a mean of thin factors; None if that has to be multiplied before."""
        with self._early(bucket, slots, Part.from_factors) as updates:
            yield None if updates is None else dict(zip(slots, updates, strict=True))

    @contextmanager
    def _early(
        self, bucket: Bucket, slots: Sequence[int], begin: Callable[[Part], AbstractContextManager[_T | None]]
    ) -> Iterator[_T | None]:
        """A step of some slots that is taken before their mean is in the bucket; None, and none taken, if that cannot be."""
        names = [bucket.names[slot] for slot in slots]
        if not names or not set(names) <= set(self._ready[bucket.index]):
            yield None
            return
        with begin(self._part(bucket.index, "encoded", names)) as step:
            yield step
        if step is not None:
            self._end(names)
            self._early_names[bucket.index] = set(names)
            for name in names:
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
        """Updates what has a gradient here and was not updated early."""
        ready = list(self._ready.pop(bucket.index))
        early = self._early_names.pop(bucket.index, set())
        if ready:
            # Other parameters for the same part would be looked for anew in each step.
            names = [name for name in bucket.names if name in self._parameters and name not in early]
            self._part(bucket.index, "rest" if early else "all", names).step()
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
