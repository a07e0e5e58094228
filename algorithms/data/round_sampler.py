"""Deals the samples of a dataset to ranks that take different numbers of steps in a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import Sampler

from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop
from bagua_kernels.algorithms.wrapping.agreement import agreed
from bagua_kernels.options import checked


class RoundSampler(Sampler[list[int]]):
    """The batches of this rank, round after round: of each epoch's samples no two ranks draw the same, and none is left out.

    An epoch ends, on all ranks, with the round in which its last sample is drawn; the next one begins behind that. Batches are
    shuffled by a seed. Pass it to a `DataLoader` as `batch_sampler`, without workers: how many batches a rank draws in a round
    is known when the round begins.
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
        with agreed(type(self).__name__, model.communicator) as own:
            if samples < 1 or batch_size < 1:
                raise ValueError(f"samples and batch_size must be at least 1, got {samples=} and {batch_size=}")
            own.update(samples=samples, batch_size=batch_size, seed=seed)
        self._samples, self._batch_size, self._model, self._seed = samples, batch_size, model, seed
        self._place = 0  # in the endless sequence of all epochs' samples, where the round under way begins
        self._drawn = 0  # this rank's batches of the round
        self._steps: list[int] = []  # of all ranks in the round, once it has begun here
        self._orders: dict[int, list[int]] = {}
        self._after = _begun(model)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields batches until the epoch's last round has been drawn.

        Raises:
            RuntimeError: a batch was drawn before the step of the one before it, as a `DataLoader` with workers does.
        """
        self._end_round()
        epoch = self._place // self._samples
        own = self._model.communicator.rank
        while self._place // self._samples == epoch:
            self._steps = self._steps or self._model.steps_of_ranks
            begin = self._place + (sum(self._steps[:own]) + self._drawn) * self._batch_size
            while self._drawn < self._steps[own]:
                batch = [self._sample(place) for place in range(begin, begin + self._batch_size)]
                self._drawn, begin = self._drawn + 1, begin + self._batch_size
                yield batch
            if not self._end_round():
                raise RuntimeError(
                    f"the next round begins after this rank's {self._drawn} steps, got a request for a batch before: use a "
                    "DataLoader without workers, take a step for each batch, and call the model's skip_step() for one that a "
                    "GradScaler has left out"
                )

    def _end_round(self) -> bool:
        """Goes on to the next round if all of this one has been drawn, and the model has come to its end, too."""
        steps, begun = self._steps, _begun(self._model)
        if not steps or self._drawn < steps[self._model.communicator.rank] or (len(steps) > 1 and begun <= self._after):
            return False
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

    def state_dict(self) -> dict[str, int]:
        """Returns where this rank is; each rank saves its own, with the model's state."""
        self._end_round()
        return {"place": self._place, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where `state_dict` was called, after the model's state has been loaded."""
        self._place, self._drawn, self._steps = state["place"], state["drawn"], []
        self._after = _begun(self._model)


def _begun(model: OuterLoop) -> int:
    """Returns the number of rounds that have begun; one rank alone has none."""
    rounds = model.rounds
    return 0 if rounds is None else rounds.begun
