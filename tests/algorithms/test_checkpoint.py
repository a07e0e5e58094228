"""Checkpoints of what algorithms remember, by real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm, from_spec
from bagua_kernels.algorithms.checkpoint import load, save
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.ranks import Odd, batch

SPECS = [
    "double_squeeze:min_numel=0,exact=none",
    "powersgd:min_compression=0.5",
    "powersgd:min_compression=0.5,alternate=True",
    "dgc:ratio=0.2,min_numel=0,exact=none",
]
ON_PARAMETERS = ["decentralized", "d2", "sgp:peers=exponential"]


def make(spec: str) -> Algorithm:
    module = Odd(seed=0)
    return from_spec(spec, module)


def steps(algorithm: Algorithm, first: int, last: int) -> None:
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
    for step in range(first, last):
        optimizer.zero_grad()
        algorithm(batch(comm.world().rank, step)).square().mean().backward()
        optimizer.step()


def resumes(path: str, most: int = 9) -> None:
    """Trains four steps, and two that are saved and two more by others; with so many algorithms of both kinds."""
    comm.init(timeout=limits.seconds(20))
    for number, spec in enumerate(SPECS[:most]):
        whole = make(spec)
        steps(whole, 0, 4)
        half = make(spec)
        steps(half, 0, 2)
        save(half, f"{path}/{number}")
        again = make(spec)
        again.module.load_state_dict(half.module.state_dict())
        load(again, f"{path}/{number}")
        assert again.stats().steps == 2
        steps(again, 2, 4)
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), spec
    resumes_on_parameters(path, most)
    comm.shutdown()


def resumes_on_parameters(path: str, most: int) -> None:
    """There the file alone brings back parameters, buffers and the optimizer's state."""
    for spec in ON_PARAMETERS[:most]:
        whole, again = (make_on_parameters(spec) for _ in range(2))
        steps_on_parameters(*whole, 0, 2)
        save(whole[0], f"{path}/{spec}")
        load(again[0], f"{path}/{spec}")
        assert again[0].stats().steps == 2
        assert again[1].state_dict()["param_groups"] == whole[1].state_dict()["param_groups"]
        expected, found = (steps_on_parameters(*each, 2, 4) for each in (whole, again))
        assert all(torch.equal(expected[name], found[name]) for name in expected), spec


def make_on_parameters(spec: str) -> tuple[Algorithm, torch.optim.Optimizer]:
    module = Odd(seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return from_spec(spec, module, optimizer), optimizer


def steps_on_parameters(
    algorithm: Algorithm, optimizer: torch.optim.Optimizer, first: int, last: int
) -> dict[str, torch.Tensor]:
    for step in range(first, last):
        optimizer.zero_grad()
        algorithm(batch(comm.world().rank, step)).square().mean().backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = algorithm.algorithm_state_dict()["parameters"]
    return state


def loads(path: str, more: int) -> None:
    """Loads what was saved, prints the mean of the residuals over all ranks, and goes on for some steps."""
    communicator = comm.init(timeout=limits.seconds(20))
    algorithm = make(SPECS[0])
    load(algorithm, f"{path}/0")
    named = algorithm.algorithm_state_dict()["vectors"]["worker"]
    total = torch.cat([named[name] for name in sorted(named)])
    communicator.all_reduce(total, comm.ReduceOp.AVG).wait()
    steps(algorithm, 2, 2 + more)
    print(json.dumps({"mean": total.tolist(), "steps": algorithm.stats().steps}))
    comm.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_resume_of_one_of_each_kind_through_files(tmp_path: Path) -> None:
    results = run_processes(resumes, 2, args=(str(tmp_path), 1), timeout=limits.seconds(100))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-3000:]


# Eight processes, which import more of PyTorch than others do.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_resume_through_files(tmp_path: Path) -> None:
    """Bit-identical on as many ranks; on fewer the mean of what was remembered is kept."""
    folder = str(tmp_path)
    reports = []
    for target, size, args in ((resumes, 3, (folder,)), (loads, 3, (folder, 0)), (loads, 2, (folder, 1))):
        results = run_processes(target, size, args=args, timeout=limits.seconds(120))
        assert [r.returncode for r in results] == [0] * size, results[0].stderr[-3000:]
        if target is loads:
            reports.append([json.loads(r.stdout.splitlines()[-1]) for r in results])
    before, after = reports[0][0]["mean"], reports[1]
    assert [a["steps"] for a in after] == [3, 3]
    assert any(before)
    assert torch.allclose(torch.tensor(after[0]["mean"]), torch.tensor(before), atol=1e-7)
