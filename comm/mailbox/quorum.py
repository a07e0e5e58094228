"""Agreement on merges for which some of the ranks are enough, without a server."""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.mailbox import late_error, lost_error
from bagua_kernels.comm.work import Work
from bagua_kernels.errors import CommunicationError, RankLostError

# Kinds of letters.
_POST, _HELD, _REST, _ENTRY, _ASK, _TOLD, _GONE = range(48, 55)
_POST_BODY = struct.Struct("<qid")  # number, part, weight
_KEY = struct.Struct("<iq")  # rank, number
_RANK = struct.Struct("<q")
_HEAD = struct.Struct("<qBi")  # place in the log, what it is, part or rank
_MOST_BUCKETS = 1 << 20
_POLL = 0.005  # seconds from one look at payloads under way to the next
_LOOK = 0.25  # seconds after which a rank that waits looks whether others are lost

Key = tuple[int, int]  # of a post: its rank, and its number among those of the rank


class _What(enum.IntEnum):
    """What an entry of the log is."""

    MERGE = 0  # of the posts that it names
    LEAVE_OUT = 1  # of a rank
    END = 2  # of a rest, with the ranks that are left


@dataclass(frozen=True)
class Post:
    """What a rank has posted.

    Attributes:
        rank: which rank.
        number: of its posts, from 0.
        part: of the model.
        weight: in the mean.
        payloads: one for each bucket of the part.
    """

    rank: int
    number: int
    part: int
    weight: float
    payloads: list[torch.Tensor]


