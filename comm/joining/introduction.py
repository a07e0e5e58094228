"""Lets the ranks of a torch process group check that they share a secret, and exchange their addresses."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_kernels import knobs
from bagua_kernels.comm.joining.bounded import bounded
from bagua_kernels.comm.joining.installed import Installed, check_installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError

_KEY = "bagua_kernels/secret"  # in torch's store
_SLICE = 0.1  # seconds between two looks at whether waiting still makes sense
_LONGEST = 1 << 20  # bytes of a value: lengths are read before signatures


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
    ) -> None:
        self._group = group
        self._deadline = time.monotonic() + knobs.TIMEOUT.get() if deadline is None else deadline
        self._look = look
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        served = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        kind = "cpu" if "cpu" in served else next(iter(served))
        self._device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._numbers = itertools.count()
        # A nonce of every rank goes in, so that nothing that was recorded of an earlier introduction is valid in this one.
        nonces = self._gather(secrets.token_bytes(Secret.NBYTES))
        self.name = hashlib.sha256(b"".join(nonces)).hexdigest()[:32]
        self.secret = secret.derive("introduction", *nonces)
        check_installed({rank: Installed.parse(told) for rank, told in enumerate(self(Installed.here().told()))})

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
        lengths = [int.from_bytes(length, "little") for length in self._gather(len(signed).to_bytes(8, "little"))]
        if max(lengths) > _LONGEST + Secret.NBYTES or min(lengths) < Secret.NBYTES:
            raise CommunicationError(f"ranks have sent values of impossible lengths, {lengths} bytes")
        texts: list[bytes] = []
        strangers: list[int] = []
        for rank, (length, data) in enumerate(zip(lengths, self._gather(signed.ljust(max(lengths))), strict=True)):
            signature, text = data[: Secret.NBYTES], data[Secret.NBYTES : length]
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

    def _gather(self, data: bytes) -> list[bytes]:
        """Returns bytes of all ranks, the same number of each."""
        if self._size == 1:
            return [data]
        # waits: at start.
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        work = dist.all_gather(everyone, mine, group=self._group, async_op=True)
        self._wait(work)
        # waits: at start.
        return [one.cpu().numpy().tobytes() for one in everyone]

    def _wait(self, work: Any) -> None:
        """Waits on the host, in slices: torch's own limit is that of the group, and nobody looks around meanwhile."""
        if self._device.type != "cpu":
            # waits: at start; torch's watchdog bounds it.
            work.wait()
            return
        while True:
            left = self._deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(_SLICE, left))))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._look is not None:
                self._look()
            if left <= 0:
                raise CollectiveTimeoutError(
                    "not all ranks of torch's process group came in time to make a communicator: see that all of them make "
                    "one, in the same order as others, or raise timeout="
                )
