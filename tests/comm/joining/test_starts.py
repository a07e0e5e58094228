"""How a start fails: ranks that never come, that die on the way, and what a failure leaves for the next start."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from bagua_kernels import comm
from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.joining import bounded, incarnation, start
from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.comm.testing import Processes, free_port, run_processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, RankLostError
from tests import limits
from tests.clocks import VirtualClock

TIMEOUT = limits.seconds(8.0)
LIMIT = limits.seconds(120)
HEARTBEAT = {"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.1)}"}
STAGES = ("group", "introduction", "connections", "signs", "settings", "sockets")


def starting(absent: list[int], delays: list[float]) -> None:
    """Comes late, or not at all; tells what init raised."""
    rank = int(os.environ["RANK"])
    if rank in absent:
        return
    time.sleep(delays[rank])
    try:
        comm.init(timeout=TIMEOUT)
    except CommunicationError as error:
        tell(error)
    else:
        print("JOINED", flush=True)


def tell(error: CommunicationError) -> None:
    """Prints an error for the test to read."""
    told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
    print("TOLD", json.dumps(told), flush=True)


def told(result: Any) -> dict[str, Any]:
    """Returns what a rank told."""
    assert result.returncode == 0, (result.stdout, result.stderr)
    lines = [line for line in result.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, (result.stdout, result.stderr)
    fields: dict[str, Any] = json.loads(lines[0].removeprefix("TOLD "))
    return fields


@pytest.mark.slow
@pytest.mark.parametrize("absent", [2, 0])
def test_a_rank_that_never_starts_is_named(absent: int) -> None:
    """By all others, also where one of them came earlier."""
    results = run_processes(starting, 3, args=[[absent], [0.5, 0.0, 0.0]], timeout=LIMIT)
    for rank in {0, 1, 2} - {absent}:
        fields = told(results[rank])
        assert (fields["kind"], fields["ranks"]) == ("CollectiveTimeoutError", [absent]), fields
        # What is left of the timeout when a rank has reached the store.
        limit = re.search(r"within ([\d.]+) s", fields["text"])
        assert limit is not None, fields
        assert 0 < float(limit[1]) <= TIMEOUT, fields


@pytest.mark.parametrize("answers", [True, False])
def test_a_host_that_never_comes_is_given_up_within_the_timeout(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's machine refuses connections, or answers nothing; the clock runs only while this rank waits."""
    clock = VirtualClock()

    def connect(address: tuple[str, int], timeout: float) -> Any:
        clock.sleep(0.02 if answers else timeout)
        raise ConnectionRefusedError("refused") if answers else TimeoutError("timed out")

    monkeypatch.setattr(start, "time", clock)
    monkeypatch.setattr(start, "socket", SimpleNamespace(create_connection=connect))
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 did not open the store at .* within 8 s") as caught:
        start.open_store("127.0.0.1", 1, 1, 8.0, launcher=False)
    assert caught.value.ranks == (0,)
    assert 7.5 < clock.now <= 8.0


def test_a_store_of_an_earlier_start_that_closes_is_left_for_the_next() -> None:
    """Rank 1 has come already; it meets rank 0 at the store that opens at the same port."""
    port, names, stores = free_port(), list[str](), list[object]()
    launches = [Launch(rank, 2, rank, "127.0.0.1", port) for rank in range(2)]
    earlier = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]

    def come(launch: Launch) -> None:
        store, begun = start.begin(launch, limits.seconds(20))
        stores.append(store)
        with begun.told():
            names.append(begun.name)

    other = threading.Thread(target=come, args=[launches[1]], daemon=True)
    other.start()
    limits.until(lambda: earlier[0].check(["bagua_kernels/attempt/1"]), "rank 1 has come")
    earlier.clear()
    come(launches[0])
    other.join(limits.seconds(30))
    assert len(names) == 2
    assert names[0] == names[1]


@pytest.mark.parametrize("error", [RuntimeError("timed out"), CollectiveTimeoutError("not all came in time")])
def test_a_rank_that_falls_silent_in_the_start_is_named_within_the_timeout(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have come; then rank 2 is heard of no more, and the transport fails on the others when its time is over."""
    schedule, store = comm.Schedule(0), HashStore()
    clock = SimpleNamespace(monotonic=schedule.now, sleep=schedule.sleep)
    for module in (bounded, incarnation, start):
        monkeypatch.setattr(module, "time", clock)

    def rank(c: comm.Communicator) -> None:
        begun = start.Start(store, c.rank, c.size, 8.0, schedule.now(), launcher=False)
        if c.rank == 2:
            schedule.sleep(20)
            begun._store.close()
            return
        schedule.sleep(begun.left())
        with pytest.raises(RankLostError, match="rank 2 did not answer within 8 s") as caught, begun.told():
            raise error
        assert caught.value.ranks == (2,)
        assert schedule.now() <= 8.1

    comm.run_ranks(3, rank, schedule=schedule)


def test_a_store_that_does_not_answer_is_given_up_in_time() -> None:
    """Its thread is waited for when the process ends, not by the call; a store that answers leaves none."""
    release = threading.Event()

    class Hanging(HashStore):
        def check(self, keys: list[str]) -> bool:
            return release.wait(limits.seconds(30))

    with BoundedStore(HashStore(), time.monotonic() + limits.seconds(10)) as store:
        store.set("key", "value")
        assert store.get("key") == "value"
    assert store._thread is not None
    assert not store._thread.is_alive()
    store = BoundedStore(Hanging(), time.monotonic() + 0.2)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="does not answer"):
            store.check("key")
    release.set()
    assert store._thread is not None
    store._thread.join(limits.seconds(10))
    assert not store._thread.is_alive()


def test_a_start_that_fails_leaves_no_thread_in_torch() -> None:
    """Where it waits for a rank that has ended: it would come back at any time, also while the interpreter ends."""
    before = threading.enumerate()

    def look() -> None:
        raise RuntimeError("the process of rank 1 has ended")

    waiting = SimpleNamespace(left=lambda: limits.NEVER, look=look)
    store = PrefixStore("start", HashStore())
    store.set_timeout(timedelta(seconds=limits.NEVER))
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        rendezvous._init_group(
            SimpleNamespace(rank=0, world_size=2),  # type: ignore[arg-type]
            torch.device("cpu"),
            store,
            waiting,  # type: ignore[arg-type]
        )
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(limits.seconds(20))
            assert not thread.is_alive()
    assert not dist.is_initialized()


def waits() -> None:
    """Asks the store of torch's default group for what never comes."""
    comm.init(timeout=limits.seconds(60))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {comm.rank()}", "1")
    store.wait([f"here {1 - comm.rank()}"], timedelta(seconds=limits.seconds(30)))
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.1))
    assert store.add("count", 1) in (1, 2)
    assert isinstance(store.underlying_store, PrefixStore)
    comm.shutdown()
    print("FINE", flush=True)


