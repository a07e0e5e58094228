"""What `init` makes of the variables of each launcher: a table of environments, as launchers set them."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bagua_kernels import comm, knobs
from bagua_kernels.algorithms.data.shared_epoch import ranks_here
from bagua_kernels.comm.joining import launch as launch_module
from bagua_kernels.comm.joining.address import strays
from bagua_kernels.comm.joining.launch import Launch, Refusal
from bagua_kernels.comm.joining.launchers import LAUNCHERS, first_host
from tests.grids import folded

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_JOB_NAME": "train",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "prterun-n1-1@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "9",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_JOB_ID": "77",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41111",
}
PLACE = {"MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@dataclass(frozen=True)
class Case:
    """One environment.

    Attributes:
        environment: the variables; a process of no launcher has none.
        rank: the number of the process; None if it is alone.
        size: the number of processes.
        local: its number on its host.
        address: the host of rank 0; None for any.
        port: None for a derived one.
        error: part of the error instead.
        warning: part of the warning.
    """

    environment: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    size: int = 1
    local: int | None = None
    address: str | None = None
    port: int | None = None
    error: str = ""
    warning: str = ""


CASES = {
    "nothing": Case(),
    "empty": Case({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_NUM_TASKS": "", "OMPI_COMM_WORLD_SIZE": ""}),
    "torchrun": Case(TORCHRUN, 5, 8, 1, "n1", 29500),
    "torchrun alone": Case({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 0, 1, 0, "n1", 29500),
    "by hand": Case(HAND, 1, 2, None, "n1", 29500),
    # WORLD_SIZE counts pods, and nothing numbers the processes of one (T6).
    "PyTorchJob": Case({**HAND, "PET_NNODES": "2"}, 1, 2, None, "n1", 29500),
    "Kubeflow's torchrun": Case({**TORCHRUN, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, 5, 8, 1, "n1", 29500),
    "Kubeflow without torchrun": Case({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, error="start the program by torchrun"),
    "Ray's workers": Case({**TORCHRUN, "NODE_RANK": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}, 5, 8, 1, "n1", 29500),
    "submitit's export": Case({**SLURM, **HAND, "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 1, 4, 1, "n1", 29500),
    "Lightning's launcher without a group": Case(LIGHTNING, error="lacks RANK"),
    "SkyPilot's torchrun": Case({**TORCHRUN, "SKYPILOT_NUM_NODES": "2"}, 5, 8, 1, "n1", 29500),
    "SkyPilot without torchrun": Case(
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        error="start the program by torchrun --nnodes",
    ),
    "srun": Case(SLURM, 3, 4, 1, "n01"),
    "srun on one host": Case({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, 3, 4, 1, "127.0.0.1"),
    "srun, address and port given": Case(
        {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"}, 3, 4, 1, "head", 4000
    ),
    # SLURM_NTASKS counts agents here (T2).
    "srun torchrun": Case(
        {**SLURM, **TORCHRUN, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, 5, 8, 1, "n1", 29500
    ),
    "srun --mpi=pmi2": Case({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, None, "n01"),
    "srun --mpi=pmix": Case({**SLURM, "PMIX_RANK": "3"}, 3, 4, 1, "n01"),
    "srun of one task": Case({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
    # Slurm sets its variables for the script, too, which runs once (T3).
    "sbatch without srun": Case(BATCH, warning="SLURM_NTASKS=4"),
    "sbatch's own step": Case({**SLURM, "SLURM_STEP_ID": "4294967291"}, warning="SLURM_NTASKS=4"),
    "salloc's own step": Case({**SLURM, "SLURM_STEP_ID": "4294967290"}, warning="SLURM_NTASKS=4"),
    "srun --pty bash": Case({**SLURM, "SLURM_JOB_NAME": "bash", "SLURM_TASK_PID": "1"}, error="is the name of a shell"),
    "srun in an interactive job": Case(
        {**SLURM, "SLURM_JOB_NAME": "interactive", "SLURM_TASK_PID": str(os.getpid())}, 3, 4, 1, "n01"
    ),
    "a shell whose owner knows": Case(
        {**SLURM, "SLURM_JOB_NAME": "bash", "BAGUA_KERNELS_LAUNCHER": "slurm"}, 3, 4, 1, "n01"
    ),
    "srun without a number": Case({**SLURM, "SLURM_PROCID": ""}, error="SLURM_PROCID='' is not one"),
    "srun with a number too large": Case({**SLURM, "SLURM_PROCID": "4"}, error="SLURM_PROCID='4' is not one"),
    "Open MPI": Case(OPEN_MPI, 2, 4, 2, "127.0.0.1"),
    "Open MPI on two hosts": Case({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1"}, 2, 4, 2, "n1"),
    "Open MPI, nothing says where": Case({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, 4, 2, ""),
    # Each host's helper of mpirun is a task of srun.
    "Open MPI in Slurm": Case(
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        2,
        4,
        2,
        "n01",
    ),
    "mpirun of one process": Case({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}),
    "mpirun torchrun": Case({**OPEN_MPI, **TORCHRUN}, 5, 8, 1, "n1", 29500),
    "MPICH": Case(MPICH, 1, 4, 1, "127.0.0.1"),
    "Intel MPI on two hosts": Case({**MPICH, "MPI_LOCALNRANKS": "2", **PLACE}, 1, 4, 1, "n1", 4000),
    "MVAPICH": Case({**MVAPICH, "MASTER_ADDR": "n1"}, 3, 4, 1, "n1"),
    "jsrun": Case({**JSRUN, "MASTER_ADDR": "n1"}, 1, 4, 1, "n1"),
    "jsrun on one host": Case({**JSRUN, "JSM_NAMESPACE_LOCAL_SIZE": "4"}, 1, 4, 1, "127.0.0.1"),
    "submitit's tasks without export": Case(SUBMITIT, 1, 2, 1, "127.0.0.1"),
    "submitit's export on one host": Case({**SUBMITIT, **HAND, "LOCAL_RANK": "1"}, 1, 2, 1, "n1", 29500),
    "submitit's own process": Case(
        {name: value for name, value in SUBMITIT.items() if "ALID" not in name},
        error="SUBMITIT_LOCAL_GLOBALID='' is not one",
    ),
    "horovodrun": Case({**HOROVOD, "MASTER_ADDR": "n1"}, 3, 4, 1, "n1"),
    "horovodrun on one host": Case({**HOROVOD, "HOROVOD_LOCAL_SIZE": "4"}, 3, 4, 1, "127.0.0.1"),
    "horovodrun by mpirun": Case({**HOROVOD, **OPEN_MPI}, 2, 4, 2, "127.0.0.1"),
    "PMIx without a size": Case({"PMIX_RANK": "2"}, error="no variable has their number"),
    "mpirun with variables of another job": Case(
        {**OPEN_MPI, **HAND, "RANK": "0", "WORLD_SIZE": "1"}, error="OMPI_COMM_WORLD_SIZE=4 means"
    ),
    "that job's owner knows": Case(
        {**OPEN_MPI, **HAND, "RANK": "0", "WORLD_SIZE": "1", "BAGUA_KERNELS_LAUNCHER": "torchrun"},
        0,
        1,
        None,
        "n1",
        29500,
    ),
    "alone by choice": Case({**OPEN_MPI, "BAGUA_KERNELS_LAUNCHER": "alone"}),
    "mpi by choice": Case({**SLURM, **OPEN_MPI, "BAGUA_KERNELS_LAUNCHER": "mpi"}, 2, 4, 2, "127.0.0.1"),
    "slurm by choice": Case({**SLURM, **OPEN_MPI, "BAGUA_KERNELS_LAUNCHER": "slurm"}, 3, 4, 1, "n01"),
    "torchrun by choice, and none": Case({**SLURM, "BAGUA_KERNELS_LAUNCHER": "torchrun"}, error="lacks RANK"),
    "slurm by choice, and none": Case({**OPEN_MPI, "BAGUA_KERNELS_LAUNCHER": "slurm"}, error="none of its variables"),
    "an address that is none": Case({**SLURM, "MASTER_ADDR": "n1:4000"}, error="MASTER_ADDR='n1:4000'"),
}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without variables of a launcher."""
    for case in CASES.values():
        for name in case.environment:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


