"""Saves what algorithms remember, through `torch.distributed.checkpoint`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.model_algorithm import ModelAlgorithm


def save(algorithm: Algorithm, path: str | os.PathLike[str]) -> None:
    """Writes the algorithm's state of all ranks into a directory; collective.

    The module's and the optimizer's states are not in it if they are equal on all ranks, and saved as without an algorithm. For a
    `ModelAlgorithm` they are in it.

    Args:
        algorithm: what to save; its module on each rank of `torch.distributed`'s default group, or alone in the process.
        path: directory, of which nothing else makes use.
    """
    state = algorithm.algorithm_state_dict()
    if isinstance(algorithm, ModelAlgorithm):
        # With an optimizer's state in it: numbers as keys would come back as texts, and empty dictionaries not at all.
        tensors: list[torch.Tensor] = []
        state = {"text": json.dumps(_taken_apart(state, tensors)), "tensors": dict(enumerate(tensors))}
    save_state_dict({"ranks": {str(_rank(algorithm)): state}}, checkpoint_id=path)


def load(algorithm: Algorithm, path: str | os.PathLike[str]) -> None:
    """Restores what `save` wrote: bit for bit on the same number of ranks, else as `load_algorithm_state_dict` does it.

    Raises:
        ValueError: the state does not fit the module.
    """
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = {key.split(".")[1] for key in keys if key.startswith("ranks.")}
    same = len(saved) == algorithm._communicator.size
    states = [_read(path, rank) for rank in ([_rank(algorithm)] if same else range(len(saved)))]
    algorithm.load_algorithm_state_dict(states[0] if same else states)


def _read(path: str | os.PathLike[str], rank: int) -> dict[str, Any]:
    found = _load_state_dict_from_keys(_key(rank), checkpoint_id=path)["ranks"][str(rank)]
    if "text" in found:
        state: dict[str, Any] = _put_together(json.loads(found["text"]), found["tensors"])
        return state
    # Of empty dictionaries nothing is saved.
    return {"vectors": {}, **found}


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns what JSON can hold of a state, with the position in `tensors` in place of each tensor.

    Raises:
        TypeError: the state holds something else, which a file should not.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_taken_apart(each, tensors) for each in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_taken_apart(part, tensors) for part in item] for item in value.items()]}
    raise TypeError(
        f"expected a state of numbers, texts, tensors, lists and dictionaries, got {value!r}: save it by torch.save instead"
    )


def _put_together(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undoes `_taken_apart`."""
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "tensor":
        return tensors[str(parts)]
    if kind == "dict":
        return {_put_together(key, tensors): _put_together(each, tensors) for key, each in parts}
    found = [_put_together(each, tensors) for each in parts]
    return found if kind == "list" else tuple(found)


def _rank(algorithm: Algorithm) -> int:
    return algorithm._communicator.rank


def _key(rank: int) -> str:
    return f"ranks.{rank}"