def test_waits_of_torchs_default_store_have_their_limits() -> None:
    for result in run_processes(waits, 2, timeout=LIMIT):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


def dying(stage: str, victim: int, how: str, folder: str) -> None:
    """The victim dies, or stops, in a stage of init to which all have come."""
    rank = int(os.environ["RANK"])
    places: dict[str, tuple[Any, str]] = {
        "group": (dist, "init_process_group"),
        "introduction": (sys.modules["bagua_kernels.comm.backends.torch_distributed.communicator"], "Introduction"),
        "connections": (sys.modules["bagua_kernels.comm.backends.torch_distributed.communicator"], "group_beside"),
        "signs": (sys.modules["bagua_kernels.comm.failures.liveness_store"], "connect"),
        "settings": (sys.modules["bagua_kernels.comm.backends.selection"], "agreed_settings"),
        "sockets": (sys.modules["bagua_kernels.comm.backends.sockets.mesh"], "connect"),
    }
    module, name = places[stage]
    before = getattr(module, name)

    def come(*args: Any, **keywords: Any) -> Any:
        Path(folder, f"{rank}").touch()
        if rank == victim:
            # Ranks that are still on the way would fail in an earlier stage, of which Gloo's connections take half a minute.
            while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
        if rank == victim and how == "raises":
            raise KeyError("no such thing")
        if rank == victim:
            os.kill(os.getpid(), getattr(signal, how))
        return before(*args, **keywords)

    setattr(module, name, come)
    try:
        comm.init(timeout=TIMEOUT)
    except CommunicationError as error:
        tell(error)
    except KeyError:
        print("RAISED", flush=True)


# Torch's own store waits for ever for a host that is stopped, and Gloo's groups are made with it.
HOSTS_STOP = [(stage, 0, "SIGSTOP") for stage in ("group", "introduction", "connections")]
QUICK = [("group", 2, "SIGKILL")]


@pytest.mark.parametrize(
    ("stage", "victim", "how"),
    [
        *QUICK,
        *(
            pytest.param(stage, victim, how, marks=pytest.mark.slow)
            for number, stage in enumerate(STAGES)
            for victim in (0, 2)
            for place, how in enumerate(("SIGKILL", "SIGSTOP", "raises"))
            # Each stage and each way with both victims, but not all three by all.
            if (number + place + victim // 2) % 2 and (stage, victim, how) not in [*QUICK, *HOSTS_STOP]
        ),
    ],
)
def test_a_rank_that_dies_in_the_middle_of_init_is_named(stage: str, victim: int, how: str, tmp_path: Path) -> None:
    """By an error of this package."""
    with Processes(dying, 3, args=[stage, victim, how, str(tmp_path)], env=HEARTBEAT) as processes:
        survivors = [rank for rank in range(3) if rank != victim]
        for result in processes.wait(LIMIT, survivors):
            fields = told(result)
            assert fields["kind"] in ("RankLostError", "CollectiveTimeoutError"), fields
            assert fields["ranks"] == [victim], fields


def survives(ports: list[int]) -> None:
    """Rank 1 of three dies; the others start anew, as two, and train."""
    communicator = comm.init(timeout=limits.seconds(20))
    x = torch.ones(10)
    communicator.all_reduce(x).wait()
    rank = communicator.rank
    if rank == 1:
        os._exit(1)
    for attempt, port in enumerate(ports):
        try:
            while True:
                communicator.all_reduce(x, comm.ReduceOp.AVG).wait()
                if attempt:
                    raise CommunicationError("enough")
        except CommunicationError as error:
            if attempt:
                communicator.abort(str(error))
        comm.shutdown()
        assert not comm.is_initialized()
        assert not dist.is_initialized()
        os.environ.update(RANK=str(rank // 2), WORLD_SIZE="2", LOCAL_RANK=str(rank // 2), MASTER_PORT=str(port))
        communicator = comm.init(timeout=limits.seconds(20))
        assert communicator.all_gather_object(rank) == [0, 2]
        y = torch.full((5,), float(communicator.rank))
        communicator.all_reduce(y).wait()
        dist.all_reduce(y)
        assert y.tolist() == [2.0] * 5
        communicator.barrier().wait()
    comm.shutdown()
    print("FINE", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("same_port", [False, True])
def test_survivors_start_anew(same_port: bool) -> None:
    """In the same processes, twice, where rank 0's store still listens or at another port."""
    port = [free_port(), free_port()]
    with Processes(survives, 3, args=[port[:1] * 2 if same_port else port], env=HEARTBEAT) as processes:
        for result in processes.wait(limits.seconds(120), [0, 2]):
            assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr
