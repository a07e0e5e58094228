"""How processes find one another, and how they part."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from bagua_kernels import comm
from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.joining import bounded, incarnation
from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.incarnation import Incarnation, agree
from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.comm.testing import Processes, free_port, run_processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LAUNCHERS = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JSM_NAMESPACE_SIZE",
)
VARIABLES = (*ENVIRONMENT, "LOCAL_RANK", *LAUNCHERS, "SLURM_NTASKS", "SLURM_NPROCS")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a launcher."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_launch_reads_the_environment() -> None:
    """All of it, or nothing."""
    assert Launch.read({}) is None
    assert Launch.read({"MASTER_ADDR": "elsewhere"}) is None
    assert Launch.read(ENVIRONMENT) == Launch(1, 2, None, "127.0.0.1", 29500)
    assert Launch.read({**ENVIRONMENT, "LOCAL_RANK": "0"}) == Launch(1, 2, 0, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"WORLD_SIZE": ""}, "lacks WORLD_SIZE"),
        ({"RANK": ""}, "lacks RANK"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "lacks MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "two"}, "RANK='two'"),
        ({"RANK": "2"}, "RANK from 0 to"),
    ],
)
def test_launch_refuses_half_an_environment(change: dict[str, str], text: str) -> None:
    """The error names what is missing."""
    with pytest.raises(ValueError, match=text):
        Launch.read({**ENVIRONMENT, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_PORT": "70000"}, "from 1 to 65535, got MASTER_PORT=70000"),
        ({"MASTER_PORT": "0"}, "from 1 to 65535, got MASTER_PORT=0"),
        ({"LOCAL_RANK": "-1"}, "got LOCAL_RANK=-1"),
        ({"WORLD_SIZE": "99999999999"}, "got WORLD_SIZE=99999999999"),
        ({"MASTER_ADDR": "127.0.0.1:29500"}, "got MASTER_ADDR='127.0.0.1:29500'"),
        ({"MASTER_ADDR": "tcp://host"}, "got MASTER_ADDR="),
        ({"MASTER_ADDR": "a b"}, "got MASTER_ADDR="),
        ({"MASTER_ADDR": "x" * 70}, "got MASTER_ADDR="),
    ],
)
def test_launch_refuses_what_cannot_be(change: dict[str, str], text: str) -> None:
    """No socket is needed to see that these values lead nowhere."""
    with pytest.raises(ValueError, match=text):
        Launch.read({**ENVIRONMENT, **change})


def test_launch_takes_what_can_be() -> None:
    """Any address, and for one process any port that is free."""
    for address in ("::1", "fe80::1%eth0", "host-1.example.org", "under_score", "host.", "bücher"):
        found = Launch.read({**ENVIRONMENT, "MASTER_ADDR": address})
        assert found is not None
        assert found.master_addr == address
    assert Launch.read({**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}) is not None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_another_launcher_leaves_no_process_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would train a model of its own, and say nothing."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=rf"{name}=2 .* is not one of their numbers: .*LAUNCHER=alone"):
        comm.init()
    assert not comm.is_initialized()
    monkeypatch.setenv("BAGUA_KERNELS_LAUNCHER", "alone")
    assert comm.init().size == 1
    comm.shutdown()
    monkeypatch.delenv("BAGUA_KERNELS_LAUNCHER")
    monkeypatch.setenv(name, "1")
    assert comm.init().size == 1
    comm.shutdown()
    monkeypatch.setenv(name, "2")
    assert Launch.read({**ENVIRONMENT, name: "2"}) is not None


@pytest.mark.usefixtures("alone")
def test_an_allocation_of_several_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script has these variables too, and may well train alone."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NPROCS", "4")
    with pytest.warns(RuntimeWarning, match="SLURM_NTASKS=4") as told:
        comm.init()
    assert comm.init().size == 1
    assert len(told) == 1
    assert told[0].filename == __file__
    comm.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("BAGUA_KERNELS_LAUNCHER", "alone")
        comm.init()
    comm.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [0.0, 1e10, float("inf"), float("nan")])
def test_timeouts_that_no_clock_takes(timeout: float) -> None:
    """They are refused before anything is opened."""
    with pytest.raises(ValueError, match="expected a number of seconds from"):
        comm.init(timeout=timeout)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BAGUA_KERNELS_HEARTBEAT", "x"),
        ("BAGUA_KERNELS_SECRET", "short"),
        ("GLOO_SOCKET_IFNAME", "lo,nope"),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_setting_that_others_wait_for_is_read_first(
    name: str, text: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has it says so before it opens the store, whichever it is."""
    for key, value in {**ENVIRONMENT, "RANK": rank, name: text}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(rendezvous, "begin", lambda *_: pytest.fail("it went on"))
    with pytest.raises(ValueError, match=name):
        comm.init(timeout=5.0)


