"""A group may be made over a store that still holds what an earlier start's ranks have written, as torchrun's agent keeps one."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
import torch.distributed as dist

from bagua_kernels import comm
from bagua_kernels.comm.testing import run_processes
from tests import limits

pytestmark = pytest.mark.processes


def rank() -> None:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    group = dist.distributed_c10d._get_default_group()
    if dist.get_rank() == 1:
        # What a rank 1 that is dead had written for its first rounds.
        whose = f"{group.group_name}/{hashlib.sha256(b'0,1').hexdigest()[:16]}"
        for number in range(3):
            store.set(f"bagua_kernels/gathering/{whose}/1/{number}/1", "x" * 32)
        store.set("written", "1")
        # By now rank 0 has taken it, if it takes it at all.
        time.sleep(1.0)
    store.wait(["written"])
    world = comm.init()
    total = torch.ones(3)
    world.all_reduce(total).wait()
    print("TOTAL", total.tolist(), flush=True)
    comm.shutdown()
    dist.destroy_process_group()


def test_what_a_dead_rank_has_written_is_not_taken() -> None:
    results = run_processes(rank, 2, timeout=limits.seconds(60))
    assert [one.returncode for one in results] == [0, 0], "\n".join(one.stderr[-2000:] for one in results)
    assert ["TOTAL [2.0, 2.0, 2.0]" in one.stdout for one in results] == [True, True]
