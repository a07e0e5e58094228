"""The limit on open files: raised where it is too low, and one sentence where that does not do."""

from __future__ import annotations

import resource
import warnings

import pytest

from bagua_kernels.comm.joining import descriptors
from bagua_kernels.comm.joining.descriptors import make_room
from bagua_kernels.errors import CommunicationError
from bench import many


class Limits:
    """Limits of a process, of which 20 files are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, fixed: bool = False) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(descriptors, "_open", lambda: 20)
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", self._forbidden if fixed else self._set)

    def _set(self, _: int, limits: tuple[int, int]) -> None:
        self.now = limits

    def _forbidden(self, _: int, limits: tuple[int, int]) -> None:
        raise ValueError(f"not allowed to set {limits}")


def test_a_limit_that_will_do_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft in (1024, resource.RLIM_INFINITY):
        limits = Limits(monkeypatch, soft, resource.RLIM_INFINITY)
        make_room(500, 500, 400)
        assert limits.now == (soft, resource.RLIM_INFINITY)


@pytest.mark.parametrize(("needed", "useful"), [(1000, 0), (100, 5000)])
def test_the_soft_limit_becomes_the_hard_one(needed: int, useful: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what may be wanted later, though that may be more than the hard one allows."""
    limits = Limits(monkeypatch, 1024, 4096)
    make_room(needed, 500, useful)
    assert limits.now == (4096, 4096)


@pytest.mark.parametrize(("hard", "fixed"), [(1024, False), (4096, True)])
def test_one_sentence_where_that_does_not_do(hard: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With how many are needed, by how many ranks, and what to do."""
    Limits(monkeypatch, 1024, hard, fixed)
    with pytest.raises(CommunicationError) as caught:
        make_room(2000, 2000)
    text = str(caught.value)
    assert text.startswith(
        "this process needs 2084 file descriptors among 2000 ranks, and may have 1024: raise the hard limit"
    )
    assert "or start fewer ranks" in text


@pytest.mark.processes
def test_ranks_forked_from_one_process_have_few() -> None:
    """At most one for each other rank; three would be allowed, with a mailbox."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks with threads
        few, more = (
            max(one.descriptors for one in many.run(size, many.NOTHING, limit=1024, timeout=100)[1:]) for size in (2, 5)
        )
    assert more - few <= 3 * 1
