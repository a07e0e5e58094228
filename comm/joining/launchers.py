"""Which launcher has started this process beside others, by the variables that it sets."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_kernels import knobs
from bagua_kernels.comm.joining.evidence import stat_of

_ALLOCATIONS = ("SLURM_NTASKS", "SLURM_NPROCS", "LSB_DJOB_NUMPROC")  # a batch script has them too, which runs once
# Values of SLURM_STEP_ID that stand for no `srun`: those of a pending, an external, a batch and an interactive step.
_NO_STEPS = {str(0xFFFFFFFF - back) for back in (2, 3, 4, 5)}
_SHELLS = ("bash", "interactive")  # names that Slurm gives to jobs of a shell
# A machine whose owner has to start the processes: the variable of their number, its owner, and what to type.
_UNSTARTED = {
    "SKYPILOT_NUM_NODES": (
        "SkyPilot",
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --node-rank=$SKYPILOT_NODE_RANK --nproc-per-node=$SKYPILOT_NUM_GPUS_PER_NODE "
        '--master-addr=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) --master-port=29500',
    ),
    "PET_NNODES": ("Kubeflow", "torchrun, which reads the variables PET_..."),
}
# What distinguishes one start of a launcher from all others; those that are not set are left out.
_JOBS = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "LSB_JOBID",
    "JSM_NAMESPACE_ID",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "SUBMITIT_LOCAL_JOB_ID",
)
# No system lends these ports to programs that ask for any.
_FIRST_PORT, _PORTS = 20000, 12768
_MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "hydra", "jsrun", "horovodrun")


@dataclass(frozen=True)
class Launcher:
    """A launcher by its variables.

    Attributes:
        kind: its name in `BAGUA_KERNELS_LAUNCHER`.
        name: its name in texts.
        rank: the variable of the number of a process.
        size: of the number of processes.
        local_rank: of the number of a process on its host.
        local_size: of the number of processes on its host.
    """

    kind: str
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first one with several processes counts: `mpirun` inside of a Slurm allocation starts its own helpers by `srun`.
LAUNCHERS = (
    Launcher(
        "mpi",
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "mpi",
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpi", "an MPI's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("slurm", "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    Launcher(
        "jsrun",
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher("horovod", "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    # All of its tasks share a host. Where submitit uses Slurm, `srun` starts them.
    Launcher(
        "submitit",
        "submitit's local executor",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_LOCALID",
        "SUBMITIT_LOCAL_NTASKS",
    ),
)


@dataclass(frozen=True)
class Step:
    """One of several processes that a launcher has started, without torchrun's variables.

    Attributes:
        launcher: what started it.
        rank: its number.
        size: the number of processes.
        local_rank: its number on its host; None if no variable has it.
        address: the host of rank 0; empty if no variable has it.
        port: of the store there.
        job: a text that no other start has, on all of its processes the same; empty where `port` was given.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    address: str
    port: int
    job: str

    @classmethod
    def find(cls, environment: Mapping[str, str], kind: str) -> Step | None:
        """Returns the process that the environment describes; None for a process that is alone.

        Args:
            environment: variables; those that are empty count as unset.
            kind: of the launcher, or "auto" for the first that has started several processes.

        Raises:
            ValueError: if variables contradict one another, or speak of several processes and not of their numbers.
        """
        for launcher, size in _started(environment):
            if kind in ("auto", launcher.kind):
                if launcher.kind == "slurm":
                    _refuse_a_shell(environment)
                return cls._of(environment, launcher, size)
        _expect_alone(environment, kind)
        return None

    @classmethod
    def _of(cls, environment: Mapping[str, str], launcher: Launcher, size: int) -> Step:
        text = environment.get(launcher.rank, "")
        if not text.isdecimal() or int(text) >= size:
            raise ValueError(
                f"{launcher.size}={size} means that {launcher.name} started several processes, but {launcher.rank}={text!r} is "
                f"not one of their numbers: start them by {launcher.name}, or torchrun on each host, {_or_alone()}"
            )
        local = environment.get(launcher.local_rank, "")
        job = "/".join(f"{name}={environment[name]}" for name in _JOBS if environment.get(name))
        here = _on_one_host(environment, launcher, size)
        if not job and here:
            job = _ancestor()
        job = f"{launcher.kind} {job} user {os.getuid()}"
        port = environment.get("MASTER_PORT", "")
        return cls(
            launcher,
            int(text),
            size,
            int(local) if local.isdecimal() else None,
            environment.get("MASTER_ADDR", "") or ("127.0.0.1" if here else first_host(environment)),
            int(port) if port.isdecimal() else _FIRST_PORT + _number_of(job) % _PORTS,
            "" if port.isdecimal() else job,
        )