@pytest.mark.usefixtures("alone")
def test_single_process() -> None:
    """No launcher: one rank, no torch.distributed."""
    with pytest.raises(RuntimeError, match=r"call bagua_kernels\.comm\.init"):
        comm.world()
    assert not comm.is_initialized()
    try:
        communicator = comm.init(timeout=5, device="cpu")
        assert comm.init() is communicator
        assert comm.world() is communicator
        assert (comm.rank(), comm.size(), comm.device()) == (0, 1, torch.device("cpu"))
        assert not dist.is_initialized()
        x = torch.arange(3.0)
        communicator.all_reduce(x, comm.ReduceOp.AVG).wait()
        assert x.tolist() == [0, 1, 2]
        assert communicator.all_gather_object("a") == ["a"]
        assert communicator.bytes_sent == 0
        with pytest.raises(ValueError, match="timeout=5"):
            comm.init(timeout=6)
        with pytest.raises(ValueError, match="device"):
            comm.init(device="meta")
    finally:
        comm.shutdown()
    assert not comm.is_initialized()
    comm.shutdown()
    with pytest.raises(CommunicationError, match="closed"):
        communicator.barrier()


def test_package_is_imported_under_its_name_only() -> None:
    """The folder at the top of the repository is no package called comm."""
    root = Path(__file__).parents[2]
    if not (root / "comm").is_dir():
        pytest.skip("not run from the repository")
    command = [sys.executable, "-c", "import comm"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limits.seconds(60), check=False)
    assert "imported as bagua_kernels.comm" in result.stderr.splitlines()[-1]


