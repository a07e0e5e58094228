"""Local steps with slow momentum: SlowMo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.local_steps.kind import kind_of
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop, OuterOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import ReduceOp, Work
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import SLOW_MOMENTUM


@register
class SlowMo(OuterLoop):
    """Ranks train by themselves, and a slow momentum follows their mean (SlowMo, Wang et al., ICLR 2020, algorithm 1).

    With the optimizer's learning rate lr at the end of the round, the largest of all ranks:

    1. Take `interval` steps of the optimizer.
    2. d = mean(start - x) over all ranks.
    3. u = slow_momentum u + d / lr; start -= slow_lr lr u.
    4. x = start.

    What is kept is v = lr u, which has the units of parameters: v = slow_momentum (lr / the last round's lr) v + d. With slow_lr
    1 and slow_momentum 0 that is `LocalSGD`, bit for bit.
    """

    name = "slow_mo"
    # Ranks agree on a learning rate in each round.
    takes_quorum = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 16,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        **options: Unpack[OuterOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`; each of its groups may have a learning rate of its own.
            interval: as for `OuterLoop`.
            slow_lr: of step 3.
            slow_momentum: of step 3, at least 0 and below 1.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: a number does not fit, or as for `OuterLoop`.
        """
        if not slow_lr > 0 or not 0 <= slow_momentum < 1:
            raise ValueError(
                f"slow_lr must be above 0, slow_momentum from 0 to below 1, got {slow_lr=} and {slow_momentum=}"
            )
        self.slow_lr, self.slow_momentum = slow_lr, slow_momentum
        self._group = {}
        if optimizer is not None:
            groups = enumerate(optimizer.param_groups)
            self._group = {p: number for number, group in groups for p in group["params"]}
        # Learning rates of the groups: at the end of the round that is sent, and of the one before.
        self._sent_at: dict[int, float] = {}
        self._last: dict[int, float] = {}
        super().__init__(module, optimizer, interval=interval, **options)

    @property
    def acts_alone(self) -> bool:
        """See `Algorithm.acts_alone`."""
        return (self.slow_lr, self.slow_momentum) != (1.0, 0.0)

    def part(self, name: str, parameter: torch.Tensor) -> int:
        """See `OuterLoop.part`: its group in the optimizer, with a learning rate of its own."""
        return self._group[parameter]

    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """See `RoundAlgorithm.exchange`."""
        number = kind_of(bucket).part
        # Before a scheduler sets that of the next step.
        # A rank that is through takes no more steps, and has its last one's.
        own = 0.0 if self.is_through else float(self._optimizer.param_groups[number]["lr"])
        rate = torch.full((1,), own, dtype=torch.float64, device=bucket.flat.device)
        yield from super().exchange(bucket, turn)
        if self._communicator.size > 1:
            # Outer parameters would differ between ranks if their learning rates did.
            yield self.rounds.all_reduce(rate, ReduceOp.MAX)
        # waits: once a round: the outer step of the host takes the rate.
        self._sent_at[number] = float(rate)

    def outer_step(self, bucket: Bucket, start: torch.Tensor, mean: torch.Tensor, turn: int) -> None:
        """See `OuterLoop.outer_step`."""
        number = kind_of(bucket).part
        rate = self._sent_at[number]
        before = self._last.get(number, rate)
        # Without a learning rate there was no step that a momentum could be made of.
        ratio = rate / before if before else 0.0
        momentum = self.flat.kept(bucket, "slow_momentum")
        elementwise.apply(SLOW_MOMENTUM, [start, momentum, mean], [self.slow_lr, self.slow_momentum * ratio])

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`."""
        super().wait()
        # Other buckets of a group need that of before until all are through.
        self._last |= self._sent_at

    def load_vectors(self, states: list[Mapping[str, Any]]) -> None:
        """See `ModelAlgorithm.load_vectors`; with the learning rates that belong to the momentum."""
        super().load_vectors(states)
        self._load_rates(states[0]["numbers"])

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`."""
        return super().numbers() | {f"lr of group {number}": rate for number, rate in self._last.items()}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        """See `ModelAlgorithm.load_numbers`."""
        super().load_numbers(numbers)
        self._load_rates(numbers)

    def _load_rates(self, numbers: Mapping[str, float]) -> None:
        rates = {name: rate for name, rate in numbers.items() if name.startswith("lr of group ")}
        self._last = {int(name.rpartition(" ")[2]): rate for name, rate in rates.items()}
        self._sent_at = dict(self._last)
