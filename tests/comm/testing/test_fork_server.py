import atexit
import os
import signal
import sys
import threading

import pytest
import torch

from bagua_kernels.comm.testing import Processes, run_processes
from bagua_kernels.comm.testing.fork_server import ForkedProcess, ForkServer, servers
from tests import limits
from tests.grids import only


def ends(how: str) -> None:
    atexit.register(print, "at exit")
    print(
        os.environ["RANK"], os.environ.get("BAGUA_KERNELS_HEARTBEAT"), threading.active_count(), torch.get_num_threads()
    )
    if how == "raises":
        raise ValueError("as asked")
    if how == "exits":
        sys.exit(3)
    if how == "aborts":
        os.abort()


def told_order() -> None:
    print(list({f"parameter{number}" for number in range(20)}))


def waits() -> None:
    print("ready")
    signal.pause()


@pytest.mark.parametrize(
    ("how", "code"),
    only(
        [("returns", 0), ("raises", 1), ("exits", 3), ("aborts", -signal.SIGABRT)],
        *[("returns", 0), ("aborts", -signal.SIGABRT)],
    ),
)
def test_copies_end_as_processes_do(how: str, code: int) -> None:
    results = run_processes(ends, 2, args=[how], env={"BAGUA_KERNELS_HEARTBEAT": "0.75"})
    for rank, result in enumerate(results):
        assert result.returncode == code
        assert f"{rank} 0.75 1 1" in result.stdout
        assert ("at exit" in result.stdout) == (how != "aborts")
        assert ("ValueError: as asked" in result.stderr) == (how == "raises")


@pytest.mark.slow
def test_sets_of_two_ranks_have_different_orders() -> None:
    first, second = (result.stdout for result in run_processes(told_order, 2))
    assert sorted(eval(first)) == sorted(eval(second))
    assert first != second


@pytest.mark.slow
def test_signals_and_time_limits() -> None:
    with Processes(waits, 2) as processes:
        assert all(isinstance(process, ForkedProcess) for process in processes._processes)
        for rank in range(2):
            processes.wait_for_output(rank, "ready")
        assert processes.poll(0) is None
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] still run after 0.1 s"):
            processes.wait(0.1)
        processes.send_signal(0, signal.SIGTERM)
        assert processes.wait(limits.seconds(10), ranks=[0])[0].returncode == -signal.SIGTERM
        pids = [process.pid for process in processes._processes]
    assert processes.poll(1) == -signal.SIGKILL
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_is_read_at_import_asks_for_a_new_process() -> None:
    with Processes(waits, 1, env={"NUMBA_NUM_THREADS": "1"}) as processes:
        assert not isinstance(processes._processes[0], ForkedProcess)
    assert servers()[0].serves({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RANK": "7"})


def test_a_server_that_was_killed_is_told() -> None:
    server = ForkServer()
    server._process.kill()
    server._process.wait()
    assert not server.serves({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    with pytest.raises(RuntimeError, match="the server that starts processes has ended"):
        server.start(["file", "name", "[]"], os.environ, 1, 2)
    server.close()
