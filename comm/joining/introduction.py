"""Lets the ranks of a torch process group check that they share a secret, and exchange what they start with."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from bagua_kernels import knobs
from bagua_kernels.comm.joining.bounded import BoundedStore, bounded
from bagua_kernels.comm.joining.gathering import Gathering
from bagua_kernels.comm.joining.incarnation import agree
from bagua_kernels.comm.joining.installed import Installed, check_installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError

_KEY = "bagua_kernels/secret"  # in torch's store
_LONGEST = 1 << 20  # bytes of a value as JSON
_FAREWELL = 10.0  # seconds
# Of each group: a name that its start has alone, and introductions begun.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, int]] = weakref.WeakKeyDictionary()


def starts_anew(group: dist.ProcessGroup) -> None:
    """Has the introductions of a group trust its store to hold nothing of an earlier start."""
    _made[group] = "", 0


def job_secret(store: Store, seconds: float | None = None, look: Callable[[], object] | None = None) -> Secret:
    """Returns the secret of this job: that of `BAGUA_KERNELS_SECRET`, else one that its ranks share through torch's store.

    Args:
        store: shared by all ranks. The first rank that asks makes the secret.
        seconds: the longest wait for the store; by default `BAGUA_KERNELS_TIMEOUT`.
        look: called again and again meanwhile; what it raises ends the wait.

    Raises:
        CommunicationError: if the store does not answer.
    """
    text = knobs.SECRET.get()
    if text:
        return Secret.from_text(text)
    own, seconds = secrets.token_hex(Secret.NBYTES), knobs.TIMEOUT.get() if seconds is None else seconds
    try:
        return Secret.from_text(bounded(lambda _: store.compare_set(_KEY, "", own), seconds, look).decode())
    except TimeoutError:
        raise CommunicationError(
            f"torch's store did not answer within {seconds:.3g} s: see that the process that holds it, mostly rank 0, still runs"
        ) from None


class Introduction:
    """Gathers values of all ranks of a torch process group as JSON, signed; all ranks call it in one order.

    A pickle is a program, and a stranger may have written what torch's groups receive. Nothing is unpickled here, and no
    value is read before its signature has been checked.

    Args:
        group: the ranks; making this is collective over it.
        secret: of the job.
        deadline: when all waits are over, as of `time.monotonic`; by default after `BAGUA_KERNELS_TIMEOUT`.
        look: called again and again while it waits; what it raises ends the wait.
        first: a value that goes along with the first one, so that it takes no round of its own; see the method `first`.

    Attributes:
        name: a name that all ranks agree on, and that no other introduction has.
        secret: a key that the same holds of.

    Raises:
        CommunicationError: on all ranks, if they do not share the secret.
        CollectiveTimeoutError: if not all ranks come in time.
        MismatchError: on all ranks, if they run different versions of this package.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        secret: Secret,
        deadline: float | None = None,
        look: Callable[[], object] | None = None,
        first: Any = None,
    ) -> None:
        self._rank = dist.get_rank(group)
        deadline = time.monotonic() + knobs.TIMEOUT.get() if deadline is None else deadline
        store, size = _get_default_store(), dist.get_world_size(group)
        name = _name(group, store, deadline, look)
        # Room for a signature.
        self._gather = Gathering(store, name, self._rank, size, deadline, look, _LONGEST + Secret.NBYTES)
        self._numbers = itertools.count()
        # A nonce of every rank goes in, so that nothing that was recorded of an earlier introduction is valid in this one.
        nonces = self._gather(secrets.token_bytes(Secret.NBYTES))
        if any(len(nonce) != Secret.NBYTES for nonce in nonces):
            raise CommunicationError(
                f"ranks have sent nonces of impossible lengths, {[len(one) for one in nonces]} bytes"
            )
        self.name = hashlib.sha256(b"".join(nonces)).hexdigest()[:32]
        self.secret = secret.derive("introduction", *nonces)
        self._first: list[Any] | None = self([Installed.here().told(), first])
        check_installed({rank: Installed.parse(told) for rank, (told, _) in enumerate(self._first)})

    def first(self) -> list[Any]:
        """Returns the values `first` of all ranks, in rank order."""
        assert self._first is not None
        return [value for _, value in self._first]

    def watch(self, look: Callable[[], object]) -> None:
        """Calls a function, too, while it waits; what it raises ends the wait."""
        self._gather.looks.append(look)

    def __call__(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order, as JSON leaves them: tuples have become lists.

        Raises:
            CommunicationError: if a rank does not know the secret.
        """
        number = str(next(self._numbers)).encode()
        body = json.dumps(value).encode()
        if len(body) > _LONGEST:
            raise ValueError(f"expected a value of at most {_LONGEST} bytes as JSON, got {len(body)}")
        signed = self.secret.sign(b"value", number, str(self._rank).encode(), body) + body
        texts: list[bytes] = []
        strangers: list[int] = []
        for rank, data in enumerate(self._gather(signed)):
            signature, text = data[: Secret.NBYTES], data[Secret.NBYTES :]
            texts.append(text)
            if not self.secret.verify(signature, b"value", number, str(rank).encode(), text):
                strangers.append(rank)
        if strangers:
            many = "ranks" if len(strangers) > 1 else "rank"
            raise CommunicationError(
                f"rank {self._rank} and {many} {', '.join(map(str, strangers))} do not have the same secret: give all "
                f"ranks the same {knobs.SECRET.variable}, or none of them one"
            )
        return [json.loads(text) for text in texts]


def _name(group: dist.ProcessGroup, store: Store, deadline: float, look: Callable[[], object] | None) -> str:
    """Returns a name for the next introduction of a group, which its ranks make in one order.

    The store may be older than the group: that of torchrun's agent is the same after a restart, and holds what ranks wrote that
    are dead. So the ranks of a group agree on a fresh name first.
    """
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    # Torch does not promise that no two groups have one name.
    whose = f"{group.group_name}/{hashlib.sha256(ranks.encode()).hexdigest()[:16]}"
    if group not in _made:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        seconds = max(0.001, deadline - time.monotonic())

        def fresh(_: object) -> str:
            with BoundedStore(PrefixStore(f"bagua_kernels/group/{whose}", store), deadline) as asked:
                return agree(asked, rank, size, seconds).name

        # `agree` ends in time by itself, and names the ranks that are missing. Rank 0 stays a little, for it may hold the store.
        _made[group] = (bounded(fresh, seconds + _FAREWELL, look) if size > 1 else ""), 0
    start, count = _made[group]
    _made[group] = start, count + 1
    return f"{whose}/{start}/{count + 1}"
