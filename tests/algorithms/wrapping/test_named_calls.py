"""Where ranks are in different methods, errors name the method of each; and what a load sends is little."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm, ByteGrad, DiLoCo, checkpoint, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError
from tests import limits
from tests.grids import grid


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def step(algorithm: Algorithm) -> None:
    algorithm(torch.ones(2, 64)).sum().backward()


def train_or_save(algorithm: Algorithm, rank: int, folder: str) -> None:
    """Lets rank 0 save while rank 1 trains, after a step of both."""
    step(algorithm)
    if rank == 0:
        checkpoint.save(algorithm, folder)
    else:
        step(algorithm)


@pytest.mark.parametrize("spec", ["bytegrad", "allreduce", "powersgd"])
def test_threads(spec: str, tmp_path: Path) -> None:
    def rank(communicator: Communicator) -> str:
        algorithm = from_spec(spec, network(), communicator=communicator)
        with pytest.raises(MismatchError) as caught:
            train_or_save(algorithm, communicator.rank, str(tmp_path))
        return str(caught.value)

    for text in run_ranks(2, rank):
        assert "rank 0 is in checkpoint.save, rank 1 is in training: all ranks must" in text


def saves(folder: str) -> None:
    """One rank: prints what it raised."""
    communicator = comm.init(timeout=limits.seconds(60))
    algorithm = ByteGrad(network())
    algorithm.communicator.set_timeout(limits.seconds(5))
    with contextlib.suppress(CommunicationError):
        try:
            train_or_save(algorithm, communicator.rank, folder)
        except (MismatchError, CollectiveTimeoutError) as error:
            print(type(error).__name__, error, flush=True)
            raise
    comm.shutdown()


@pytest.mark.parametrize("sockets", ["2", pytest.param("0", marks=pytest.mark.slow)], ids=["own sockets", "Gloo"])
def test_processes(sockets: str, tmp_path: Path) -> None:
    """Over Gloo it is the heartbeats that show it, when the time is over."""
    environment = {"BAGUA_KERNELS_SOCKETS": sockets, "BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.2)}"}
    results = run_processes(saves, 2, args=[str(tmp_path)], env=environment, timeout=limits.seconds(60))
    told = "".join(result.stdout for result in results)
    if sockets == "2":
        assert "MismatchError" in told, results
        assert "rank 0 is in checkpoint.save, rank 1 is in training" in told, results
    else:
        assert "rank 0 called all_gather in checkpoint.save" in told, results
        assert "rank 1 called all_to_all in training" in told, results


def test_a_rank_that_trains_while_another_switches_is_told() -> None:
    """The first is late in what the second opens, on another communicator than it uses."""

    def rank(communicator: Communicator) -> tuple[str, str]:
        algorithm = from_spec("allreduce", network(), communicator=communicator)
        before = algorithm.communicator.call, communicator.call
        seen: list[str] = []

        class Seen(ByteGrad):
            def __init__(self, *args: Any, **options: Any) -> None:
                seen.append(options["communicator"].call)
                super().__init__(*args, **options)
                seen.append(self.communicator.call)

        algorithm.switch_to(Seen)
        assert seen == ["switch_to()", "training"]
        return before[0], before[1] + communicator.call

    assert run_ranks(2, rank) == [("training", "")] * 2


@grid(cover=1, spec=["diloco", "local_sgd", "decentralized", "async_model_average", "bytegrad", "onebit_adam"])
def test_a_load_sends_no_tensors(spec: str) -> None:
    """So that no line tells how long it takes: each rank has its own state."""

    def rank(communicator: Communicator) -> int:
        module = torch.nn.Linear(256, 256)
        given = None if spec == "onebit_adam" else torch.optim.SGD(module.parameters(), lr=0.01)
        options = {"freeze_step": 1} if given is None else {}
        with from_spec(spec, module, given, communicator=communicator, **options) as model:
            optimizer = model.optimizer
            assert optimizer is not None
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 256)).square().mean().backward()
                optimizer.step()
            state = model.algorithm_state_dict()
            before = model._bytes_sent
            model.load_algorithm_state_dict(state)
            return model._bytes_sent - before

    assert max(run_ranks(2, rank)) < 1 << 14


def test_methods_of_algorithms_on_parameters_are_named() -> None:
    def rank(communicator: Communicator) -> str:
        module = network()
        model = DiLoCo(module, torch.optim.SGD(module.parameters(), lr=0.01), communicator=communicator)
        seen: list[str] = []
        gather = model.communicator.all_reduce

        def spy(*args: Any, **options: Any) -> Any:
            seen.append(model.communicator.call)
            return gather(*args, **options)

        model.communicator.all_reduce = spy  # type: ignore[method-assign]
        model.synchronize()
        with model.averaged():
            pass
        model.consensus()
        model.close()
        return " ".join(dict.fromkeys(seen))

    assert run_ranks(2, rank) == ["synchronize() averaged() consensus()"] * 2