class Quorum:
    """Merges the posts of ranks as soon as enough of them have one, in one order (after Decoupled DiLoCo, 2026).

    1. A rank sends its post to all others, and goes on.
    2. Each rank sends word to the leader of what it has received. The leader is the lowest rank that is not lost.
    3. Posts that all have are complete: a slow line delays merges, slow training does not. When `count` ranks have complete
       posts, the leader waits for those of the others, for `grace` seconds at most. Ranks at rest are not waited for, see `rest`.
    4. It then sends the list of these posts, with a number. Each rank sends a list on once. All merge the same posts.
    5. A post that completes later belongs to the next merge. One of a lost rank counts if all others have it.
    6. A rank that is lost to another one, or answers nothing for the mailbox's timeout, is left out from then on. If it is the
       leader, the next one asks all others what they have before it decides anything.

    Attributes:
        members: the ranks that are not lost or left out, as far as this one knows.
    """

    def __init__(
        self,
        courier: Courier,
        count: int,
        grace: float,
        *,
        buffers: Callable[[int], list[torch.Tensor]],
        merge: Callable[[int, Sequence[Post]], None],
    ) -> None:
        """Gives a courier, which is not started yet, its work; all ranks have the same numbers.

        Args:
            courier: of this rank.
            count: ranks that are enough for a merge.
            grace: seconds for which a merge waits for further ranks.
            buffers: makes memory for the payloads of a part.
            merge: called on the courier's thread with a part and the posts of each merge, in ascending order of rank and number.
        """
        self._courier, self._mailbox = courier, courier.mailbox
        self._count, self._grace, self._buffers, self._merge = count, grace, buffers, merge
        self._me = self._mailbox.rank
        self.members = frozenset(range(self._mailbox.size))
        self._own = itertools.count()
        self._posts: dict[Key, Post] = {}
        self._arriving: dict[Key, tuple[Post, list[Work]]] = {}
        self._merges: dict[int, int] = {}
        self._log = 0  # entries so far
        self._last = b""  # of them
        self._changed_at = self._mailbox.clock.now()  # the members
        self._rests: dict[int, int] = {}  # of each rank the number of the rest that it began last
        self._ends = 0  # of rests
        self._ended: list[int] | None = None  # the ranks that are left at the end of a rest, until the caller has them
        # What a leader knows: who has which posts, since when there are enough, and who has sent a new leader a list.
        self._holders: dict[Key, set[int]] = {}
        self._enough: float | None = None
        self._told: set[int] | None = None
        self._to_leave_out: set[int] = set()
        self._reported: set[int] = set()  # to the leader, as lost
        for kind, handler in (
            (_POST, self._hear_post),
            (_HELD, self._hear_held),
            (_REST, self._hear_rest),
            (_ENTRY, self._hear_entry),
            (_ASK, self._hear_ask),
            (_TOLD, self._hear_told),
            (_GONE, self._hear_gone),
        ):
            courier.on(kind, handler)
        for work in (self._look, self._receive, self._decide):
            courier.work(work)

    def merges(self, part: int) -> int:
        """Returns how many merges of a part there have been."""
        return self._merges.get(part, 0)

    def post(self, part: int, weight: float, payloads: Sequence[torch.Tensor]) -> int:
        """Sends this rank's post to all others; returns its number.

        Args:
            part: of the model.
            weight: in the mean.
            payloads: one for each bucket of the part, which nobody writes to any more.
        """
        self._courier.check()
        _synchronize(self._mailbox.device)
        mine = Post(self._me, next(self._own), part, weight, list(payloads))
        with self._courier.changed:
            # First, for others may merge it as soon as they have it.
            self._posts[self._me, mine.number] = mine
        for peer in self._others():
            for index, payload in enumerate(mine.payloads):
                # Those who receive it wait for it, so that nothing has to be waited for here.
                with self._courier.telling():
                    self._mailbox.exchange({}, {peer: payload}, mine.number * _MOST_BUCKETS + index)
            self._courier.post(peer, _POST, _POST_BODY.pack(mine.number, part, weight))
        self._courier.wake()
        return mine.number

    def wait(self, part: int, merges: int) -> None:
        """Waits until there have been more merges of a part than a number.

        Raises:
            RankLostError: fewer ranks are left than a merge needs.
            CollectiveTimeoutError: too few ranks have posted within twice the mailbox's timeout, counted anew when bytes move or
                a rank is left out.
        """
        clock, limit = self._mailbox.clock, 2 * self._mailbox.timeout
        began = clock.now()

        def over() -> bool:
            stirred = self._courier.stirred(self.members - {self._me})
            return clock.now() > max(began, self._changed_at, stirred) + limit

        self._courier.wait_for(lambda: self.merges(part) > merges or over())
        if self.merges(part) <= merges:
            with self._courier.changed:
                posted = {post.rank for post in self._posts.values() if post.part == part}
            raise late_error(
                f"a merge of {self._count} ranks", limit, self.members - posted - {self._me}, self._courier.lost
            )

    def rest(self, look: Callable[[], None], *, last: bool = False) -> list[int]:
        """Takes part in what others do, without posts of its own, until all ranks rest and all posts are merged.

        Args:
            look: called on this thread after merges, to use them.
            last: True if nothing follows: ranks that leave from its end on are not lost.

        Returns:
            The ranks that are left, the same on all of them.
        """
        self._begin_rest()
        while True:
            self._courier.wait_for(partial(self._has_moved, dict(self._merges)))
            ended = self._ended
            look()
            if ended is not None:
                if not last:
                    self._ended = None
                    self._courier.wake()
                return ended

    def _begin_rest(self) -> None:
        self._courier.check()
        with self._courier.changed:
            self._ended = None
            self._rests[self._me] = number = self._ends
        for peer in self._others():
            self._courier.post(peer, _REST, _RANK.pack(number))
        self._courier.wake()

    def _has_moved(self, merges: Mapping[int, int]) -> bool:
        return self._ended is not None or self._merges != merges

    def _others(self) -> list[int]:
        return sorted(self.members - {self._me})

    def _hear_post(self, sender: int, body: bytes) -> None:
        number, part, weight = _POST_BODY.unpack(body)
        if sender not in self.members:
            return
        payloads = self._buffers(part)
        works = [
            self._mailbox.exchange({sender: payload}, {}, number * _MOST_BUCKETS + index)
            for index, payload in enumerate(payloads)
        ]
        self._arriving[sender, number] = Post(sender, number, part, weight, payloads), works

    def _receive(self) -> bool:
        """Takes payloads that have arrived, and sends word of them to the leader. Nothing waits for those of a slow line."""
        behind: set[int] = set()
        for key, (post, works) in list(self._arriving.items()):
            if post.rank in behind or not all(work.is_completed() for work in works):
                behind.add(post.rank)  # posts of a rank stay in their order
                continue
            del self._arriving[key]
            try:
                for work in works:
                    work.wait()
            except RankLostError:
                continue  # In the middle of its post. A merge names no post that a rank lacks.
            _synchronize(self._mailbox.device)
            with self._courier.changed:
                self._posts[key] = post
            if (leader := min(self.members)) != self._me:
                self._courier.post(leader, _HELD, _KEY.pack(*key))
        if self._arriving:
            self._courier.look_at(self._mailbox.clock.now() + _POLL)
        return False

    def _hear_held(self, sender: int, body: bytes) -> None:
        for key in _KEY.iter_unpack(body):
            self._holders.setdefault(key, set()).add(sender)

    def _hear_rest(self, sender: int, body: bytes) -> None:
        with self._courier.changed:
            # Its letter may come after the end of that rest, which came by way of another rank.
            (self._rests[sender],) = _RANK.unpack(body)

    @property
    def _resting(self) -> frozenset[int]:
        return frozenset(rank for rank, number in list(self._rests.items()) if number >= self._ends)

    def _lacking(self, post: Post) -> frozenset[int]:
        """The members that are not known to have a post."""
        return self.members - {self._me, post.rank} - self._holders.get((post.rank, post.number), set())

    def _look(self) -> bool:
        """Finds ranks that are lost, or that owe something and do not answer."""
        if self._ended is not None:
            # All ranks have come to the end of a rest: those that leave need nothing from this one.
            return False
        leader = min(self.members)
        owing = {rank for rank, _ in self._arriving}
        if self._me == leader:
            owing |= {rank for post in list(self._posts.values()) for rank in self._lacking(post)}
            if self._me in self._resting:
                owing |= self.members - self._resting
            if self._told is not None:
                owing |= self.members - self._told
        elif self._posts or self._me in self._resting:
            owing |= {leader}
        gone = {*self._courier.silent(owing & self.members - {self._me}), *self._courier.lost} & self.members
        if leader in gone:
            self._leave_out({rank for rank in gone if rank < self._me})
        elif self._me == leader:
            self._to_leave_out |= gone
        else:
            # One of two ranks whose connection broke is left out by all; the leader decides which.
            for rank in gone - self._reported:
                self._courier.post(leader, _GONE, _RANK.pack(rank))
            self._reported |= gone
        if self._posts or self._arriving or self._me in self._resting:
            # A loss brings no letter, and may be what this rank waits for.
            self._courier.look_at(self._mailbox.clock.now() + _LOOK)
        return False

    def _leave_out(self, ranks: Collection[int]) -> None:
        self._mailbox.drop(ranks=set(ranks) - set(self._mailbox.lost()))
        with self._courier.changed:
            self.members -= set(ranks)
            self._changed_at = self._mailbox.clock.now()
        # A new leader has not heard of others.
        self._reported = set()
        if len(self.members) < self._count:
            gone = set(range(self._mailbox.size)) - self.members
            reasons = {rank: self._courier.lost.get(rank, "it does not answer") for rank in gone}
            raise lost_error(f"training that needs {self._count} ranks, of {len(self.members)} left", gone, reasons)

    def _decide(self) -> bool:
        """At the leader: makes the next entry of the log, if it is time for one."""
        if min(self.members) != self._me or not self._knows_all():
            return False
        if self._to_leave_out:
            rank = self._to_leave_out.pop()
            if rank in self.members:
                self._commit(_What.LEAVE_OUT, rank, [])
            return True
        now, active = self._mailbox.clock.now(), self.members - self._resting
        posts = [self._posts[key] for key in sorted(self._posts)]
        complete = [post for post in posts if not self._lacking(post)]
        ranks = {post.rank for post in complete}
        if not ranks or len(ranks) < min(self._count, len(active)):
            self._enough = None
        elif active <= ranks or now >= (self._enough or now) + self._grace:
            self._enough = None
            # Ranks may be in rounds of different parts. Each would wait for others if each part needed a quorum of its own.
            for part in sorted({post.part for post in complete}):
                self._commit(_What.MERGE, part, [(post.rank, post.number) for post in complete if post.part == part])
            return True
        else:
            self._enough = self._enough or now
            self._courier.look_at(self._enough + self._grace)
        # Letters of a rank that rests come after all of its posts.
        arriving = any(rank in self.members for rank, _ in self._arriving)
        if not active and not arriving and not any(post.rank in self.members for post in posts):
            self._commit(_What.END, 0, [(rank, 0) for rank in sorted(self.members)])
            return True
        return False

    def _knows_all(self) -> bool:
        """True if all entries that the last leader may have sent to anybody are here; else asks for what others have."""
        if self._me == 0:
            return True
        if self._told is None:
            self._told = {self._me}
            for peer in self._others():
                self._courier.post(peer, _ASK, b"")
        # A rank that cannot answer is not waited for; its entry comes afterwards.
        return self.members <= self._told | self._to_leave_out

    def _hear_ask(self, sender: int, body: bytes) -> None:
        """Answers a new leader with what this rank has. Entries of the last leader were sent on before, and arrive before."""
        if gone := {rank for rank in self.members if rank < sender}:
            self._leave_out(gone)
        with self._courier.changed:
            keys = sorted(self._posts)
        self._courier.post(sender, _HELD, b"".join(_KEY.pack(*key) for key in keys))
        self._courier.post(sender, _TOLD, b"")

    def _hear_gone(self, sender: int, body: bytes) -> None:
        (rank,) = _RANK.unpack(body)
        if sender not in self._to_leave_out:
            self._to_leave_out.add(rank)

    def _hear_told(self, sender: int, body: bytes) -> None:
        assert self._told is not None
        self._told.add(sender)

    def _commit(self, what: _What, about: int, keys: Sequence[Key]) -> None:
        body = _HEAD.pack(self._log, what, about) + b"".join(_KEY.pack(*key) for key in keys)
        self._hear_entry(self._me, body)

    def _hear_entry(self, sender: int, body: bytes) -> None:
        """Takes an entry, once, and sends it on: the leader may be lost before it has sent it to all."""
        place, what, about = _HEAD.unpack(body[: _HEAD.size])
        if sender not in self.members:
            return
        if place < self._log:
            if place == self._log - 1 and body != self._last:
                raise CommunicationError("ranks have left each other out, and merged different posts")
            return
        assert place == self._log, f"entry {place} came before entry {self._log}"
        self._log, self._last = place + 1, body
        for peer in self._others():
            if peer != sender:
                self._courier.post(peer, _ENTRY, body)
        keys: list[Key] = list(_KEY.iter_unpack(body[_HEAD.size :]))
        if what == _What.MERGE:
            self._do_merge(about, keys)
        elif what == _What.LEAVE_OUT:
            if about == self._me:
                raise CommunicationError("the other ranks have left this one out, which answered nothing")
            if about in self.members:
                self._leave_out({about})
        else:
            if (self._me, 0) not in keys:
                raise CommunicationError("the other ranks have left this one out, which answered nothing")
            with self._courier.changed:
                self._posts.clear()  # what is left are posts of lost ranks that some rank lacks
                self._ends += 1
                self._ended = [rank for rank, _ in keys]

    def _do_merge(self, part: int, keys: Sequence[Key]) -> None:
        with self._courier.changed:
            if not set(keys) <= set(self._posts):
                raise CommunicationError("the other ranks have left this one out, and merged what it does not have")
            posts = [self._posts.pop(key) for key in sorted(keys)]
        for key in keys:
            self._holders.pop(key, None)
        self._merge(part, posts)
        _synchronize(self._mailbox.device)
        with self._courier.changed:
            self._merges[part] = self.merges(part) + 1


def _synchronize(device: torch.device) -> None:
    """Waits for what this thread has queued on a GPU, which the other thread will read."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
