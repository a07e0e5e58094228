"""An epoch's work in one order that all ranks know, dealt to them in turn, and resumed on any number of ranks."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.options import checked

Item = TypeVar("Item")
Items = TypeVar("Items", bound=Sized)
# Steps that were taken in this epoch, by how many ranks, before each change of their number.
History = tuple[tuple[int, int], ...]


class SharedEpoch(Sampler[Item], Generic[Item, Items]):
    """Item `ranks * step + rank` of an epoch belongs to a rank's step; there are as many steps on each rank.

    The order is a function of the seed and the epoch alone. Only its end depends on the number of ranks, which has to divide
    the number of items: `level` sees to it.
    """

    @checked
    def __init__(self, num_replicas: int | None, rank: int | None, seed: int) -> None:
        """Learns who shares the epoch.

        Args:
            num_replicas: number of ranks; of `torch.distributed` or of the launcher if None, and 1 without either.
            rank: of this process, likewise.
            seed: of all epochs' orders, equal on all ranks.

        Raises:
            ValueError: there is no such rank.
        """
        found = ranks_here()
        self.num_replicas = found[0] if num_replicas is None else num_replicas
        self.rank = found[1] if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"expected a rank from 0 to num_replicas - 1, got {self.rank} of {self.num_replicas}")
        self.seed, self.epoch = seed, 0
        self._loaded: tuple[int, History] | None = None  # epoch, and what was taken of it before
        self._begun: tuple[int, History] = (0, ())  # the same of the iteration under way, or of the last one
        self._taken = 0  # its steps
        self._drawn: tuple[int, Items] | None = None  # the last epoch that was asked for

    def items(self, epoch: int) -> Items:
        """Returns an epoch's items in order, whatever the number of ranks."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self.draw(epoch)
        return self._drawn[1]

    @abc.abstractmethod
    def draw(self, epoch: int) -> Items:
        """Makes what `items` returns."""

    @abc.abstractmethod
    def level(self, items: Items, ranks: int, begun: bool = False) -> Items:
        """Returns items whose number the number of ranks divides.

        Args:
            items: of an epoch, or what is left of it.
            ranks: their number.
            begun: True if some of the epoch have been taken, so that none may be left.
        """

    @abc.abstractmethod
    def unchanged(self, items: Items, levelled: Items) -> int:
        """Returns with how many of its items a levelled order begins."""

    @abc.abstractmethod
    def item(self, items: Items, index: int) -> Item:
        """Returns what a step is given of an item."""

    def set_epoch(self, epoch: int) -> None:
        """Draws another order for the next iteration; in the epoch of a loaded state it goes on where that was saved.

        Args:
            epoch: from 0, equal on all ranks.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[Item]:
        """Yields this rank's part of the epoch, or what a loaded state has left of it."""
        history = self._behind()
        self._loaded, self._begun, self._taken = None, (self.epoch, history), 0
        items = self._left(history)
        for index in range(self.rank, len(items), self.num_replicas):
            # Before the step: who saves a state does so after having been given the item.
            self._taken += 1
            yield self.item(items, index)

    def __len__(self) -> int:
        """How many items the next iteration yields on each rank."""
        return len(self._left(self._behind())) // self.num_replicas

    def _behind(self) -> History:
        """What was taken of the epoch before the next iteration."""
        return self._loaded[1] if self._loaded and self._loaded[0] == self.epoch else ()

    def _left(self, history: History) -> Items:
        items, begun = self.items(self.epoch), False
        for ranks, steps in history:
            levelled, taken = self.level(items, ranks, begun), ranks * steps
            begun = begun or taken > 0
            # What those ranks have not come to is levelled for others.
            rest: Any = items if taken <= self.unchanged(items, levelled) else levelled
            items = rest[taken:]
        return self.level(items, self.num_replicas, begun)

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Returns where this rank is; equal on all ranks after the same step.

        Args:
            steps: items of this iteration, samples or batches, with which the model was trained. By default all that
                were yielded, which is too many for a `DataLoader` with workers: they draw ahead.

        Raises:
            ValueError: fewer than that were yielded.
        """
        history = self._behind()
        if self._loaded is None and self._begun[0] == self.epoch:
            taken = self._taken if steps is None else steps
            if not 0 <= taken <= self._taken:
                raise ValueError(f"expected steps from 0 to the {self._taken} that were yielded, got {steps}")
            history = (*self._begun[1], (self.num_replicas, taken))
        return {"epoch": self.epoch, "seed": self.seed, "history": [list(one) for one in history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where a state was saved, also on another number of ranks.

        Raises:
            ValueError: the state has another seed.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"the state was saved with seed={state['seed']}, but this sampler has seed={self.seed}")
        self.epoch = state["epoch"]
        self._loaded = self.epoch, tuple((ranks, steps) for ranks, steps in state["history"])


def ranks_here() -> tuple[int, int]:
    """Returns the number of ranks, and this process's own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    launch = Launch.read()
    return (launch.world_size, launch.rank) if launch else (1, 0)
