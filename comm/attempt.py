"""Which start of the job this is: a name that all its ranks agree on and that no earlier start had."""

from __future__ import annotations

import json
import time
import uuid

from torch._C._distributed_c10d import Store

from bagua_kernels.errors import CollectiveTimeoutError

_POLL = 0.01  # seconds


def agree(store: Store, rank: int, size: int, timeout: float) -> str:
    """Makes a fresh name out of a store that may still hold what dead ranks of an earlier start have written.

    torchrun's count of restarts will not do: with several hosts each counts its own.

    1. Every rank writes a number of its own, drawn at random, under its rank.
    2. Rank 0 publishes the list of these numbers with a fresh name, again whenever one changes.
    3. A rank that finds its own number in the list confirms the name.
    4. Once all have confirmed, rank 0 says go. A dead rank's number is never confirmed for a fresh name.

    Args:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds to wait for all ranks.

    Returns:
        The name.

    Raises:
        CollectiveTimeoutError: if ranks are missing; it names them (only rank 0 while that is missing).
    """
    own, root = uuid.uuid4().hex, "bagua_kernels/attempt"
    deadline = time.monotonic() + timeout
    store.set(f"{root}/{rank}", own)
    name = own if rank == 0 else ""
    published: list[str] = []

    def unconfirmed() -> list[int]:
        return [r for r in range(1, size) if not store.check([f"{root}/confirmed/{name}/{r}"])]

    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"{root}/{r}" for r in range(size)]
            numbers = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            if numbers != published:
                published = numbers
                store.set(f"{root}/list", json.dumps([name, *numbers]))
            if not unconfirmed():
                store.set(f"{root}/go/{name}", "1")
                return name
        elif store.check([f"{root}/list"]):
            listed, *numbers = json.loads(store.get(f"{root}/list"))
            if len(numbers) == size and numbers[rank] == own:
                name = str(listed)
                store.set(f"{root}/confirmed/{name}/{rank}", "1")
                if store.check([f"{root}/go/{name}"]):
                    return name
        time.sleep(_POLL)
    missing = unconfirmed() if name else [0]
    raise CollectiveTimeoutError(
        f"not all {size} ranks arrived within {timeout:g} s: {missing=}; see that they started, or raise timeout=",
        missing,
    )
