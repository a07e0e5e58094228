"""Launchers themselves, where this machine has them, and the recipes for them."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import limits
from tests.doors.jobs import needs

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "launchers"
PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO)
import torch
from bagua_kernels import comm
c = comm.init(timeout=60, device="cpu")
t = torch.ones(3) * (c.rank + 1)
c.all_reduce(t).wait()
print("SUM", c.rank, c.size, t[0].item(), flush=True)
comm.shutdown()
"""
LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4"),
    "MPICH": ("mpiexec.hydra", "-n", "4"),
}


@needs("lightning")  # the time of other tests is short
@pytest.mark.processes
@pytest.mark.parametrize("name", LAUNCHERS)
def test_real_mpirun(name: str, tmp_path: Path) -> None:
    """Two jobs at once, which share neither ports nor ranks."""
    command = LAUNCHERS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} on this machine")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    line = [*command, sys.executable, str(file)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for _ in range(2)
    ]
    for each in jobs:
        said, _ = each.communicate(timeout=limits.seconds(100))
        assert each.returncode == 0, said[-3000:]
        # Ranks write at once: their lines may be mixed.
        assert sorted(re.findall(r" (\d) 4 10\.0", said)) == ["0", "1", "2", "3"], said
        assert len(re.findall(r"4 ranks on 1 host", said)) == 1


SURVIVES = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
from bagua_kernels import comm
from bagua_kernels.errors import CommunicationError
c = comm.init(timeout=60, device="cpu")
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of torchrun's agent, when another of its workers has failed
if c.rank == 1:
    os._exit(3)
try:
    c.all_reduce(torch.ones(3)).wait()
except CommunicationError as error:
    time.sleep(4)  # what a survivor would need to save its model
    Path(sys.argv[1] + ".part").write_text(f"{type(error).__name__} {error.ranks}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


@needs("lightning")
@pytest.mark.processes
@pytest.mark.parametrize("agents", [1, 2])
def test_survivors_need_an_agent_of_their_own(agents: int, tmp_path: Path) -> None:
    """Torchrun ends all workers of an agent when one fails (T35): a rank survives others only where each has its own agent."""
    file, left = tmp_path / "program.py", tmp_path / "left"
    file.write_text(SURVIVES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = 2 // agents
    lines = [
        [sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}", f"--node-rank={node}",
         f"--nproc-per-node={workers}", "--max-restarts=0", "--master-addr=127.0.0.1", f"--master-port={port}",
         str(file), str(left)]
        for node in range(agents)
    ]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for line in lines
    ]
    try:
        deadline = time.monotonic() + limits.seconds(100)
        # The agent whose worker survives waits minutes for the other agent, so this test does not.
        while time.monotonic() < deadline and not left.exists() and (agents == 2 or jobs[0].poll() is None):
            time.sleep(0.05)
        assert left.exists() == (agents == 2)
    finally:
        for each in jobs:
            each.terminate()
            each.communicate(timeout=limits.seconds(60))
    if agents == 2:
        assert left.read_text() == "RankLostError (1,)"


@pytest.mark.parametrize("name", sorted(one.name for one in RECIPES.glob("*.sh")))
def test_scripts_are_valid(name: str) -> None:
    """For the shell that runs them."""
    assert subprocess.run(["bash", "-n", str(RECIPES / name)], check=False).returncode == 0


def fake(folder: Path, name: str, output: str = "") -> None:
    """Puts a program on the path that writes its arguments."""
    file = folder / name
    file.write_text(f"#!/bin/bash\n{output or 'echo ' + name + ' ' + chr(34) + '$@' + chr(34)}\n")
    file.chmod(0o755)


def run(script: str, folder: Path, **variables: str) -> str:
    """Returns the last line that a recipe would start."""
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def test_recipes_by_their_variables(tmp_path: Path) -> None:
    """What Slurm, MPI and SkyPilot would start."""
    for name in ("srun", "torchrun", "mpirun"):
        fake(tmp_path, name)
    fake(tmp_path, "scontrol", "printf 'n01\\nn02\\n'")
    slurm = {"SLURM_JOB_NODELIST": "n[01-02]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    assert run((RECIPES / "slurm.sh").read_text(), tmp_path, **slurm) == "srun python train.py"
    found = run((RECIPES / "slurm_torchrun.sh").read_text(), tmp_path, **slurm)
    assert found.startswith("srun torchrun --nnodes=2 --nproc-per-node=2")
    assert "--rdzv-endpoint=n01:29500" in found
    assert run((RECIPES / "mpi.sh").read_text(), tmp_path) == "mpirun -n 4 python train.py"
    found = run((RECIPES / "mpi.sh").read_text(), tmp_path, HOSTS="n1:2,n2:2")
    assert found == "mpirun -n 4 --host n1:2,n2:2 -x MASTER_ADDR=n1 python train.py"
    text = (RECIPES / "skypilot.yaml").read_text()
    script = re.search(r"^run: \|\n((?:  .*\n)+)", text, re.MULTILINE)
    assert script is not None
    sky = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "4",
        "SKYPILOT_TASK_ID": "t1",
    }
    found = run(script[1], tmp_path, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", **sky)
    assert found.startswith("torchrun --nnodes=2 --node-rank=1 --nproc-per-node=4 --master-addr=10.0.0.1")


@needs("lightning")
def test_a_function_for_kubeflow_needs_nothing_outside(tmp_path: Path) -> None:
    """It is sent as text (T34): its imports are inside, and it runs alone."""
    import ast

    tree = ast.parse((RECIPES / "kubeflow_job.py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    file = tmp_path / "sent.py"
    file.write_text(f"{ast.unparse(function)}\ntrain()\n")
    done = subprocess.run(
        [sys.executable, str(file)], env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=limits.seconds(100), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 0 of 1: loss" in done.stdout
