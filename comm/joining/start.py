"""The start of a job: the store at MASTER_ADDR, one deadline for everything, and who is at fault where it fails."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.evidence import Evidence
from bagua_kernels.comm.joining.incarnation import REFUSED, agree
from bagua_kernels.comm.joining.launch import Launch, Refusal
from bagua_kernels.errors import BackendUnavailableError, CollectiveTimeoutError, CommunicationError, RankLostError

HOST = 0  # the rank whose process holds the store, unless a launcher does
_LONGEST_GRACE = 2.0  # seconds that ranks whose start has failed wait for one another's word
_JOB = "bagua_kernels/job"  # whose store it is
_POLL = 0.05  # seconds
_REFUSAL = 4.0  # seconds in which a rank that does not come reports that to the others
_RETRY = 0.1  # seconds between two attempts to connect

_log = logging.getLogger(__name__)


def open_store(address: str, port: int, rank: int, timeout: float, launcher: bool) -> Store:
    """Opens the store at MASTER_ADDR; does not wait for other ranks than its host.

    Args:
        address: MASTER_ADDR.
        port: MASTER_PORT.
        rank: this rank.
        timeout: seconds to wait for the host.
        launcher: True if a launcher holds the store, rather than rank 0.

    Raises:
        CollectiveTimeoutError: if rank 0, which should hold the store, has not come.
        CommunicationError: if the launcher's store cannot be reached, or the port is in use.
    """
    where, hosts = f"MASTER_ADDR:MASTER_PORT={address}:{port}", rank == HOST and not launcher
    deadline = time.monotonic() + timeout
    if not hosts:
        # TCPStore itself tries for up to twice its timeout, and prints pages.
        trouble = _await(address, port, deadline)
        if trouble and launcher:
            raise CommunicationError(
                f"rank {rank} could not reach the store at {where}: see that the launcher runs there [cause: {trouble}]"
            )
        if trouble:
            raise CollectiveTimeoutError(
                f"rank {HOST} did not open the store at {where} within {timeout:g} s: see that rank {HOST} started, that it "
                f"runs there and that no firewall closes the port, or raise timeout= [cause: {trouble}]",
                [HOST],
            )
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        return TCPStore(
            address, port, is_master=hosts, timeout=left, wait_for_workers=False, multi_tenant=not launcher
        )  # fmt: skip
    except RuntimeError as error:
        cure = (
            "see that no other process, such as rank 0 of an earlier start, uses the port, or set another MASTER_PORT"
            if hosts
            else f"see that {'the launcher' if launcher else f'rank {HOST}'} runs there and that no other job uses the port"
        )
        verb = "open" if hosts else "reach"
        raise CommunicationError(
            f"rank {rank} could not {verb} the store at {where}: {cure} [torch: {_line(error)}]"
        ) from error


def tell_refusal(refusal: Refusal, error: Exception) -> None:
    """Reports to the other ranks that this one does not come, where the store at MASTER_ADDR can be reached within a moment.

    Rank 0 opens the store for that moment, unless a launcher holds it. Nothing is raised: this rank has an error to raise.

    Args:
        refusal: where the others are.
        error: why this rank does not come.
    """
    rank, number = refusal.rank, uuid.uuid4().hex
    deadline = time.monotonic() + _REFUSAL
    hosts = rank == str(HOST) and not refusal.agent_store
    try:
        if not hosts and _await(refusal.master_addr, refusal.master_port, deadline - _REFUSAL / 2):
            return
        store = open_store(
            refusal.master_addr, refusal.master_port, HOST if hosts else HOST + 1, _REFUSAL / 2, refusal.agent_store
        )
        with BoundedStore(store, deadline) as bounded:
            bounded.set(REFUSED, json.dumps([number, rank, str(error)[:1000]]))
            # While this process holds the store, the others have to read it.
            while hosts and time.monotonic() < deadline:
                if all(bounded.check(f"{REFUSED}/{number}/{other}") for other in range(1, refusal.others + 1)):
                    return
                time.sleep(_POLL)
    except (OSError, RuntimeError) as trouble:
        _log.debug("rank %s could not report to the others why it does not come: %s", rank, trouble)


def _check_job(store: Store, launch: Launch, deadline: float) -> None:
    """Sees that the store at a port which was derived, and not chosen, is one of this job.

    Raises:
        CommunicationError: if it is another's.
        CollectiveTimeoutError: if it does not answer.
    """
    where = f"{launch.master_addr}:{launch.master_port}"
    with BoundedStore(store, deadline) as bounded:
        try:
            if launch.rank == HOST:
                bounded.set(_JOB, launch.job)
            elif not bounded.wait([_JOB], max(_RETRY, deadline - time.monotonic())):
                raise TimeoutError(f"the store does not name its job ({_JOB})")
            elif bounded.get(_JOB) != launch.job:
                raise CommunicationError(
                    f"the store at {where} is one of another job ({bounded.get(_JOB)}): set MASTER_PORT to a free port of rank "
                    f"{HOST}'s host, the same on all ranks"
                )
        except (TimeoutError, RuntimeError) as error:
            if isinstance(error, CommunicationError):
                raise
            raise CollectiveTimeoutError(
                f"rank {HOST} did not come to the store at {where}: see that it started, and that nothing else uses the port, "
                f"which was derived from the job, or set MASTER_PORT [cause: {_line(error)}]",
                [HOST],
            ) from error


class _ClosedError(RuntimeError):
    """The store of rank 0 was closed before all ranks had come."""


def begin(launch: Launch, timeout: float) -> tuple[Store, Start]:
    """Opens the store at MASTER_ADDR, and waits until all ranks have come.

    The store may be that of an earlier start, which rank 0 closes before it opens the next. Ranks that have met it try again.

    Args:
        launch: where the ranks are.
        timeout: seconds for the whole start.

    Raises:
        CollectiveTimeoutError: if ranks are missing; it names them.
        RankLostError: if the store does not answer any more.
        CommunicationError: if the store cannot be opened.
    """
    since = time.monotonic()
    while True:
        left = max(_RETRY, since + timeout - time.monotonic())
        store = open_store(launch.master_addr, launch.master_port, launch.rank, left, launch.agent_store)
        store.set_timeout(timedelta(seconds=left))
        if launch.job:
            _check_job(store, launch, since + timeout)
        try:
            # A launcher that restarts dead ranks hands out the same store again, with the dead ranks' addresses still in it.
            return store, Start(store, launch.rank, launch.world_size, timeout, since, launch.agent_store)
        except _ClosedError as error:
            _log.debug("rank %d tries again to reach rank %d: %s", launch.rank, HOST, error)
        time.sleep(_RETRY)


class Start:
    """Messages between ranks that start together, through the store at MASTER_ADDR.

    Args:
        store: that store.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds for the whole start, of which some may have passed.
        since: when it began, as of `time.monotonic`.
        launcher: True if a launcher holds the store, rather than rank 0.

    Attributes:
        name: a name that no other start had, the same on all ranks.
        hosts: the number of hosts; containers count as hosts.
        local_rank: the number of this rank on its host.

    Raises:
        CollectiveTimeoutError: if ranks are missing; it names them.
        RankLostError: if the store does not answer any more.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, since: float, launcher: bool) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._host = -1 if launcher else HOST
        self._evidence = Evidence()
        self._store = BoundedStore(store, since + timeout)
        try:
            agreed = agree(self._store, rank, size, since + timeout - time.monotonic())
        except (TimeoutError, RuntimeError) as error:
            self._store.close()
            if isinstance(error, CommunicationError):
                raise
            if isinstance(error, RuntimeError) and rank != HOST and not launcher:
                raise _ClosedError(str(error)) from error
            raise self._without_store(error) from error
        self.name = agreed.name
        tables = [process.table for process in agreed.processes]
        self.hosts, self.local_rank = len(set(tables)), tables[:rank].count(tables[rank])
        for peer, process in enumerate(agreed.processes):
            self._evidence.add(peer, process)
        # From here on all ranks have the same time left, so that those that fail, fail together.
        self._over = time.monotonic() + agreed.seconds
        self._grace = min(_LONGEST_GRACE, agreed.seconds / 3)
        self._key = f"bagua_kernels/start/{self.name}"

    def left(self) -> float:
        """Returns the seconds that the next part of the start may take."""
        return max(0.1, self._over - self._grace - time.monotonic())

    def look(self) -> None:
        """Ends a wait for other ranks that makes no sense any more; for `bounded`.

        Raises:
            RuntimeError: if the process of a rank has ended; `told` names it.
        """
        gone = [rank for rank in range(self._size) if rank != self._rank and self._evidence.state(rank) == "gone"]
        if gone:
            raise RuntimeError(f"the process of {_ranks(gone)} has ended")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turns the transport's errors in the block into this package's, and reports them to the other ranks.

        Raises:
            RankLostError: if a rank has died or does not answer; it is named.
            CommunicationError: if the start failed otherwise.
        """
        try:
            yield
        except (CommunicationError, BackendUnavailableError) as error:
            if _is_vague(error):
                raise self._failure(error) from error
            self.tell(error)
            raise
        except RuntimeError as error:
            raise self._failure(error) from error
        except BaseException as error:
            self.tell(error)
            raise
        finally:
            self._store.close()

    def tell(self, error: BaseException) -> None:
        """Reports to the other ranks what failed here; before what takes time, for they do not wait long for it."""
        if isinstance(error, CommunicationError | BackendUnavailableError) and not _is_vague(error):
            self._tell(list(getattr(error, "ranks", ())), str(error))
        elif isinstance(error, RuntimeError):
            self._tell([], str(error))
        else:
            self._tell([self._rank], f"init raised {type(error).__name__} on rank {self._rank}: {error}")

    def _failure(self, error: RuntimeError) -> CommunicationError:
        """Finds out who is at fault: ranks that failed for the same cause report it within the grace."""
        said = f" [cause: {_line(error)}]"
        self.tell(error)
        until = max(self._over, time.monotonic() + self._grace) - self._grace / 3
        named, silent, ended = self._listen(until)
        if named is not None:
            found: CommunicationError = RankLostError(
                f"the start failed at {_ranks(named[0])}: {named[1]}{said}", named[0]
            )
        elif ended:
            text = f"the start failed, for the process of {_ranks(ended)} has ended"
            self._tell(ended, text)
            found = RankLostError(text + said, ended)
        elif silent:
            text = f"the start failed, for {_ranks(silent)} did not answer within {self._timeout:g} s"
            self._tell(silent, text)
            found = RankLostError(text + said, silent)
        else:
            found = CommunicationError(
                f"the start failed on all ranks; see that they reach one another, set GLOO_SOCKET_IFNAME to the network "
                f"interface that they share, or raise timeout={said}"
            )
        self._linger(until + self._grace / 3)
        return found

    def _listen(self, until: float) -> tuple[tuple[list[int], str] | None, list[int], list[int]]:
        """Waits for words of the other ranks.

        Returns:
            The rank at fault and its symptom, if a rank has reported it; the silent ranks; the ranks whose processes have ended.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        silent = others
        while True:
            gone = [rank for rank in silent if self._evidence.state(rank) == "gone"]
            # A host that is stopped does not answer, and one that has ended will not.
            if self._evidence.state(self._host) in ("stopped", "gone"):
                return None, [self._host], [self._host] if self._host in gone else gone
            try:
                self._store.deadline = until
                words = {rank: self._word(rank) for rank in others}
            except (TimeoutError, RuntimeError):
                return None, ([] if self._host < 0 or self._rank == self._host else [self._host]), gone
            named = next((word for word in words.values() if word is not None and word[0]), None)
            silent = [rank for rank in others if words[rank] is None]
            # Those who ended with a word heard of the failure before this rank did, and are not its cause.
            ended = [rank for rank in gone if rank in silent]
            if named or ended or not silent or time.monotonic() > until:
                return named, silent, ended
            time.sleep(_POLL)

    def _word(self, rank: int) -> tuple[list[int], str] | None:
        """Returns what a rank has stored about a failure; None if there is nothing."""
        if not self._store.check(f"{self._key}/failed/{rank}"):
            return None
        at, text = json.loads(self._store.get(f"{self._key}/failed/{rank}"))
        return [int(one) for one in at], str(text)

    def _tell(self, ranks: list[int], text: str) -> None:
        self._store.deadline = time.monotonic() + self._grace / 3
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._store.set(f"{self._key}/failed/{self._rank}", json.dumps([ranks, text]))

    def _linger(self, until: float) -> None:
        """Keeps the store, if this process holds it, until the others have read it."""
        self._store.deadline = until
        with contextlib.suppress(TimeoutError, RuntimeError):
            self._store.set(f"{self._key}/heard/{self._rank}", "1")
            others = [rank for rank in range(self._size) if rank != self._rank]
            while self._rank == self._host and time.monotonic() < until:
                if all(
                    self._evidence.state(r) == "gone" or self._store.check(f"{self._key}/heard/{r}") for r in others
                ):
                    return
                time.sleep(_POLL)

    def _without_store(self, error: BaseException) -> CommunicationError:
        said = f"does not answer any more [cause: {_line(error)}]"
        if self._host < 0 or self._rank == self._host:
            return CommunicationError(f"the start failed, for the store at MASTER_ADDR:MASTER_PORT {said}")
        text = f"the start failed, for rank {self._host}, which holds the store at MASTER_ADDR:MASTER_PORT, {said}"
        return RankLostError(text, [self._host])


def _await(address: str, port: int, deadline: float) -> str:
    """Waits until something listens there; returns what is in the way when the time is over."""
    while True:
        try:
            left = max(_RETRY, deadline - time.monotonic())
            socket.create_connection((address, port), timeout=left).close()
            return ""
        except OSError as error:
            trouble = str(error)
        if time.monotonic() + _RETRY > deadline:
            return trouble
        time.sleep(_RETRY)


def _is_vague(error: BaseException) -> bool:
    """Returns True if some ranks did not come, and the call could not see which."""
    return isinstance(error, CollectiveTimeoutError) and not error.ranks


def _ranks(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
