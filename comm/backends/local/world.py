"""What ranks that are threads share: who is lost, which collectives are under way, and how to wait for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.mailbox.clock import Clock, RealClock
from bagua_kernels.comm.work import Pending
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError, RankLostError

T = TypeVar("T")
Parts = list[torch.Tensor]
Combine = Callable[[list[Any]], Parts]


def synchronize(device: torch.device) -> None:
    """Blocks the host until the work of the current stream of a GPU is done; returns at once for a CPU.

    Threads have streams of their own. A tensor passes from one thread to another only after this call.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class LocalGroup:
    """Ranks (numbers of the world), the collectives under way among them, and their undelivered messages."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.secret = Secret.random()
        self.gone: dict[int, str] = {}
        self.collectives: dict[int, Collective] = {}
        # (from, to, tag, how many went before) -> message, so that receives are served in the order they were started.
        self.mail: dict[tuple[int, int, int, int], torch.Tensor] = {}


class Collective:
    """One collective: what every rank brought, and once all are there, what every rank takes home."""

    def __init__(self, signature: tuple[object, ...], first: int) -> None:
        self.signature = signature
        self.first = first
        self.brought: dict[int, Any] = {}
        self.calls: dict[int, str] = {}
        self.results: Parts | None = None
        self.mismatch = ""
        self.last = first


class LocalWorld:
    """What ranks that are threads have in common: one lock, who is lost and why, and the groups they have made.

    Args:
        size: the number of ranks.
        timeout: seconds after which an operation that does not finish raises an error.
        device: where tensors are; the CPU by default.
        clock: where time and waiting come from; real time by default.
    """

    def __init__(
        self, size: int, timeout: float = 20.0, device: torch.device | None = None, clock: Clock | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"expected at least one rank, got {size=}")
        if not timeout > 0:
            raise ValueError(f"expected a number of seconds above zero, got {timeout=}")
        self.size = size
        self.timeout = timeout
        self.device = torch.device("cpu") if device is None else device
        self.clock = RealClock() if clock is None else clock
        self.changed = self.clock.condition()
        self.lost: dict[int, str] = {}
        self._shared: dict[object, object] = {}

    def group(self, key: object, ranks: tuple[int, ...]) -> LocalGroup:
        """Returns the group of that key, made by the first thread that calls this."""
        return self.shared(key, lambda: LocalGroup(ranks))

    def shared(self, key: object, make: Callable[[], T]) -> T:
        """Returns the object of that key, made by the first thread that calls this."""
        with self.changed:
            if key not in self._shared:
                self._shared[key] = make()
            return cast(T, self._shared[key])

    def lose(self, rank: int, reason: str) -> None:
        """Marks a rank as lost: ranks that wait for it raise `RankLostError`."""
        with self.changed:
            self.lost.setdefault(rank, reason)
            self.changed.notify_all()

    def reason(self, group: LocalGroup, rank: int) -> str:
        """Returns why rank `rank` of a group is lost, or an empty text; the caller holds the lock."""
        return group.gone.get(rank) or self.lost.get(group.ranks[rank], "")


@dataclass(eq=False, repr=False)
class LocalWork(Pending):
    """Waits until no rank is missing, then copies the result into the output on the waiting thread.

    Attributes:
        world: whose lock and list of lost ranks count.
        group: the ranks that take part.
        rank: this rank in the group.
        name: what to call the operation in an error.
        missing: returns the ranks of the group that are waited for; raises if the operation has failed for all.
        take: returns the result, once nobody is missing.
        output: where the result goes, if anywhere.
    """

    world: LocalWorld
    group: LocalGroup
    rank: int
    name: str
    missing: Callable[[], list[int]]
    take: Callable[[], torch.Tensor]
    output: torch.Tensor | None

    def __post_init__(self) -> None:
        super().__init__(self.world.clock.condition(), self.world.clock.now)

    def is_completed(self) -> bool:
        """Returns True if `wait` would return, or raise, at once."""
        with self.world.changed:
            try:
                return self._done or self._error is not None or self._ready()
            except CommunicationError:
                return True

    def _complete(self) -> None:
        deadline = (self.world.clock.now() if self._started is None else self._started) + self.world.timeout
        with self.world.changed:
            while not self._ready():
                left = deadline - self.world.clock.now()
                if left <= 0:
                    raise self._late(self.missing())
                self.world.changed.wait(left)

    def _conclude(self) -> None:
        with self.world.changed:
            result = self.take()
        if self.output is None:
            return
        if self.output.numel() != result.numel():
            raise MismatchError(f"{self.name} expects {self.output.numel()} elements where {result.numel()} were sent")
        self.output.view(-1).copy_(result)
        # The memory of the result belongs to another thread's stream, which may use it again.
        synchronize(self.world.device)

    def _ready(self) -> bool:
        """Returns True if all that is waited for is there; raises if it never will be."""
        missing = self.missing()
        if not missing:
            return True
        if reason := self.group.gone.get(self.rank):
            raise CommunicationError(f"{self.name} was given up: {reason}")
        reasons = {rank: self.world.reason(self.group, rank) for rank in missing}
        lost = [rank for rank in missing if reasons[rank]]
        if lost:
            text = "; ".join(f"rank {rank} was lost ({reasons[rank]})" for rank in lost)
            raise RankLostError(f"{text} during {self.name}", ranks=lost)
        return False

    def _late(self, missing: list[int]) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self.name} did not end within {self.world.timeout:g} s: rank {', '.join(map(str, missing))} did not "
            "take part; make all ranks issue the same operations, or raise timeout=",
            ranks=missing,
        )
