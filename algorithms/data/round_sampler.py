"""Deals the samples of a dataset to ranks that take different numbers of steps in a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from bagua_kernels.algorithms.data.shares import Shares
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop
from bagua_kernels.algorithms.wrapping.agreement import agreed
from bagua_kernels.comm import Communicator, Membership
from bagua_kernels.options import checked


class RoundSampler(Sampler[list[int]]):
    """The batches of this rank, round after round: of each epoch's samples no two ranks draw the same, and none is left out.

    An epoch ends, on all ranks, with the round in which its last sample is drawn; the next one begins behind that. Batches are
    shuffled by a seed. Pass it to a `DataLoader` as `batch_sampler`, without workers: how many batches a rank draws in a round
    is known when the round begins.

    It follows a model with `on_failure="heal"`. When ranks are lost, or join, what nobody has drawn of the round under way is
    dealt anew, before all that follows. That is also what lost ranks have drawn of it, whose steps since the last round are
    lost. A rank that joins begins where the others are.
    """

    @checked
    def __init__(self, samples: int, batch_size: int, model: OuterLoop, *, seed: int = 0) -> None:
        """Begins with the first round of a model; collective.

        Args:
            samples: in the dataset, equal on all ranks.
            batch_size: samples of a step, equal on all ranks.
            model: whose steps are fed.
            seed: of the order, equal on all ranks.

        Raises:
            ValueError: a number is below 1, or numbers differ between ranks.
        """
        self._samples, self._batch_size, self._model, self._seed = samples, batch_size, model, seed
        self._orders: dict[int, list[int]] = {}
        self._shares = Shares()  # of the endless sequence of all epochs' samples, since ranks have become others
        self._rank = model.communicator.rank
        self._place = 0  # index in the places of the shares, at which the round under way begins
        self._drawn = 0  # this rank's batches of the round
        self._steps: list[int] = []  # of all ranks in the round, once it has begun here
        self._last: tuple[int, list[int]] = (0, [])  # where the round before it begins, and its steps
        self._after = _begun(model)
        members = model.members
        if members is not None and members.is_arriving:
            self._check()
            self._arrive(members)
        else:
            with agreed(type(self).__name__, model.communicator) as own:
                self._check()
                own.update(self._arguments())
        if members is not None:
            members.add(self)

    def _check(self) -> None:
        if self._samples < 1 or self._batch_size < 1:
            raise ValueError(
                f"samples and batch_size must be at least 1, got samples={self._samples} and batch_size={self._batch_size}"
            )

    @property
    def epoch(self) -> int:
        """The epoch, from 0, to which the round under way belongs."""
        return max(self._shares.epoch, self._shares.places.at(self._place) // self._samples)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields batches until the epoch's last round has been drawn.

        Raises:
            RuntimeError: a batch was drawn before the step of the one before it, as a `DataLoader` with workers does.
        """
        self._end_round()
        epoch = self.epoch
        while self.epoch == epoch:
            steps = self._steps = self._steps or self._model.steps_of_ranks
            if self._drawn < steps[self._rank]:
                begin = self._place + (sum(steps[: self._rank]) + self._drawn) * self._batch_size
                self._drawn += 1
                yield [self._sample(self._shares.places.at(index)) for index in range(begin, begin + self._batch_size)]
            elif not self._end_round():
                raise RuntimeError(
                    f"the next round begins after this rank's {self._drawn} steps, got a request for a batch before: use a "
                    "DataLoader without workers, take a step for each batch, and call the model's skip_step() for one that a "
                    "GradScaler has left out"
                )

    def _end_round(self) -> bool:
        """Goes on to the next round if all of this one has been drawn, and the model has come to its end, too."""
        steps, begun = self._steps, _begun(self._model)
        if not steps or self._drawn < steps[self._rank] or (len(steps) > 1 and begun <= self._after):
            return False
        self._last = self._place, steps
        self._place += sum(steps) * self._batch_size
        self._steps, self._drawn, self._after = [], 0, begun
        return True

    def _sample(self, place: int) -> int:
        epoch, index = divmod(place, self._samples)
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders = {old: order for old, order in self._orders.items() if old == epoch - 1}
            # waits: of a CPU's numbers, once an epoch.
            self._orders[epoch] = torch.randperm(self._samples, generator=generator).tolist()
        return self._orders[epoch][index]

    def report(self) -> dict[str, Any]:
        """See `Follower.report`: the shares, where the round begins, the steps of its ranks, and the batches of this one.

        It may have drawn a batch for a step that is still to be taken.
        """
        self._end_round()
        local, rounds = self._model.local, self._model.rounds
        members = self._model.members
        assert members is not None
        return {
            "name": members.name,
            "shares": self._shares.to_json(),
            "epoch": self.epoch,
            "place": self._place,
            "steps": self._steps,
            "rank": self._rank,
            "drawn": self._drawn,
            "ahead": int(local.in_step and not local.ending),
            "lost": None if rounds is None or rounds.unfinished is None else self._last,
        }

    def interrupt(self, reason: str) -> None:
        """See `Follower.interrupt`; a sampler waits for nobody."""

    def enter(self, communicator: Communicator, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """See `Follower.enter`."""
        members = self._model.members
        assert members is not None
        self._shares = Shares.agreed(list(reports.values()), self._batch_size, members.epoch)
        ahead = {rank: told["ahead"] for rank, told in reports.items()}
        self._begin([count - ahead.get(rank, 0) for rank, count in enumerate(self._model.steps_left)])
        with members.giving(communicator) as among:
            if among is not None:
                among.broadcast_object([self._arguments(), self._shares.to_json(), self._steps])

    def _begin(self, steps: list[int]) -> None:
        """Begins to deal the places of the shares, in the middle of a round."""
        self._steps, self._place, self._drawn = steps, 0, 0
        self._rank, self._after = self._model.communicator.rank, _begun(self._model)

    def _arguments(self) -> dict[str, int]:
        return {"samples": self._samples, "batch_size": self._batch_size, "seed": self._seed}

    def _arrive(self, members: Membership) -> None:
        """Takes the shares of another member, as a new one."""

        def call(world: Communicator) -> Any:
            with members.giving(world) as among:
                assert among is not None
                return among.broadcast_object(None)

        told, shares, steps = members.arrive(call, self)
        if told != self._arguments():
            raise ValueError(
                f"the members that run have {told}, and this new one {self._arguments()}: make the same sampler"
            )
        self._shares = Shares.from_json(shares)
        self._begin(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns where this rank is; each rank saves its own, with the model's state."""
        self._end_round()
        found: dict[str, Any] = {"place": self._place, "drawn": self._drawn}
        if self._shares.changed:
            found |= {"shares": self._shares.to_json(), "steps": self._steps}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was called, after the model's state has been loaded."""
        self._place, self._drawn = state["place"], state["drawn"]
        self._shares = Shares.from_json(state["shares"]) if "shares" in state else Shares()
        steps: Sequence[int] = state.get("steps", ())
        self._steps = list(steps) if len(steps) == self._model.communicator.size else []
        self._after = _begun(self._model)


def _begun(model: OuterLoop) -> int:
    """Returns the number of rounds that have begun; one rank alone has none."""
    rounds = model.rounds
    return 0 if rounds is None else rounds.begun