def several(environment: Mapping[str, str]) -> tuple[Launcher, int] | None:
    """Returns the launcher that has started several processes, and how many; None if none has."""
    return next(_started(environment), None)


def _started(environment: Mapping[str, str]) -> Iterator[tuple[Launcher, int]]:
    for launcher in LAUNCHERS:
        size = environment.get(launcher.size, "")
        # What runs in another step of Slurm's has its variables, and runs once.
        alone = launcher.kind == "slurm" and environment.get("SLURM_STEP_ID") in _NO_STEPS
        if _is_several(size) and not alone:
            yield launcher, int(size)


def _refuse_a_shell(environment: Mapping[str, str]) -> None:
    """Refuses a step of `srun` that may be a shell's, unless its owner has chosen.

    Raises:
        ValueError: if it may be both.
    """
    shell = environment.get("SLURM_JOB_NAME") in _SHELLS and environment.get("SLURM_TASK_PID") != str(os.getpid())
    if shell and knobs.LAUNCHER.get() == "auto":
        raise ValueError(
            f"SLURM_JOB_NAME={environment['SLURM_JOB_NAME']} is the name of a shell, in which a program runs once, but "
            f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']} means that srun started several: set "
            f"{knobs.LAUNCHER.variable}=slurm if it did, {_or_alone()}"
        )


def _expect_alone(environment: Mapping[str, str], kind: str) -> None:
    """Refuses to be alone where several processes were meant.

    Each of them would train a model of its own, on all samples, and report success.
    """
    if kind != "auto":
        if not any(environment.get(launcher.size) for launcher in LAUNCHERS if launcher.kind == kind):
            names = ", ".join(launcher.size for launcher in LAUNCHERS if launcher.kind == kind)
            raise ValueError(
                f"{knobs.LAUNCHER.variable}={kind}, but none of its variables is set ({names}): start the processes by it, or "
                f"unset {knobs.LAUNCHER.variable}"
            )
        return
    if environment.get("PMIX_RANK") and not any(environment.get(launcher.size) for launcher in LAUNCHERS):
        raise ValueError(
            f"PMIX_RANK={environment['PMIX_RANK']} means that a launcher started this process, but no variable has their number: "
            f"start them by mpirun, srun or torchrun, {_or_alone()}"
        )
    for name, (owner, command) in _UNSTARTED.items():
        if _is_several(environment.get(name, "")):
            raise ValueError(
                f"{name}={environment[name]} means that {owner} runs this on several machines, but RANK and WORLD_SIZE are not "
                f"set: start the program by {command}, {_or_alone()}"
            )
    for name in _ALLOCATIONS:
        if _is_several(environment.get(name, "")):
            warnings.warn(
                f"this process is alone, though {name}={environment[name]} speaks of several: start it by srun, {_or_alone()}",
                RuntimeWarning,
                stacklevel=5,
            )
            return


def _or_alone() -> str:
    return f"or set {knobs.LAUNCHER.variable}=alone if each process shall stay by itself"


def _on_one_host(environment: Mapping[str, str], launcher: Launcher, size: int) -> bool:
    if launcher.local_size:
        return environment.get(launcher.local_size) == str(size)
    return (environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")) == "1"


def first_host(environment: Mapping[str, str]) -> str:
    """Returns the first host of a job of Slurm or LSF; empty if the environment has none."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    if listed:
        # n[01-03,7],m2 stands for n01, n02, n03, n7 and m2. Brackets may follow one another.
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
        assert first is not None
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())
    file = environment.get("LSB_DJOB_RANKFILE", "")
    if file and Path(file).is_file():
        hosts = Path(file).read_text().split()
        # The first line is the host of the batch script, which runs no rank.
        return hosts[1] if len(hosts) > 1 else ""
    return ""


def _is_several(text: str) -> bool:
    return text.isdecimal() and int(text) > 1


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _ancestor() -> str:
    """Returns the process of the launcher on this host, which is the same for all that it has started; empty if there is none."""
    pid = os.getpid()
    while pid > 1 and (found := stat_of(pid)) is not None:
        command, fields = found
        if command.startswith(_MPIRUN):
            return f"process {pid} of {fields[19]}"
        pid = int(fields[1])
    return ""
