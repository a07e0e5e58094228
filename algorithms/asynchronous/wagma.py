"""Wait-avoiding group model averaging."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import torch

from bagua_kernels.algorithms.asynchronous.averages import Averages
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.asynchronous.order import Order, file_of, load
from bagua_kernels.algorithms.asynchronous.published_model import StaleRule
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import ModelOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.algorithms.wrapping.tiers import even_nodes
from bagua_kernels.comm.mailbox.courier import weakly
from bagua_kernels.comm.mailbox.groups import Butterfly, Groups, OfNodes, Shuffled
from bagua_kernels.comm.mailbox.triggered import Execution, TriggeredAverage


@register
class Wagma(CourierAlgorithm):
    """Ranks average with changing groups that any member starts, and with all ranks at times (WAGMA-SGD, Li et al., 2020).

    1. Take a step of the optimizer. The model is that of version t.
    2. Start version t for its group, unless another member has. Ranks that are late take part with their last model.
    3. Before the next pass: wait until version t is through. If it had this rank's model of version t, take the mean.
    4. If not, add mean - contributed, for each version since: the sum of all models stays the same.
    5. At the end of each period, all ranks average, and wait for each other.

    In two tiers the members of a group are nodes, of which all ranks take part.

    Options and their defaults, all by keyword::

        group=None             ranks of a group; by default the power of two that is nearest to the root of their number
        period=10              versions of which the last one averages all ranks; None for never
        groups=None            who averages with whom; by default a `Butterfly` where all numbers are powers of two,
                               `Shuffled` elsewhere
        stale_rule='conservative'
                               what a late rank makes of the mean: "conservative" as in step 4, or "paper", x = (S mean
                               + x) / (S + 1)
        activate='group'       who gets a letter about a version from its first rank: its group, or all ranks as in the
                               paper
        seed=0                 of `Shuffled`
        record=None            a folder for the order of what happened on each rank, from which `simulate.replay`
                               recomputes all models
        replay=None            the folder of a recorded run of as many ranks, whose order this run follows
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        scaler=None            a `GradScaler` that may leave out this optimizer's step on one rank alone
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "wagma"
    needs_even_nodes = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        group: int | None = None,
        period: int | None = 10,
        groups: Groups | None = None,
        stale_rule: StaleRule = "conservative",
        activate: Literal["group", "all"] = "group",
        seed: int = 0,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            group: ranks of a group; by default the power of two that is nearest to the root of their number.
            period: versions of which the last one averages all ranks; None for never.
            groups: who averages with whom; by default a `Butterfly` where all numbers are powers of two, `Shuffled` elsewhere.
            stale_rule: what a late rank makes of the mean: "conservative" as in step 4, or "paper", x = (S mean + x) / (S + 1).
            activate: who gets a letter about a version from its first rank: its group, or all ranks as in the paper.
            seed: of `Shuffled`.
            record: a folder for the order of what happened on each rank, from which `simulate.replay` recomputes all models.
            replay: the folder of a recorded run of as many ranks, whose order this run follows.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: an option has no such value, or ranks have different groups.
        """
        if group is not None and group < 1:
            raise ValueError(f"group must be at least 1, or None, got {group=}")
        if period is not None and period < 1:
            raise ValueError(f"period must be at least 1, or None, got {period=}")
        if stale_rule not in ("conservative", "paper"):
            raise ValueError(f"stale_rule must be 'conservative' or 'paper', got {stale_rule!r}")
        if activate not in ("group", "all"):
            raise ValueError(f"activate must be 'group' or 'all', got {activate!r}")
        if groups is not None:
            self.refuses_tiers = "groups that were given are groups of ranks, not of nodes"
        elif record is not None or replay is not None:
            self.refuses_tiers = "simulate.replay recomputes means of all members at once, not first those of nodes"
        self.group, self.period, self.groups, self.seed = group, period, groups, seed
        self.stale_rule, self.activate = stale_rule, activate
        self.record, self.replay = record, replay
        super().__init__(module, optimizer, **options)

    def averages_for(self, local: LocalModel) -> GroupAverages:
        """See `CourierAlgorithm.averages_for`."""
        size, nodes = local.communicator.size, even_nodes(local.communicator)
        count = size if nodes is None else len(nodes)
        groups = self.groups or _groups(count, max(2, self.group or 1 << round(math.log2(count) / 2)), self.seed)
        if nodes is not None:
            groups = OfNodes(size, groups, nodes)
        order = None
        if self.record is not None or self.replay is not None:
            rank = local.communicator.rank
            events = None if self.replay is None else load(file_of(self.replay, rank))
            order = Order(None if self.record is None else file_of(self.record, rank), events)
        return GroupAverages(local, groups, self.period, self.activate, self.stale_rule, order, nodes)


class GroupAverages(Averages):
    """Starts a version of the model for its group after each step."""

    def __init__(
        self,
        local: LocalModel,
        groups: Groups,
        period: int | None,
        activate: Literal["group", "all"],
        stale_rule: StaleRule,
        order: Order | None,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Makes the courier; collective. Arguments as for `Wagma` and `Averages`."""
        super().__init__(local, stale_rule, order)
        groups.check(local.communicator)
        self._staleness: Counter[int] = Counter()
        self._fresh, self._version = 0, -1
        self.average = self._triggered = TriggeredAverage(
            self.courier,
            groups,
            period,
            self.model,
            activate=activate,
            nodes=nodes,
            on_execution=weakly(self._count),
            # A record has whole versions.
            ends_early=order is None,
        )

    def next_version(self) -> int:
        """See `Averages.next_version`."""
        self._version = self._triggered.arrived + 1
        return self._version

    def resumed(self) -> None:
        """See `Averages.resumed`: versions go on from the last one of the ranks that have taken most steps."""
        self._version = self.model.version = self._triggered.arrived

    def after_step(self) -> None:
        """See `Averages.after_step`: steps 1 and 2."""
        self._triggered.arrive(self._version)

    def before_training(self) -> None:
        """See `Averages.before_training`: step 3."""
        self._triggered.wait(self._version)

    def _count(self, execution: Execution) -> None:
        self._fresh += execution.fresh
        self._staleness[execution.staleness] += 1

    def stats(self, stats: Stats) -> Stats:
        """See `Loop.stats`."""
        versions = sum(self._staleness.values())
        return replace(
            super().stats(stats),
            rounds=versions,
            fresh=self._fresh / versions if versions else None,
            staleness=dict(sorted(self._staleness.items())),
        )


def _groups(size: int, group: int, seed: int) -> Groups:
    powers = all(not number & (number - 1) for number in (size, group))
    return Butterfly(size, group) if powers else Shuffled(size, group, seed)
