"""Local steps with slow momentum: SlowMo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import torch

from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop, OuterOptions
from bagua_kernels.algorithms.local_steps.outer_round import OuterParts, OuterRound
from bagua_kernels.algorithms.local_steps.outer_rule import Number
from bagua_kernels.algorithms.models.local_model import LocalModel
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

    The state is v = lr u, which has the units of parameters: v = slow_momentum (lr / the last round's lr) v + d. With slow_lr
    1 and slow_momentum 0 that is `LocalSGD`, bit for bit.

    Options and their defaults, all by keyword::

        interval=16            optimizer's steps from one round to the next
        slow_lr=1.0            of step 3
        slow_momentum='auto'   of step 3, at least 0 and below 1; "auto" for one that follows the rounds, see
                               `Agreement`
        codec=None             of pseudo-gradients: a codec, its spec, or codecs by the round from which on they are
                               used
        error_feedback=None    True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None    True if the owners of chunks do; by default as `error_feedback`
        exact='1d'             patterns of names of parameters that no codec encodes; "1d" for all biases and norms
        min_numel=512          parameters with fewer elements are exact too
        seed=0                 of random numbers
        delay=0                optimizer's steps, less than `interval`, that an exchange may take beside training
        blend=None             from 0 to 1: the share of a rank's own parameters when a result is used
        sync_state=None        how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al.,
                               2025)
        penalty=None           a `Penalty` for pseudo-gradients with large norms; None for none
        by_speed=False         True if ranks take steps in proportion to their speeds, of which `interval` is the mean
                               then
        quorum=None            ranks whose pseudo-gradients are enough for an outer step; None for all
        grace=0.0              seconds for which a quorum waits for further ranks
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none, at the
                               first round after so many steps
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
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
        slow_momentum: Number = "auto",
        **options: Unpack[OuterOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`; each of its groups may have a learning rate of its own.
            interval: as for `OuterLoop`.
            slow_lr: of step 3.
            slow_momentum: of step 3, at least 0 and below 1; "auto" for one that follows the rounds, see `Agreement`.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: a number does not fit, or as for `OuterLoop`.
        """
        if not slow_lr > 0 or not (slow_momentum == "auto" or 0 <= slow_momentum < 1):
            raise ValueError(
                f"slow_lr must be above 0, slow_momentum from 0 to below 1, got {slow_lr=} and {slow_momentum=}"
            )
        self.slow_lr, self.slow_momentum = slow_lr, slow_momentum
        self.follows_agreement = slow_momentum == "auto"
        if optimizer is not None:
            # Each group has a learning rate of its own.
            groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
            self.parts = {name: groups[p] for name, p in module.named_parameters() if p in groups}
        self.acts_alone = (self.slow_lr, self.slow_momentum) != (1.0, 0.0)
        super().__init__(module, optimizer, interval=interval, **options)

    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        """See `OuterLoop.round_for`."""
        return SlowRound(local, bucket, self.setup.parts_for(bucket), SlowMomentum(self.slow_lr, self.slow_momentum))


class SlowMomentum:
    """Step 3 of `SlowMo`, of one bucket.

    Attributes:
        rate: the optimizer's learning rate at the end of the round that is sent.
        last: that of the round before; None in the first one.
    """

    def __init__(self, lr: float, momentum: Number) -> None:
        """Begins before the first round; arguments as of `SlowMo`."""
        self._lr, self._momentum = lr, momentum
        self.rate: float | None = None
        self.last: float | None = None

    def step(self, part: OuterRound, start: torch.Tensor, mean: torch.Tensor) -> None:
        """See `OuterRule.step`."""
        assert self.rate is not None
        before = self.rate if self.last is None else self.last
        # Without a learning rate there was no step that a momentum could be made of.
        ratio = self.rate / before if before else 0.0
        momentum = part.kept("slow_momentum")
        decay = self._momentum
        if decay == "auto":
            assert part.agreement is not None
            decay = part.agreement.slow_momentum(self._lr)
        elementwise.apply(SLOW_MOMENTUM, [start, momentum, mean], [self._lr, decay * ratio])
        self.last = self.rate


class SlowRound(OuterRound):
    """Agrees on the learning rate of a bucket's group in each round."""

    def __init__(self, local: LocalModel, bucket: Bucket, parts: OuterParts, rule: SlowMomentum) -> None:
        """Begins before the first round; arguments as for `OuterRound`."""
        super().__init__(local, bucket, parts, rule)
        self._slow, self._communicator = rule, parts.exchange.communicator

    def run(self, number: int) -> Iterator[Work]:
        """See `Round.run`."""
        # Before a scheduler sets that of the next step.
        # A rank that is through takes no more steps, and has its last one's.
        group = self.local.optimizer.param_groups[self.kind.part]
        own = 0.0 if self.local.is_through else float(group["lr"])
        rate = torch.full((1,), own, dtype=torch.float64, device=self.bucket.flat.device)
        yield from super().run(number)
        if self._communicator.size > 1:
            # Outer parameters would differ between ranks if their learning rates did.
            yield self._communicator.all_reduce(rate, ReduceOp.MAX)
        # waits: once a round: the outer step of the host takes the rate.
        self._slow.rate = float(rate)

    def numbers(self) -> dict[str, Any]:
        """See `Round.numbers`."""
        own = {} if self._slow.last is None else {"learning_rates": {self._group: self._slow.last}}
        return super().numbers() | own

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Round.load_numbers`."""
        super().load_numbers(numbers)
        self._load_rate(numbers)

    def load_common(self, numbers: Mapping[str, Any]) -> None:
        """See `OuterRound.load_common`: the learning rate that belongs to the momentum, too."""
        super().load_common(numbers)
        self._load_rate(numbers)

    def _load_rate(self, numbers: Mapping[str, Any]) -> None:
        self._slow.rate = self._slow.last = numbers.get("learning_rates", {}).get(self._group)

    @property
    def _group(self) -> str:
        return str(self.kind.part)