@folded(name=list(CASES))
def test_environment(name: str, bare: pytest.MonkeyPatch) -> None:
    """Samplers find the same as `init`, which reads `os.environ`."""
    case = CASES[name]
    with bare.context() as here, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for variable, value in case.environment.items():
            here.setenv(variable, value)
        if case.error:
            for asked in (Launch.read, ranks_here):
                with pytest.raises(ValueError, match=re.escape(case.error)):
                    asked()
            return
        found = Launch.read()
        assert ranks_here() == (case.size, case.rank or 0)
    texts = [str(one.message) for one in told]
    assert [text for text in texts if case.warning and case.warning in text] == texts
    assert bool(texts) == bool(case.warning)
    if case.rank is None:
        assert found is None
        return
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (case.rank, case.size, case.local)
    assert found.master_addr == case.address
    if case.port is None:
        assert 20000 <= found.master_port < 32768
        assert found.job
    else:
        assert found.master_port == case.port
        assert not found.job


def test_no_environment_of_several_processes_is_alone_and_silent(bare: pytest.MonkeyPatch) -> None:
    """Whatever a launcher's variable says: each process joins, raises an error or warns."""
    for launcher in LAUNCHERS:
        for rank in ("", "0", "1", "x"):
            environment = {launcher.size: "2", **({launcher.rank: rank} if rank else {})}
            for variable, value in environment.items():
                bare.setenv(variable, value)
            try:
                found = Launch.read(environment)
            except ValueError:
                continue
            finally:
                for variable in environment:
                    bare.delenv(variable)
            assert found is not None
            assert found.world_size == 2


