"""Outer steps by the pseudo-gradients of a quorum of ranks, instead of those of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.policy.schedule import Schedule
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.quorum import Post, Quorum
from bagua_kernels.compression import Codec

Means = Mapping[GatheredMean, torch.Tensor]  # of each bucket's exchange, float32


def check_quorum(quorum: int | None, grace: float, refused: Mapping[str, bool]) -> None:
    """Raises if a quorum's numbers do not fit.

    Args:
        quorum: ranks that are enough for a merge; None for all, in step.
        grace: seconds for which a merge waits for further ranks.
        refused: options that do not go with a quorum, and whether they are used.

    Raises:
        ValueError: a number does not fit, or there is such an option.
    """
    if quorum is None:
        if grace:
            raise ValueError(f"grace is for a quorum, which has no value, got {grace=}")
        return
    if quorum < 1 or not 0 <= grace < float("inf"):
        raise ValueError(f"quorum must be at least 1, grace 0 or more seconds, got {quorum=} and {grace=}")
    if used := [name for name, is_used in refused.items() if is_used]:
        raise ValueError(f"a quorum does not go with {', '.join(used)}: ranks have no rounds in common; leave it out")


def only_codec(schedule: Schedule | None) -> Codec | None:
    """Returns the codec of a schedule that has one.

    Raises:
        ValueError: it has several, and ranks of a quorum are in different rounds.
    """
    if schedule is None:
        return None
    if len(schedule.starts) > 1:
        raise ValueError("a quorum takes one codec for all rounds, since ranks are in different ones")
    return schedule.codecs[0]


class QuorumMerges:
    """Posts this rank's pseudo-gradients, and keeps the means of merges until training uses them.

    Merges and their means are made beside training. A mean of P models takes the memory of one, until it is used.
    """

    def __init__(
        self, mailbox: Mailbox, count: int, grace: float, exchanges: Sequence[GatheredMean], parts: Sequence[int]
    ) -> None:
        """Makes the courier; `courier.start` starts it.

        Args:
            mailbox: of this rank.
            count: as for `Quorum`.
            grace: as for `Quorum`.
            exchanges: of each bucket of pseudo-gradients.
            parts: of the model to which each bucket belongs.
        """
        self.courier = Courier(mailbox, "courier of merges")
        self._quorum = Quorum(self.courier, count, grace, buffers=self._buffers, merge=self._merge)
        self._exchanges: dict[int, list[GatheredMean]] = {}
        for exchange, part in zip(exchanges, parts, strict=True):
            self._exchanges.setdefault(part, []).append(exchange)
            exchange.compile()
        self._merged: dict[int, deque[tuple[Means, list[tuple[int, int]]]]] = {
            part: deque() for part in self._exchanges
        }
        self._counted: dict[int, dict[int, int]] = {part: {} for part in self._exchanges}
        self._own: dict[int, int] = {}
        self._used: dict[int, int] = dict.fromkeys(self._exchanges, 0)
        self._earlier: dict[int, int] = dict.fromkeys(self._exchanges, 0)
        self._posts = 0

    def post(self, part: int, weight: float) -> None:
        """Sends the pseudo-gradients that are in the buckets of a part, with their weight in the mean."""
        payloads = [exchange.encode(self._posts) for exchange in self._exchanges[part]]
        self._posts += 1
        self._own[part] = self._quorum.post(part, weight, payloads)

    def wait(self, part: int) -> list[Means]:
        """Returns the merges of a part since the last call; waits until there is one. Errors as of `Quorum.wait`."""
        self._quorum.wait(part, self._used[part])
        return self.new(part)

    def new(self, part: int) -> list[Means]:
        """Returns the merges of a part since the last call."""
        with self.courier.changed:
            found = list(self._merged[part])
            self._merged[part].clear()
            self._used[part] += len(found)
        for _, posts in found:
            for rank, number in posts:
                self._counted[part][rank] = max(number, self._counted[part].get(rank, -1))
        return [means for means, _ in found]

    @property
    def used(self) -> int:
        """How many merges this rank has used, of all parts."""
        return sum(self._used.values())

    def counted(self) -> list[list[int]]:
        """Returns, of each part and rank, the number of the last post in merges that this rank has used."""
        return [[part, *pair] for part, ranks in self._counted.items() for pair in ranks.items()]

    def is_counted(self, part: int, counted: Sequence[Sequence[int]]) -> bool:
        """Returns True if this rank's last post of a part is in merges that another one has used, which has `counted` them."""
        own, rank = self._own.get(part), self.courier.mailbox.rank
        return any(own is not None and [part, rank] == list(each[:2]) and own <= each[2] for each in counted)

    def rest(self, look: Callable[[], None], *, last: bool = False) -> list[int]:
        """See `Quorum.rest`."""
        return self._quorum.rest(look, last=last)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it: the number of posts, and of merges of each part that were used."""
        merges = {str(part): self._earlier[part] + self._used[part] for part in self._exchanges}
        return {"posts": self._posts, "merges": merges}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned."""
        # Seeds of what is encoded go on.
        self._posts = numbers.get("posts", 0)
        for part in self._exchanges:
            self._earlier[part] = numbers.get("merges", {}).get(str(part), 0) - self._used[part]

    def _buffers(self, part: int) -> list[torch.Tensor]:
        return [exchange.empty() for exchange in self._exchanges[part]]

    @torch.no_grad()
    def _merge(self, part: int, posts: Sequence[Post]) -> None:
        means = {}
        for place, exchange in enumerate(self._exchanges[part]):
            mean = means[exchange] = torch.empty_like(exchange.bucket.flat)
            exchange.combine([post.payloads[place] for post in posts], [post.weight for post in posts], mean)
            exchange.bucket.clear_gaps(mean)
        with self.courier.changed:
            self._merged[part].append((means, [(post.rank, post.number) for post in posts]))
