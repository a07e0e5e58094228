"""In which bucket each parameter's gradient lies, in which order buckets follow, and what happens to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from bagua_kernels.algorithms.engine.backward_steps import BucketSteps
from bagua_kernels.algorithms.engine.healing import Healing
from bagua_kernels.algorithms.engine.interruption import Interruption
from bagua_kernels.algorithms.engine.loss_scale import LossScale
from bagua_kernels.algorithms.engine.member import Member
from bagua_kernels.algorithms.engine.options import BucketOptions
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.bucket import Bucket, partition
from bagua_kernels.comm import Work

_FIRST_BYTES = 1 << 20  # of the first bucket: the wire is idle until it is full

# A slot of a bucket, the gradient that belongs there, and the parameter if its `grad` is to be the slot's view from then on.
Taken = tuple[int, torch.Tensor | None, torch.nn.Parameter | None]


class Buckets:
    """The buckets of some members, in an order.

    The last one carries, uncompressed, one flag per parameter and one more.

    Attributes:
        order: positions of members in the order that buckets follow.
        groups: the positions of each bucket's parameters.
        all: the buckets, in the order in which they are exchanged.
        slots: of each position, its bucket and its place in there.
        exchanges: of the buckets, once `connect` made them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        order: list[int],
        options: BucketOptions,
        before: Buckets | None = None,
        *,
        moves: bool = False,
    ) -> None:
        """Lays out buckets.

        Args:
            members: the parameters.
            order: their positions, as buckets follow.
            options: how they are put together.
            before: buckets of the same members, which are reused if the layout is the same.
            moves: True to move gradients that lie in earlier buckets, which are not used afterwards, bucket by bucket: so both
                are never there as a whole.
        """
        ordered = [members[position] for position in order]
        first = _FIRST_BYTES if options.small_first else None
        kinds = [member.kind for member in ordered]
        groups = partition([m.parameter for m in ordered], options.bucket_bytes, kinds, first)
        self.order = order
        self.groups = [[order[place] for place in group] for group in groups]
        self.all: list[Bucket]
        self._places = [(options.align, group, [members[p].exact for p in group]) for group in self.groups]
        if before is not None and before._places == self._places:
            self.all = before.all
            for bucket, group in zip(self.all, self.groups, strict=True):
                bucket.kind = members[group[0]].kind
        else:
            self.all = []
            for index, (align, group, exact) in enumerate(self._places):
                bucket = Bucket(
                    [members[p].parameter for p in group],
                    align=align,
                    exact=exact,
                    flags=len(members) + 1 if index == len(groups) - 1 else 0,
                    index=index,
                    kind=members[group[0]].kind,
                    names=[members[p].name for p in group],
                )
                self.all.append(bucket)
                if before is not None and moves:
                    before._hand_over(members, group, bucket)
        self.slots = {
            position: (bucket, slot)
            for bucket, group in zip(self.all, self.groups, strict=True)
            for slot, position in enumerate(group)
        }
        self.exchanges: list[Exchange] = []

    def _hand_over(self, members: Sequence[Member], group: Sequence[int], bucket: Bucket) -> None:
        """Moves gradients to another bucket; where all have gone, a bucket of these leaves its memory."""
        for slot, position in enumerate(group):
            parameter, (own, place) = members[position].parameter, self.slots.pop(position)
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == own.views[place].data_ptr():
                bucket.views[slot].copy_(gradient)
                parameter.grad = bucket.shown(slot)
        left = {own.index for own, _ in self.slots.values()}
        for own in self.all:
            if own.index not in left:
                own.discard()

    def connect(self, make: Callable[[Bucket], Exchange]) -> None:
        """Makes the exchanges of the buckets."""
        self.exchanges = [make(bucket) for bucket in self.all]

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What exchanges remember, of each thing a tensor for each parameter's name; collective."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for exchange in self.exchanges:
            for key, named in exchange.state().items():
                found.setdefault(key, {}).update(named)
        return found

    def load(self, state: Mapping[str, Named]) -> None:
        """Gives every exchange what `state` gave."""
        for exchange in self.exchanges:
            exchange.load(state)


def fill(
    bucket: Bucket,
    gradients: list[Taken],
    weight: float,
    exchange: Exchange | None = None,
    interruption: Interruption | None = None,
) -> None:
    """Brings gradients to their slots of a bucket, multiplied by a weight.

    Args:
        bucket: where to.
        gradients: for each slot its own; None stands for zeros. The list is emptied, so that backward can reuse the memory of
            gradients that were copied. A gradient that the exchange reads in place stays until it has been exchanged.
        weight: by which they are multiplied.
        exchange: the bucket's, if it may read gradients in place (`reads_in_place`); None copies all.
        interruption: after which no parameter gets its view any more; needed where `gradients` names parameters.
    """
    lends = exchange is not None and exchange.reads_in_place
    while gradients:
        slot, gradient, parameter = gradients.pop()
        if parameter is not None and interruption is not None:
            interruption.give(parameter, bucket.shown(slot))
        lendable = lends and weight == 1.0 and bucket.compressed(slot)
        if lendable and gradient is not None and bucket.lend(slot, gradient):
            continue
        bucket.fill(slot, gradient)
        if weight != 1.0:
            bucket.views[slot].mul_(weight)


def show(bucket: Bucket, slot: int, parameter: torch.nn.Parameter) -> None:
    """Lets a parameter's gradient be what lies in a slot of a bucket."""
    gradient, view = parameter.grad, bucket.views[slot]
    there = gradient is not None and not gradient.requires_grad and gradient.data_ptr() == view.data_ptr()
    if gradient is None or not there or gradient.stride() != view.stride() or gradient.shape != view.shape:
        parameter.grad = bucket.shown(slot)


def exchanged(
    exchange: Exchange,
    step: int,
    load: Callable[[], None],
    loss_scale: LossScale | None,
    updates: tuple[BucketSteps, list[bool]] | None,
    healing: Healing | None,
) -> Iterator[Work]:
    """What a communication thread does with a bucket; refers to nothing of the engine, which may be deleted meanwhile."""
    load()
    if healing is not None:
        healing.remember(exchange)
    if loss_scale is not None:
        exchange.scale_to(loss_scale.get())  # here, since on a GPU it waits
    if updates is not None:
        updates[0].begin(updates[1])
    yield from exchange.run(step)
    exchange.bucket.lent.clear()
    if healing is not None and healing.commits:
        healing.commit(exchange)
    if updates is not None:
        updates[0].finish()
