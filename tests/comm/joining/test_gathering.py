"""Values of all ranks through a store: what each rank gets, how often it asks, and what else may be in the store."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from bagua_kernels.comm.joining.gathering import Gathering
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits

T = TypeVar("T")


class Counting:
    """A store that counts the messages of one rank which wait for an answer, but for the questions of a wait."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


def among(size: int, fn: Callable[[int], T]) -> list[T]:
    """Runs ranks as threads."""
    found: dict[int, T] = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: fn(rank)})) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.seconds(30))
    return [found[rank] for rank in range(size)]


def gathering(store: Any, rank: int, size: int, seconds: float = 20.0, **options: Any) -> Gathering:
    return Gathering(store, "name", rank, size, time.monotonic() + limits.seconds(seconds), **options)


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_values_in_rank_order(kind: str, tmp_path: Path) -> None:
    """Of any lengths, in several rounds; also from a store that returns one value at a time."""
    store: Any = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 3)

    def fn(rank: int) -> list[list[bytes]]:
        gather = gathering(store, rank, 3)
        return [gather(bytes([rank]) * rank * number) for number in range(4)]

    for found in among(3, fn):
        assert found == [[bytes([rank]) * rank * number for rank in range(3)] for number in range(4)]


def test_a_round_takes_the_same_messages_for_any_number_of_ranks() -> None:
    """One for the own value and one for the list."""
    store = dist.HashStore()
    for size in (2, 9):
        own = [Counting(dist.PrefixStore(f"{size}", store)) for _ in range(size)]
        among(size, lambda rank, own=own, size=size: gathering(own[rank], rank, size)(b"value"))
        for rank, one in enumerate(own):
            one.calls.pop("check")
            expected = {"set": 1, "multi_get": 1, "has_extended_api": 1} if rank == 0 else {"set": 1, "get": 1}
            assert one.calls == expected


def test_one_rank_asks_nobody() -> None:
    assert gathering(None, 0, 1)(b"value") == [b"value"]


def test_a_rank_that_does_not_come() -> None:
    """The wait ends when the time is over, or when it makes no sense any more."""
    with pytest.raises(CollectiveTimeoutError, match="not all ranks"):
        gathering(dist.HashStore(), 0, 2, 0.05)(b"value")

    def look() -> None:
        raise RuntimeError("rank 1 has ended")

    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        gathering(dist.HashStore(), 1, 2, look=look)(b"value")


@pytest.mark.parametrize(
    "list_", [b"", b"\xff\xff\xff\xff", b"\x01\0\0\0a", b"\x01\0\0\0a" * 3, b"\x09\0\0\0" + b"a" * 9 + b"\0" * 4]
)
def test_what_is_no_list_of_values(list_: bytes) -> None:
    """A stranger may have written it."""
    store = dist.HashStore()
    store.set("bagua_kernels/gathering/name/0/all", list_)  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="no list of values of 2 ranks"):
        gathering(store, 1, 2, longest=8)(b"value")


def test_a_value_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="at most 8 bytes, got 9"):
        gathering(dist.HashStore(), 0, 2, longest=8)(bytes(9))
