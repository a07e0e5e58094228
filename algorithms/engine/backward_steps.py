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

_T = TypeVar("_T")


class BackwardSteps:
    """Updates the parameters of each bucket as soon as its mean has arrived; `grad` is None afterwards.

    A parameter without a gradient on this rank waits for the end of backward, when it is known whether any rank has one.
    Means that arrive as payloads of a block codec, or as thin factors, are decoded in the same pass over memory that updates the
    parameters.

    Attributes:
        optimizer: whose steps are taken.
        parameters: those that it has, of those whose gradients are exchanged, by name.
        taken: names of the parameters that have had their step in the backward pass under way.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Prepares for an optimizer.

        Args:
            optimizer: one of `bagua_kernels.optim`.
            parameters: those whose gradients are exchanged, by name. What the optimizer does not have keeps its gradient.

        Raises:
            TypeError: the optimizer is not from this package, or has options with which it leaves steps to PyTorch.
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
        self.optimizer: Fused = optimizer
        # The same parameters and states, with the options of when backward began: a schedule may change them meanwhile.
        self._stepping: Fused = object.__new__(type(optimizer))
        vars(self._stepping).update(vars(optimizer))
        vars(self._stepping).update(param_groups=[], _launches=None, _made=[], _clipping=None, _encoded=None)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.taken: set[str] = set()
        self._exchanged = dict(parameters)
        self._buckets: list[BucketSteps] = []
        self._rest: Part | None = None

    def lay_out(self, buckets: Sequence[Bucket]) -> list[BucketSteps]:
        """Returns what takes the steps of each of some new buckets."""
        self._buckets = [BucketSteps(self, bucket) for bucket in buckets]
        return self._buckets

    def updates(self, name: str) -> bool:
        """Returns True if the optimizer has a parameter."""
        return name in self.parameters

    def start(self) -> None:
        """Begins a backward pass: its steps are taken with the optimizer's options of now."""
        groups, own = self.optimizer.param_groups, self._stepping.param_groups
        if len(own) != len(groups):
            own[:] = [{} for _ in groups]
        for options, group in zip(own, groups, strict=True):
            options.clear()
            # Schedules may write to a learning rate that is a tensor.
            options.update({name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in group.items()})
        self._stepping.state = self.optimizer.state
        known = {p for group in groups for p in group["params"]}
        found = {name: p for name, p in self._exchanged.items() if p in known}
        if found.keys() != self.parameters.keys():
            self.parameters, self._rest = found, None
            for bucket in self._buckets:
                bucket.forget()

    def part(self, names: Sequence[str]) -> Part:
        """The parameters of these names; those of them that have no gradient are left alone."""
        return Part(self._stepping, [self.parameters[name] for name in names])

    def end(self, names: Sequence[str]) -> None:
        """Stores that parameters have had their step."""
        for name in names:
            self.parameters[name].grad = None
        self.taken.update(names)

    def finish(self, unused: Mapping[str, torch.Tensor]) -> None:
        """When all exchanges have ended, updates parameters by gradients that came from other ranks only."""
        for name, mean in unused.items():
            self.parameters[name].grad = mean
        if unused:
            self._rest = self._rest or self.part(list(self.parameters))
            self._rest.step()
            self.end(list(unused))
        self.taken.clear()


class BucketSteps:
    """The steps of the parameters of one bucket: of all of them together, or of what is encoded and then of the rest."""

    def __init__(self, steps: BackwardSteps, bucket: Bucket) -> None:
        """Prepares for a bucket."""
        self._steps = steps
        self._bucket = bucket
        self.forget()

    def forget(self) -> None:
        """Drops what was prepared for the optimizer's parameters, since these have changed."""
        self._parts: dict[tuple[str, ...], Part] = {}
        self._ready: dict[str, None] = {}
        self._early: set[str] = set()

    def begin(self, present: Sequence[bool]) -> None:
        """Stores which of the bucket's tensors have a gradient here."""
        self._ready, self._early = {}, set()
        for name, view, here in zip(self._bucket.names, self._bucket.views, present, strict=True):
            if here and self._steps.updates(name):
                self._ready[name] = None
                self._steps.parameters[name].grad = view

    @contextmanager
    def from_payloads(self, codec: Codec) -> Iterator[Deliver | None]:
        """See `Updates.from_payloads`."""
        bucket = self._bucket
        if not isinstance(codec, BlockCodec):
            yield None
            return
        encoded = [slot for slot in range(len(bucket.names)) if bucket.compressed(slot)]
        with self._before_the_mean(encoded, lambda part: part.from_payloads(codec)) as step:
            yield None if step is None else functools.partial(self._apply, codec, step)

    @contextmanager
    def from_factors(self, slots: Sequence[int]) -> Iterator[dict[int, TensorUpdate] | None]:
        """See `Updates.from_factors`."""
        with self._before_the_mean(slots, Part.from_factors) as updates:
            yield None if updates is None else dict(zip(slots, updates, strict=True))

    @contextmanager
    def _before_the_mean(
        self, slots: Sequence[int], begin: Callable[[Part], AbstractContextManager[_T | None]]
    ) -> Iterator[_T | None]:
        """A step of some slots that is taken before their mean is in the bucket; None, and none taken, if that cannot be."""
        names = [self._bucket.names[slot] for slot in slots]
        if not names or not set(names) <= set(self._ready):
            yield None
            return
        with begin(self._part(names)) as step:
            yield step
        if step is not None:
            self._steps.end(names)
            self._early = set(names)
            for name in names:
                del self._ready[name]

    def _apply(self, codec: BlockCodec, step: PayloadStep, part: slice, payload: torch.Tensor) -> None:
        total = part.stop - part.start
        for name, span in zip(self._bucket.names, self._bucket.spans, strict=True):
            begin, end = max(span.start, part.start), min(span.stop, part.stop)
            if begin < end:
                step.apply(
                    self._steps.parameters[name],
                    payload[None],
                    span=slice(begin - span.start, end - span.start),
                    first=(begin - part.start) // codec.block,
                    total=total,
                )

    def finish(self) -> None:
        """Updates what has a gradient here and was not updated early."""
        ready = list(self._ready)
        if ready:
            # Other parameters for the same part would be looked for anew in each step.
            names = [name for name in self._bucket.names if self._steps.updates(name) and name not in self._early]
            self._part(names).step()
            self._steps.end(ready)

    def _part(self, names: Sequence[str]) -> Part:
        key = tuple(names)
        if key not in self._parts:
            self._parts[key] = self._steps.part(names)
        return self._parts[key]
