"""A rank that shuts down because of an exception: the others are not left waiting for it, nor it for them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CommunicationError
from tests import limits

LIMIT = limits.seconds(60)


def works(block: str) -> None:
    """Ranks that begin twice, as those of a launcher that uses processes again."""
    told: list[Any] = []
    for start in range(2):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + start)
        comm.init(timeout=LIMIT)
        try:
            try:
                if comm.rank() == 1 and start == 0:
                    raise KeyError("a sample")
                for _ in range(2):
                    comm.world().all_reduce(torch.ones(4)).wait()
            except KeyError:
                if block == "except":
                    comm.shutdown()
                raise
            finally:
                if block == "finally":
                    comm.shutdown()
        except (CommunicationError, KeyError) as error:
            told.append([type(error).__name__, list(getattr(error, "ranks", ())), str(error)])
        comm.shutdown()
    print("REPORT", json.dumps(told), flush=True)


@pytest.mark.processes
@pytest.mark.parametrize("block", ["finally", "except"])
def test_nobody_waits_for_a_rank_that_failed(block: str) -> None:
    """Rank 0 gets an error that names rank 1 and its exception; the second start goes well."""
    results = run_processes(works, 2, args=[block], timeout=LIMIT)
    assert [one.returncode for one in results] == [0, 0], results[0].stderr[-2000:] + results[1].stderr[-2000:]
    first, second = [json.loads(one.stdout.split("REPORT ", 1)[1]) for one in results]
    assert [one[:1] for one in second] == [["KeyError"]]
    assert len(first) == 1
    kind, ranks, text = first[0]
    assert kind == "RankLostError"
    assert ranks == [1]
    assert "KeyError" in text