def test_agree_ignores_what_dead_ranks_left() -> None:
    """The same store again, as torchrun hands it out, with every key of an earlier start in it."""
    store = HashStore()

    def start(c: comm.Communicator) -> str:
        time.sleep(0.05 * ((c.rank * 7) % 3))
        with BoundedStore(store, time.monotonic() + limits.seconds(10)) as asked:
            return agree(asked, c.rank, c.size, timeout=limits.seconds(10)).name

    names = [set(comm.run_ranks(3, start)) for _ in range(4)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 4


def test_agree_reads_the_list_that_may_start() -> None:
    """Rank 1 has confirmed a list without rank 2, and looks next when all may start."""
    store = HashStore()

    class Slow(BoundedStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if "/confirmed/" in key:
                store.set("rank 1 has confirmed", "")

        def check(self, key: str) -> bool:
            while "/go/" in key and not super().check(key):
                time.sleep(0.001)
            return super().check(key)

    def start(c: comm.Communicator) -> Incarnation:
        while c.rank == 2 and not store.check(["rank 1 has confirmed"]):
            time.sleep(0.001)
        with (Slow if c.rank == 1 else BoundedStore)(store, time.monotonic() + limits.seconds(10)) as asked:
            return agree(asked, c.rank, c.size, timeout=limits.seconds(10))

    first, *others = comm.run_ranks(3, start)
    assert [each.name for each in others] == [first.name] * 2
    assert [len(each.processes) for each in (first, *others)] == [3] * 3


@pytest.mark.parametrize("absent", [2, 0])
def test_agree_names_who_is_missing(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, by a virtual clock; rank 0 stays for an eighth of the timeout more, for others may need its store."""
    schedule, store = comm.Schedule(0), HashStore()
    for module in (incarnation, bounded):  # a rank waits in both
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=schedule.now, sleep=schedule.sleep))

    def start(c: comm.Communicator) -> None:
        if c.rank != absent:
            schedule.sleep(0.5 * c.rank)
            asked = BoundedStore(store, schedule.now() + limits.seconds(20))
            with asked, pytest.raises(CollectiveTimeoutError, match="not all 3 ranks arrived within 8 s") as caught:
                agree(asked, c.rank, c.size, timeout=8.0)
            assert caught.value.ranks == (absent,)
            assert schedule.now() < 0.5 * c.rank + 9.1

    comm.run_ranks(3, start, schedule=schedule)


def whole_life() -> None:
    """Joins, uses the world, a user's group of two, and parts; then joins once more."""
    before = dict(os.environ)
    for _ in range(2):
        communicator = comm.init(timeout=limits.seconds(30))
        assert dist.is_initialized()
        assert dict(os.environ) == before
        assert comm.size() == 3
        # torch's own group works beside ours, in any order.
        x, y = torch.ones(2), torch.ones(2)
        works = [communicator.all_reduce(x), communicator.all_reduce(y)]
        z = torch.ones(2)
        dist.all_reduce(z)
        for work in works:
            work.wait()
        assert x.tolist() == y.tolist() == z.tolist() == [3, 3]
        group = dist.new_group([1, 2])
        if comm.rank() in (1, 2):
            with comm.TorchCommunicator(group, timeout=limits.seconds(20), watch=False) as pair:
                assert pair.rank == comm.rank() - 1
                assert pair.all_gather_object(comm.rank()) == [1, 2]
        comm.shutdown()
        assert not dist.is_initialized()
    comm.init(timeout=limits.seconds(30)).barrier().wait()
    time.sleep(0.5 * comm.rank())  # and leaves the rest to the end of the process
    print("FINE", flush=True)


def test_whole_life() -> None:
    """Init, shutdown, init, exit, without a word on stderr."""
    for result in run_processes(whole_life, 3, timeout=limits.seconds(60)):
        assert result.returncode == 0, result.stderr
        assert result.stdout == "FINE\n"
        assert result.stderr == ""


def with_users_group() -> None:
    """The user has initialised torch.distributed; it stays theirs."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=limits.seconds(30)))
    communicator = comm.init(timeout=limits.seconds(20))
    x = torch.full((3,), float(comm.rank()))
    communicator.all_reduce(x).wait()
    assert x.tolist() == [1, 1, 1]
    comm.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    print("FINE", flush=True)


@pytest.mark.slow
def test_users_group_is_used_and_kept() -> None:
    """As under Lightning or Accelerate."""
    for result in run_processes(with_users_group, 2, timeout=limits.seconds(60)):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


def dies_with_work_pending() -> None:
    """Rank 1 raises while rank 0 waits, for long; rank 0 lets the process end with a duplicate's work under way."""
    rendezvous._LONGEST_GOODBYE = limits.NEVER
    communicator = comm.init(timeout=limits.NEVER)
    other = communicator.duplicate()
    x = torch.ones(10)
    if comm.rank() == 1:
        time.sleep(1)
        raise ValueError("done for")
    pending = other.all_reduce(torch.ones(5))
    try:
        communicator.all_reduce(x).wait()
    except CommunicationError as error:
        print("TOLD", error, flush=True)
        sys.exit(4)
    del pending


@pytest.mark.slow
def test_exit_does_not_hang_when_a_peer_died() -> None:
    """Operations that can never finish do not keep a process from ending, nor an exception from being told."""
    with Processes(dies_with_work_pending, 2, env={"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.25)}"}) as processes:
        survivor, culprit = processes.wait(limits.seconds(40))
    assert survivor.returncode == 4, survivor.stderr
    assert "ValueError: done for" in survivor.stdout
    assert culprit.returncode == 1
    assert "ValueError: done for" in culprit.stderr


def with_settings(variable: str, values: list[str]) -> None:
    """Each rank has its own idea of a setting; then they agree, and go on in the same processes."""
    rank = int(os.environ["RANK"])
    os.environ[variable] = values[rank]
    with pytest.raises(ValueError, match=variable):
        comm.init(timeout=limits.seconds(20))
    assert not comm.is_initialized()
    assert not torch.distributed.is_initialized()
    assert [t.name for t in threading.enumerate() if t.name.startswith("bagua_kernels sockets")] == []
    del os.environ[variable]
    os.environ["MASTER_PORT"] = values[-1]
    assert comm.init(timeout=limits.seconds(20)).all_gather_object(rank) == [0, 1]
    print("FINE", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("BAGUA_KERNELS_SOCKETS", ["0", "2"]),
        ("BAGUA_KERNELS_SOCKETS", ["2", "4"]),
        ("BAGUA_KERNELS_SOCKETS", ["2", "many"]),
        ("BAGUA_KERNELS_TUNING", ["", "{"]),
        ("BAGUA_KERNELS_TUNING", ["", "{}"]),
    ],
)
def test_settings_that_differ_between_ranks(variable: str, values: list[str]) -> None:
    """All ranks say so at once, nothing of the attempt is left, and the next one finds a clean slate."""
    for result in run_processes(
        with_settings, 2, args=[variable, [*values, str(free_port())]], timeout=limits.seconds(60)
    ):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


@pytest.mark.slow
def test_a_forked_child_leaves_the_connections_to_its_parent() -> None:
    """It ends without a farewell to the other ranks, and the parents go on."""
    for result in run_processes(forks, 2, timeout=limits.seconds(60), fresh=True):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


def forks() -> None:
    """Each rank forks a child that exits as a Python program does."""
    rendezvous._LONGEST_GOODBYE = limits.NEVER
    communicator = comm.init(timeout=limits.NEVER)
    communicator.barrier().wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        sys.exit(7 if comm.is_initialized() else 0)
    assert os.waitpid(child, 0)[1] == 0
    communicator.barrier().wait()
    print("FINE", flush=True)


def exits_while_others_hang() -> None:
    """Rank 0 leaves by an exception with work under way that rank 1 never joins, and rank 1 stays alive."""
    rendezvous._LONGEST_GOODBYE = limits.NEVER
    communicator = comm.init(timeout=limits.NEVER)
    communicator.barrier().wait()
    if comm.rank() == 1:
        time.sleep(limits.NEVER)
    communicator.all_reduce(torch.ones(1000))
    raise ValueError("early")


@pytest.mark.slow
def test_exit_does_not_wait_for_work_under_way() -> None:
    """Gloo's own destructor would wait for the timeout."""
    with Processes(exits_while_others_hang, 2) as processes:
        (result,) = processes.wait(limits.seconds(30), [0])
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: early")


def restarts(folder: str) -> None:
    """Under torchrun: the first attempt dies, the second reads the same store."""
    communicator = comm.init(timeout=limits.seconds(20))
    x = torch.ones(4)
    communicator.all_reduce(x).wait()
    assert x.tolist() == [2, 2, 2, 2]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if comm.rank() == 1:
            os._exit(9)
        communicator.all_reduce(x).wait()
    Path(folder, f"fine{comm.rank()}").touch()


@pytest.mark.slow
def test_torchrun_restarts(tmp_path: Path) -> None:
    """After a rank died, the second attempt does not see its addresses."""
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('module', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"module.restarts({str(tmp_path)!r})\n"
    )
    root = Path(__file__).parents[2]
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.25)}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", str(script)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limits.seconds(90), check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "fine0").exists()
    assert (tmp_path / "fine1").exists()
