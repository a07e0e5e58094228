"""Groups: partitions that are the same on all ranks, and how fast they spread what one rank has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.mailbox.groups import Butterfly, Groups, Shuffled, Whole
from tests.grids import grid

ALL: list[Groups] = [
    *(Butterfly(size, group) for size in (2, 4, 8, 16) for group in (2, 4, 8) if group <= size),
    *(
        Shuffled(size, group, seed)
        for size in (2, 3, 5, 6, 7, 8)
        for group in (2, 3, 4)
        if group <= size
        for seed in (0, 1)
    ),
    *(Whole(size) for size in (1, 2, 7)),
]


@grid(cover=1, groups=ALL)
def test_every_version_is_a_partition(groups: Groups) -> None:
    for version in [*range(20), 2**40]:
        found = groups.partition(version)
        assert sorted(rank for group in found for rank in group) == list(range(groups.size))
        assert all(list(group) == sorted(group) for group in found)
        for rank in range(groups.size):
            assert rank in groups.of(version, rank)
        if not isinstance(groups, Whole):
            assert min(map(len, found)) >= groups.group  # type: ignore[attr-defined]
            assert max(map(len, found)) - min(map(len, found)) <= 1


def mixing(groups: Groups, version: int) -> np.ndarray:
    matrix = np.zeros((groups.size, groups.size))
    for group in groups.partition(version):
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


@grid(cover=1, size__group=[(2, 2), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (8, 8)])
def test_a_butterfly_has_the_exact_mean_after_few_versions(size: int, group: int) -> None:
    groups = Butterfly(size, group)
    versions = math.ceil(math.log2(size) / math.log2(group))
    for first in range(5):
        product = np.eye(size)
        for version in range(first, first + versions):
            product = mixing(groups, version) @ product
        assert np.allclose(product, 1 / size)


def test_the_papers_example() -> None:
    groups = Butterfly(8, 4)
    assert groups.partition(0) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups.partition(1) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [groups.partition(version) for version in range(3, 6)] == [groups.partition(version) for version in range(3)]


def test_a_shuffle_spreads_what_one_rank_has() -> None:
    product = np.eye(7)
    for version in range(30):
        product = mixing(Shuffled(7, 2), version) @ product
    assert np.allclose(product, 1 / 7, atol=1e-3)
    assert Shuffled(7, 2, 1).partition(0) != Shuffled(7, 2, 2).partition(0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Butterfly(6, 2), "power of two, got 6"),
        (lambda: Butterfly(8, 3), "power of two, got 3"),
        (lambda: Butterfly(4, 8), "from 2 to 4"),
        (lambda: Shuffled(4, 1), "from 2 to 4"),
        (lambda: Whole(0), "an int >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


def test_all_ranks_must_have_the_same() -> None:
    def differ(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=r"ranks \[2\] hold other groups than rank 0.*seed=9"):
            Shuffled(3, 2, 9 if communicator.rank == 2 else 0).check(communicator)
        with pytest.raises(ValueError, match="for 4 ranks: expected some for 3"):
            Whole(4).check(communicator)
        Shuffled(3, 2).check(communicator)

    run_ranks(3, differ)
