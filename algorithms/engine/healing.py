"""What a backward pass keeps, so that it can be repeated by the ranks that are left after a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from bagua_kernels.algorithms.exchanges.exchange import WHOLE, Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named, copied
from bagua_kernels.comm import Communicator, Membership, ReduceOp
from bagua_kernels.comm.mailbox.courier import weakly

_PARTS = "owner"  # the key of what ranks have in parts
_OWED = ("worker", "residual")  # keys of what a rank has not sent yet


class Healing:
    """Of the pass under way: the gradients of this rank, and what exchanges remembered before it.

    A pass ends with a barrier. Who comes through it knows that all ranks have all means. So there are two cases once a rank is
    lost: some rank has come through, and all others have the means as well; or no rank has used any, and all repeat the pass.

    Where parameters are updated in backward, there is such a barrier behind each bucket, and no rank uses its mean before. So
    each bucket has these two cases by itself.

    Attributes:
        members: of which there are fewer after a loss. Then the engine is given other communicators.
        is_complete: True once other ranks are known to have come to the end of the pass in which an exchange failed here.
        was_complete: True if that was so in the last pass that has ended here.
        is_undone: True once exchanges have gone back to what they remembered before the pass under way, which is repeated.
        commits: True if there is a barrier behind each bucket.
        committed: numbers of the buckets whose means all ranks have, in the pass under way.
    """

    def __init__(
        self, members: Membership, ended: Callable[[], None], concluded: Callable[[int], None], *, commits: bool = False
    ) -> None:
        """Has kept nothing yet.

        Args:
            members: see there.
            ended: called when all ranks have the means of a pass.
            concluded: called with the number of passes, when this rank is between two of them.
            commits: see there.
        """
        self.members, self._ended, self.concluded = members, weakly(ended), weakly(concluded)
        self.commits, self.committed = commits, set[int]()
        self.is_complete = self.was_complete = self.is_undone = False
        self._gradients: dict[int, torch.Tensor | None] = {}
        self._before: dict[Exchange, Callable[[], Mapping[str, Named]]] = {}
        # Memory of the passes before.
        self._copies: dict[int, torch.Tensor] = {}
        self._spare: dict[Exchange, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Begins a pass."""
        self.is_complete = self.is_undone = False
        self._gradients = {}
        self._before = {}

    def keep(self, position: int, gradient: torch.Tensor | None, *, copies: bool) -> None:
        """Keeps the gradient of a member, which `copies` asks to copy, since it may be changed."""
        if copies and gradient is not None:
            gradient = self._copies[position] = copied(gradient, self._copies.get(position))
        self._gradients[position] = gradient

    def gradient(self, position: int) -> torch.Tensor | None:
        """Returns a gradient of this pass."""
        return self._gradients.get(position)

    def remember(self, exchange: Exchange) -> None:
        """Keeps what an exchange remembers, before it begins; on a communication thread."""
        self._before[exchange] = exchange.mark(self._spare.setdefault(exchange, []))

    def commit(self, exchange: Exchange) -> None:
        """Waits until all ranks have the mean of a bucket, which may be used then; on a communication thread."""
        exchange.communicator.barrier_on_host()
        self.committed.add(exchange.bucket.index)

    @property
    def is_over(self) -> bool:
        """True if no exchange of the pass is to begin before its end: ranks have changed since, as others have noticed."""
        return self.is_complete or self.is_undone

    def end(self) -> None:
        """Frees what was kept, but for memory that the next pass will use."""
        self._spare = {each: spare for each, spare in self._spare.items() if each in self._before}
        self.was_complete = self.is_complete
        self.begin()
        self.committed = set()
        self._ended()
        self.members.finished_round()

    def states(self, exchanges: list[Exchange], communicator: Communicator, *, undo: bool) -> Mapping[str, Named]:
        """Returns what exchanges remember, for others to go on with; collective.

        Parts that lost ranks had are zero.

        Args:
            exchanges: of all buckets.
            communicator: of the ranks that are left.
            undo: True for what they remembered before this pass, but for buckets that are committed.
        """
        lost = [each for each in exchanges if undo and each.bucket.index not in self.committed and each in self._before]
        return states_of_ranks(exchanges, communicator, {each: self._before[each]() for each in lost}, self.members)

    def forget(self) -> None:
        """Drops what exchanges remembered, when others have taken over their states."""
        self._before, self._spare = {}, {}


def states_of_ranks(
    exchanges: Sequence[Exchange],
    communicator: Communicator,
    before: Mapping[Exchange, Mapping[str, Named]],
    members: Membership,
) -> Mapping[str, Named]:
    """Returns what exchanges remember, for others to go on with among fewer ranks; collective.

    Parts that lost ranks had are zero. What members that leave have still to send becomes that of the first one that stays.

    Args:
        exchanges: of all buckets.
        communicator: of the ranks that are left.
        before: for some exchanges what they remembered earlier, to be returned instead.
        members: of the job.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for exchange in exchanges:
        for key, named in (before[exchange] if exchange in before else exchange.own_state()).items():
            found.setdefault(key, {}).update(named)
    parts, sizes = found.pop(_PARTS, {}), dict[str, tuple[int, torch.dtype]]()
    # Some ranks may have none, where they were lost in the middle of loading a state.
    for told in communicator.all_gather_object({name: (each.numel(), each.dtype) for name, each in parts.items()}):
        sizes.update(told)
    for name, (numel, dtype) in sorted(sizes.items()):
        whole = (
            parts[name].contiguous() if name in parts else torch.zeros(numel, dtype=dtype, device=communicator.device)
        )
        communicator.all_reduce(whole, ReduceOp.SUM).wait()
        parts[name] = whole
    communicator.drain()
    if parts or WHOLE in found:
        found[_PARTS] = {**parts, **found.pop(WHOLE, {})}
    names = [name for name in members.ranks if name not in members.newcomers]
    leaving = [names.index(name) for name in members.leaving]
    staying = [rank for rank in range(communicator.size) if rank not in leaving]
    for rank in leaving if staying else []:
        heir = staying[0]
        with communicator.split([rank, heir]) or nullcontext() as pair:
            if pair is not None:
                _hand_over(found, pair, int(rank > heir))
    return found


def _hand_over(found: dict[str, dict[str, torch.Tensor]], pair: Communicator, source: int) -> None:
    """Moves what is still to be sent from a rank that leaves to one that stays, so that the sum over ranks is the same."""
    owed = {key: found.get(key, {}) for key in _OWED}
    for key, named in pair.broadcast_object(owed, source).items():
        for name, vector in named.items():
            if pair.rank == source:
                found[key][name] = torch.zeros_like(vector)
            else:
                own = found.setdefault(key, {}).get(name)
                found[key][name] = vector if own is None else own + vector
