"""Saves and resumes all of a training run by one call each, for any number of ranks.

>>> from bagua_kernels import checkpoint
>>> checkpoint.save("run/latest", model, optimizer, sampler=sampler, epoch=epoch)
>>> rest = checkpoint.load("run/latest", model, optimizer, sampler=sampler)

The folder is that of `bagua_kernels.algorithms.checkpoint`. It has a file for each rank, which lacks what rank 0's has with the
same bits, and a list that counts. A folder that another rank has not finished is never listed. Nothing in it is executed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.checkpoint import completed, load_states, put_state, save_states, state_of
from bagua_kernels.algorithms.ddp.hook import Hook
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm
from bagua_kernels.caller_warnings import warn_caller
from bagua_kernels.comm import Communicator

_RNG = "rng"
_REST = "rest"
_OWN = ("module", "optimizer", "algorithm", "hook", _RNG, _REST)


class Stateful(Protocol):
    """What has a state: a sampler, a scaler of losses, a schedule, a loader."""

    def state_dict(self) -> Any:
        """Returns it."""

    def load_state_dict(self, state: Any) -> Any:
        """Restores it."""


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    hook: Hook | None = None,
    rng: bool = True,
    **others: Any,
) -> None:
    """Writes everything into a directory that all ranks share; collective.

    1. Each rank gathers the states of its module, optimizer and algorithm, and of its random numbers.
    2. It writes what it does not share with rank 0.
    3. Once all have written, the directory lists the new files in place of the former.

    Args:
        path: the directory, of which nothing else makes use.
        model: an algorithm's wrapper, a `DistributedDataParallel`, or a module.
        optimizer: that of its parameters; left out if the wrapper has it.
        hook: that of the `DistributedDataParallel`, if it has one.
        rng: True to save the states of Python's, NumPy's and torch's random numbers.
        **others: further objects with `state_dict` (a sampler, a scaler, a schedule), or numbers and texts such as the epoch.

    Raises:
        TypeError: something else than numbers, texts, tensors, lists and dictionaries is to be saved.
        ValueError: a name of `others` is one of this package's.
        OSError: this rank cannot write its part.
        RuntimeError: another rank cannot.
    """
    _check_names(others)
    completed(model, lambda: _save(path, model, optimizer, hook, rng, others))


def _save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    hook: Hook | None,
    rng: bool,
    others: Mapping[str, Any],
) -> None:
    state: dict[str, Any] = {"module": {}, "optimizer": None, "algorithm": None, "hook": None, _RNG: None}
    if isinstance(model, Algorithm):
        state["algorithm"] = state_of(model)
    if not isinstance(model, ModelAlgorithm):
        # Parameters of a `ModelAlgorithm`, and the states of its optimizer, are in the algorithm's.
        state["module"] = dict(_bare(model).state_dict())
        found = _optimizer(model, optimizer)
        state["optimizer"] = None if found is None else found.state_dict()
    if hook is not None:
        state["hook"] = state_of(hook)
    if rng:
        state[_RNG] = _random_state()
    state[_REST] = {name: _state(value) for name, value in others.items()}
    save_states(_ranks(model), _plain(state), path)


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    hook: Hook | None = None,
    rng: bool = True,
    **others: Any,
) -> dict[str, Any]:
    """Restores what `save` wrote, bit for bit on the same number of ranks; collective.

    On another number all ranks begin with equal parameters: rank 0's, or for an algorithm on parameters the mean of all.
    Residuals are shared out, so that nothing that is still to be sent gets lost. Random numbers begin anew then, since there
    is no state for each rank. Other objects get rank 0's state.

    Args:
        path: as for `save`.
        model: as for `save`, made and wrapped as it was then.
        optimizer: as for `save`.
        hook: as for `save`.
        rng: True to restore random numbers.
        **others: the objects whose states were saved, by the same names. A name with the value None takes no object.

    Returns:
        What was saved of numbers and texts.

    Raises:
        ValueError: the directory does not hold what `save` writes, or it is the state of something else.
        KeyError: an object was not saved.
        OSError: this rank cannot read its part.
        RuntimeError: another rank cannot.
    """
    _check_names(others)
    return completed(model, lambda: _load(path, model, optimizer, hook, rng, others))


def _load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    hook: Hook | None,
    rng: bool,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    states, same = load_states(_ranks(model), path)
    if any(set(state) != set(_OWN) for state in states):
        raise ValueError(
            f"{path} holds the state of an algorithm alone: read it with bagua_kernels.algorithms.checkpoint.load"
        )
    first = states[0]
    if not isinstance(model, ModelAlgorithm) and first["module"]:
        _bare(model).load_state_dict(first["module"])
        found = _optimizer(model, optimizer)
        if found is not None and first["optimizer"] is not None:
            found.load_state_dict(first["optimizer"])
    for key, owner in (("algorithm", model if isinstance(model, Algorithm) else None), ("hook", hook)):
        if (owner is None) != (first[key] is None):
            saved, given_now = ("without", "with") if first[key] is None else ("with", "without")
            raise ValueError(
                f"{path} was saved {saved} {'an algorithm' if key == 'algorithm' else 'a hook'}, and the model is given "
                f"{given_now} one: wrap it as it was when it was saved"
            )
        if owner is not None:
            put_state(owner, first[key] if same else [state[key] for state in states])
    if rng and first[_RNG] is not None:
        if same:
            _set_random_state(first[_RNG])
        elif _ranks(model).rank == 0:
            warn_caller(
                "the number of ranks has changed, so that random numbers begin anew: give each rank a seed of its own",
                RuntimeWarning,
            )
    rest: dict[str, Any] = first[_REST]
    for name, value in others.items():
        if name not in rest:
            raise KeyError(f"{path} has no state of {name!r}, only of {', '.join(rest) or 'nothing else'}")
        if value is not None:
            value.load_state_dict(rest[name])
    return {name: value for name, value in rest.items() if others.get(name) is None}


def _check_names(others: Mapping[str, Any]) -> None:
    taken = sorted(set(others) & set(_OWN))
    if taken:
        raise ValueError(f"expected names of your own, got {', '.join(taken)}, which are this package's")


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, Algorithm | torch.nn.parallel.DistributedDataParallel) else model


def _optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    return optimizer if optimizer is not None or not isinstance(model, Algorithm) else model.optimizer


def _ranks(model: torch.nn.Module) -> Communicator:
    if isinstance(model, Algorithm) and not model._closed:
        return model.communicator
    return comm.world() if comm.is_initialized() else comm.init()


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _plain(value: Any) -> Any:
    """Returns a state of which files can be made: tuples as lists, NumPy's arrays as tensors."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return value


def _random_state() -> dict[str, Any]:
    name, keys, *numbers = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).astype(np.int64), *numbers],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
