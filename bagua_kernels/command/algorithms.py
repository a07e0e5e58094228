"""A table of all algorithms."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, MuLoCo, RoundAlgorithm, from_spec, names
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.command.output import show_json, show_rows
from bagua_kernels.command.sent import bytes_per_step

_PATIENCE = 60.0  # seconds, which a rank alone never waits


def rows(parameters: int, ranks: int) -> list[dict[str, Any]]:
    """Returns each algorithm with its default options.

    Args:
        parameters: elements of the model.
        ranks: all ranks, each on a node of its own.
    """
    return [_row(name, parameters, ranks) for name in names()]


def show(parameters: int, ranks: int, as_json: bool) -> None:
    """Prints the table."""
    found = rows(parameters, ranks)
    if as_json:
        show_json({"parameters": parameters, "ranks": ranks, "algorithms": found})
    else:
        show_rows(f"Algorithms with their default options, for {parameters:,} parameters and {ranks} ranks", found)


def _row(name: str, parameters: int, ranks: int) -> dict[str, Any]:
    with LocalCommunicator.alone(_PATIENCE, torch.device("cpu")) as communicator:
        algorithm = _small(name, communicator)
        try:
            return {
                "name": name,
                "class": type(algorithm).__name__,
                "bytes_per_step": round(bytes_per_step(algorithm, parameters, ranks)),
                "exchanges": _exchanges(algorithm),
                "goes_with_adam": _goes_with_adam(algorithm),
                "summary": (inspect.getdoc(type(algorithm)) or "").partition("\n")[0],
            }
        finally:
            algorithm.close()


def _small(name: str, communicator: Communicator) -> Algorithm:
    """Wraps a small model, so that the defaults of all options can be read."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    kind = Algorithm.registered[name]
    optimizer: torch.optim.Optimizer | None = None
    if issubclass(kind, MuLoCo):
        optimizer = optim.muon_with_adamw(module)
    elif issubclass(kind, ModelAlgorithm):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return from_spec(name, module, optimizer, communicator=communicator)


def _exchanges(algorithm: Algorithm) -> str:
    if isinstance(algorithm, CourierAlgorithm):
        return "beside training"
    interval = algorithm.interval if isinstance(algorithm, RoundAlgorithm) else 1
    return "each step" if interval == 1 else f"every {interval} steps"


def _goes_with_adam(algorithm: Algorithm) -> str:
    """Returns "yes", "no", "its own" or "with Muon"."""
    if isinstance(algorithm, MomentumAllReduce):
        return "its own"
    if isinstance(algorithm, MuLoCo):
        return "with Muon"
    return "no" if isinstance(algorithm, GradientAlgorithm) and algorithm.holds_back else "yes"