def test_ports_of_two_starts_differ(bare: pytest.MonkeyPatch) -> None:
    """Steps and tasks of an array of one job may share a host (T4); ranks of one start have one port."""
    starts = [
        SLURM,
        {**SLURM, "SLURM_STEP_ID": "1"},
        {**SLURM, "SLURM_ARRAY_TASK_ID": "2"},
        {**SLURM, "SLURM_RESTART_COUNT": "1"},
        {**SLURM, "SLURM_JOB_ID": "78"},
    ]
    found = [Launch.read(environment) for environment in starts]
    assert len({one.master_port for one in found if one is not None}) == len(starts)
    others = [Launch.read({**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}) for rank in range(4)]
    assert len({(one.master_port, one.job) for one in others if one is not None}) == 1


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("n[01-03,7],m2", "n01"),
        ("m2", "m2"),
        ("m2,n[1-3]", "m2"),
        ("rack[0-1]n[08-12],x", "rack0n08"),
        ("gpu-[7]", "gpu-7"),
        ("tux[3,5-9].cluster", "tux3.cluster"),
        ("a-b-c", "a-b-c"),
        ("", ""),
    ],
)
def test_first_host_of_slurms_list(listed: str, first: str) -> None:
    """Leading zeros, lists in lists, one host without brackets (T5)."""
    assert first_host({"SLURM_JOB_NODELIST": listed}) == first
    assert first_host({"SLURM_JOB_NODELIST": "other", "SLURM_STEP_NODELIST": listed}) == (first or "other")


def test_first_host_of_lsf_is_the_second_line(tmp_path: Path) -> None:
    """The first one is where the batch script runs."""
    file = tmp_path / "rankfile"
    file.write_text("batch5\nh22n07\nh22n08\n")
    assert first_host({"LSB_DJOB_RANKFILE": str(file)}) == "h22n07"
    file.write_text("batch5\n")
    assert first_host({"LSB_DJOB_RANKFILE": str(file)}) == ""
    assert first_host({"LSB_DJOB_RANKFILE": str(tmp_path / "none")}) == ""


def test_nothing_says_where_rank_0_runs(bare: pytest.MonkeyPatch) -> None:
    """The error has the command to type; mpi4py, where it is, knows."""
    found = Launch.read({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert found is not None
    bare.setattr(launch_module, "address_by_mpi", lambda rank, size: "")
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR=host"):
        found.located()
    bare.setattr(launch_module, "address_by_mpi", lambda rank, size: f"10.0.0.{size}")
    assert found.located().master_addr == "10.0.0.4"
    assert Refusal.of(found) is None
    assert Refusal.of(found.located()) == Refusal("2", 3, "10.0.0.4", found.master_port, False)


def test_a_launcher_that_is_unknown_is_refused(bare: pytest.MonkeyPatch) -> None:
    """By the knob that chooses it."""
    bare.setenv(knobs.LAUNCHER.variable, "pbs")
    with pytest.raises(ValueError, match="expected one of auto, torchrun, slurm, mpi, jsrun, horovod, submitit, alone"):
        comm.init()


def test_addresses_of_another_network_are_named() -> None:
    """A VPN's, or a bridge's of containers, on some hosts alone (T46); where all have it, it is their network."""
    assert strays(["10.0.0.1", "10.0.0.2", "192.168.1.3"]) == {}
    assert strays(["100.64.0.1", "100.100.1.2"]) == {}
    assert strays(["10.0.0.1", "100.90.1.2"]) == {1: "100.90.1.2 is mostly one of a VPN"}
    assert strays(["10.0.0.1", "10.0.0.2", "172.17.0.1"]) == {2: "172.17.0.1 is mostly one of a bridge for containers"}
    assert list(strays(["127.0.0.1", "fd00::1"])) == [0]
