"""Which ranks an error names where some left because of others."""

from __future__ import annotations

import pytest

from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.mailboxes import open_mailbox
from bagua_kernels.comm.mailbox import left_reason, lost_error
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, LinkError, RankLostError, culprits_of
from tests import limits


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({1: "its connection broke"}, (1,)),
        ({1: "its connection broke", 2: left_reason("an exchange failed", [1])}, (1,)),
        ({2: left_reason("an exchange failed", [1])}, (1,)),
        ({2: left_reason("an exchange failed", [3]), 3: left_reason("an exchange failed", [1, 4])}, (1, 4)),
        ({2: left_reason("an exchange failed", [2]), 3: left_reason("")}, (2, 3)),
        ({2: left_reason("an exchange failed", [3]), 3: left_reason("an exchange failed", [2])}, (2, 3)),
        ({2: left_reason("its words were '; at fault: rank 1', it said")}, (2,)),
    ],
)
def test_those_that_nobody_else_took_along_are_named(lost: dict[int, str], expected: tuple[int, ...]) -> None:
    """Through all that lies between."""
    assert lost_error("exchange #1", list(lost)[:1], lost).ranks == expected


def test_a_rank_that_leaves_names_its_culprits() -> None:
    """Over a mailbox; the text says which."""

    def rank(c: LocalCommunicator) -> None:
        mailbox = open_mailbox(c)
        if c.rank == 2:
            mailbox.leave("an exchange failed", [1])
        limits.until(lambda: c.rank == 2 or 2 in mailbox.lost(), "rank 2 has left")
        if c.rank == 0:
            assert mailbox.lost()[2] == "it left: an exchange failed; at fault: rank 1"
        c.barrier().wait()
        mailbox.leave()

    run_ranks(3, rank)


def test_only_lost_and_late_ranks_are_to_blame() -> None:
    """Both ends of a broken link are alive."""
    assert culprits_of(RankLostError("", [1])) == culprits_of(CollectiveTimeoutError("", [1])) == (1,)
    assert culprits_of(LinkError("", [0, 1])) == culprits_of(CommunicationError("")) == culprits_of(None) == ()
