"""An epoch's work in one order that all ranks know, dealt to them in turn, and resumed on any number of ranks."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from bagua_kernels import comm
from bagua_kernels.comm import Communicator, Membership
from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.options import checked

Item = TypeVar("Item")
Items = TypeVar("Items", bound=Sized)
# Steps that were taken in this epoch, by how many ranks, before each change of their number.
History = tuple[tuple[int, int], ...]


class Heals(Protocol):
    """An algorithm, as far as samplers know of it.

    Attributes:
        members: among whom training heals; None if it does not.
    """

    members: Membership | None

    @property
    def passes(self) -> int:
        """Backward passes, or steps, that have ended."""


@dataclass(frozen=True)
class _Change:
    """From where on other ranks share an epoch.

    Attributes:
        place: the epoch, and the number of items that a rank has drawn of it.
        ranks: their number from there on.
        rank: this one.
        first: new ranks that were given items before, and how many each.
    """

    place: tuple[int, int]
    ranks: int
    rank: int
    first: tuple[int, int]


@dataclass(frozen=True)
class _Entry:
    """Where this rank came to an epoch of others.

    Attributes:
        place: see `SharedEpoch._place`.
        first: new ranks that are given items before they share the epoch, and how many each.
        index: of this one among them.
    """

    place: tuple[int, int, int, int]
    first: tuple[int, int]
    index: int


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
        # The epoch, the items of it that a rank like this one was given, after how many passes the last one, and how many since.
        self._place = (0, 0, -1, 0)
        self._changes: list[_Change] = []
        self._entry: _Entry | None = None
        self._model: weakref.ref[Heals] | None = None

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
        self._loaded, self._place = None, (self.epoch, sum(steps for _, steps in history), -1, 0)
        if (entry := self._entry) is not None and entry.place[0] == self.epoch:
            self._entry, self._place = None, entry.place
            # At the end of an epoch there may be none left.
            ranks, steps = entry.first
            if ranks and len(first := self._left(history, ranks)):
                for index in range(entry.index, min(len(first), ranks * steps), ranks):
                    self._begun, self._taken = (self.epoch, history), index // ranks + 1
                    yield self.item(first, index)
                history = (*history, entry.first)
        while True:
            history = (*history, *self._change())
            self._begun, self._taken = (self.epoch, history), 0
            items = self._left(history)
            for index in range(self.rank, len(items), self.num_replicas):
                if self._is_to_change():
                    break
                # Before the step: who saves a state does so after having been given the item.
                self._taken += 1
                _, drawn, before, since = self._place
                passes = self._passes()
                self._place = self.epoch, drawn + 1, passes, since + 1 if passes == before else 1
                yield self.item(items, index)
            else:
                return
            history = (*history, (self.num_replicas, self._taken))

    def follow(self, model: Heals) -> None:
        """Deals what is left of an epoch to the ranks that there are, where some are lost or join; on all ranks.

        Each rank goes on as before until it has drawn as many items as the rank that has drawn most. What the lost ranks
        drew up to there is left out. A `DataLoader` with workers draws ahead, so that more is left out. Where ranks join it has
        to have none.

        A rank that joins begins where the others are: `epoch` is the present one. If they are in the middle of a backward
        pass it takes part in that. It is given as many items for it as they were.

        Args:
            model: with `on_failure="heal"`, in whose passes the items are used.

        Raises:
            ValueError: it does not heal.
        """
        if (members := model.members) is None:
            raise ValueError("expected a model whose ranks may change: make it with on_failure='heal'")
        self._model = weakref.ref(model)
        if members.is_arriving:
            place, history, first, index = self._arrive(members)
            self._entry = _Entry(place, first, index)
            self.epoch, self._loaded = place[0], (place[0], history)
            self.num_replicas, self.rank = members.communicator.size, members.communicator.rank
        members.add(self)

    def _arrive(self, members: Membership) -> Any:
        """Returns where the others are, and the index of this one among the new ranks; where ranks are lost, of those left."""

        def call(world: Communicator) -> Any:
            with members.giving(world) as among:
                assert among is not None
                return *among.broadcast_object(None), among.rank - 1

        return members.arrive(call, self)

    def _passes(self) -> int:
        """The passes of the model that have ended."""
        model = None if self._model is None else self._model()
        return 0 if model is None else model.passes

    def report(self) -> list[int]:
        """See `Follower.report`: the epoch, items drawn of it here, the passes before the last one, and items since these."""
        return list(self._place)

    def interrupt(self, reason: str) -> None:
        """See `Follower.interrupt`; a sampler waits for nobody."""

    def enter(self, communicator: Communicator, reports: Mapping[int, list[int]]) -> None:
        """See `Follower.enter`."""
        epoch, drawn, passes, since = max(tuple(each) for each in reports.values())
        # New ranks take part in the pass of the items that were drawn last, a batch, if it has not ended.
        takes_part = drawn and passes == self._passes()
        first = (communicator.size - len(reports), since) if takes_part else (0, 0)
        self._changes.append(_Change((epoch, drawn), communicator.size, communicator.rank, first))
        model = None if self._model is None else self._model()
        assert model is not None
        assert model.members is not None
        with model.members.giving(communicator) as among:
            if among is not None:
                among.broadcast_object(((epoch, drawn, passes, since), self._history_at_changes(), first))

    def _history_at_changes(self) -> History:
        """Returns what was taken of the epoch of the last change when that takes effect."""
        epoch, ranks = self._changes[-1].place[0], self.num_replicas
        began = self._begun[0] == epoch
        history, before = (self._begun[1], self._place[1] - self._taken) if began else ((), 0)
        for change in self._changes:
            if change.place[0] == epoch:
                history, before = (*history, (ranks, change.place[1] - before)), change.place[1]
                if change.first[0] and change is not self._changes[-1]:
                    history = (*history, change.first)
            ranks = change.ranks
        return history

    def _is_to_change(self) -> bool:
        """Returns True if the next item is dealt to other ranks than the last one."""
        return bool(self._changes) and self._place[:2] >= self._changes[0].place

    def _change(self) -> History:
        """Makes the changes that are due; returns what new ranks have taken meanwhile."""
        taken: History = ()
        while self._is_to_change():
            change = self._changes.pop(0)
            self.num_replicas, self.rank = change.ranks, change.rank
            if change.first[0] and change.place[0] == self.epoch:
                taken = (*taken, change.first)
        return taken

    def __len__(self) -> int:
        """How many items the next iteration yields on each rank."""
        return len(self._left(self._behind())) // self.num_replicas

    def _behind(self) -> History:
        """What was taken of the epoch before the next iteration."""
        return self._loaded[1] if self._loaded and self._loaded[0] == self.epoch else ()

    def _left(self, history: History, ranks_now: int | None = None) -> Items:
        items, begun = self.items(self.epoch), False
        for ranks, steps in history:
            levelled, taken = self.level(items, ranks, begun), ranks * steps
            begun = begun or taken > 0
            # What those ranks have not come to is levelled for others.
            rest: Any = items if taken <= self.unchanged(items, levelled) else levelled
            items = rest[taken:]
        return self.level(items, ranks_now or self.num_replicas, begun)

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
    if comm.is_initialized() and comm.world().members is not None:
        return comm.size(), comm.rank()
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    launch = Launch.read()
    return (launch.world_size, launch.rank) if launch else (1, 0)
