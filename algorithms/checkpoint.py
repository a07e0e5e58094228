"""Saves what algorithms remember in a folder: one file for each rank, and a list that counts.

A stranger who can write to the folder decides what is loaded, but executes nothing: files are read as numbers, texts and
tensors. What failed on a rank reaches the others in objects that are signed with the job's secret.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.comm import Communicator
from bagua_kernels.own_storage import with_own_storage

_LIST = "checkpoint.json"
_NAME = re.compile(r"[0-9a-f]{16}")
_PART = re.compile(r"rank\d+-[0-9a-f]{16}\.pt")


def save(algorithm: Algorithm, path: str | os.PathLike[str]) -> None:
    """Writes the algorithm's state of all ranks into a directory; collective.

    The module's and the optimizer's states are not in it if they are equal on all ranks, and saved as without an algorithm. For a
    `ModelAlgorithm` they are in it. What the directory holds already is replaced once all ranks have written their parts, so
    that a job that ends meanwhile leaves the earlier one.

    Args:
        algorithm: what to save; its module on each of its ranks.
        path: directory that all ranks share, of which nothing else makes use.

    Raises:
        TypeError: the state holds something else than numbers, texts, tensors, lists and dictionaries.
        OSError: this rank cannot write its part.
        RuntimeError: another rank cannot.
    """
    folder, communicator = Path(path), _ranks(algorithm)
    state = algorithm._state_to_save()
    with communicator.within("checkpoint.save"):
        name = communicator.broadcast_object(secrets.token_hex(8))
        error: Exception | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / _part(communicator.rank, name), state)
        except Exception as raised:  # the other ranks wait for an answer, whatever it is
            error = raised
        _agree(communicator, error, None, f"written its part of the checkpoint {folder}")
        if communicator.rank == 0:
            try:
                _list(folder, {"name": name, "ranks": communicator.size})
            except OSError as raised:
                error = raised
        _agree(communicator, error, None, f"listed the checkpoint {folder}")


def load(algorithm: Algorithm, path: str | os.PathLike[str]) -> None:
    """Restores what `save` wrote: bit for bit on the same number of ranks, else as `load_algorithm_state_dict` does it.

    Collective. Nothing in the directory is executed, also if other people have written it.

    Raises:
        ValueError: the state does not fit the module, the directory does not hold what `save` writes, or ranks see different
            directories.
        OSError: this rank cannot read its part.
        RuntimeError: another rank cannot.
    """
    folder, communicator = Path(path), _ranks(algorithm)
    states: list[dict[str, Any]] = []
    name, error, same = "", None, False
    try:
        name, ranks = _listed(folder)
        same = ranks == communicator.size
        states = [_read(folder / _part(r, name)) for r in ([communicator.rank] if same else range(ranks))]
    except Exception as raised:  # the other ranks wait for an answer, whatever it is
        error = raised
    with communicator.within("checkpoint.load"):
        _agree(communicator, error, name, f"read its part of the checkpoint {folder}")
    algorithm.load_algorithm_state_dict(states[0] if same else states)


def _ranks(algorithm: Algorithm) -> Communicator:
    # That of an algorithm which was closed is closed, too.
    own = algorithm.communicator
    return algorithm._world if own.is_ended() else own


def _part(rank: int, name: str) -> str:
    return f"rank{rank}-{name}.pt"


def _agree(communicator: Communicator, error: Exception | None, value: Any, done: str) -> None:
    """Raises on all ranks if one could not do its part, or if their values differ; collective.

    Raises:
        RuntimeError: another rank could not.
        ValueError: the values differ.
    """
    told = communicator.all_gather_object((None if error is None else f"{type(error).__name__}: {error}", value))
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise RuntimeError(f"rank {rank} has not {done}: {text}")
    if len({value for _, value in told}) > 1:
        raise ValueError(
            f"ranks have {done}, but of different ones, {[value for _, value in told]}: give all ranks the same directory"
        )


def _write(file: Path, state: Mapping[str, Any]) -> None:
    tensors: list[torch.Tensor] = []
    text = json.dumps(_taken_apart(state, tensors))
    with file.open("wb") as opened:
        torch.save({"text": text, "tensors": tensors}, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _list(folder: Path, content: Mapping[str, Any]) -> None:
    """Makes new parts count instead of earlier ones, in one step; then removes the earlier ones."""
    unfinished = folder / f"{_LIST}.tmp"
    with unfinished.open("w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(folder / _LIST)
    for file in folder.iterdir():
        if _PART.fullmatch(file.name) and not file.name.endswith(f"-{content['name']}.pt"):
            file.unlink(missing_ok=True)


def _listed(folder: Path) -> tuple[str, int]:
    """Returns the name of what a directory holds, and the number of its ranks."""
    file = folder / _LIST
    if not file.is_file():
        raise ValueError(f"expected a directory that `save` has written, got {folder} without {_LIST}")
    try:
        found = json.loads(file.read_text())
        name, ranks = found["name"], found["ranks"]
        if not (isinstance(name, str) and _NAME.fullmatch(name) and type(ranks) is int and ranks > 0):
            raise ValueError(f"name={name!r}, ranks={ranks!r}")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not what `save` has written ({error}): use another checkpoint") from error
    return name, ranks


def _read(file: Path) -> dict[str, Any]:
    try:
        # Without weights_only a file is a program.
        found = torch.load(file, map_location="cpu", weights_only=True)
        state = _put_together(json.loads(found["text"]), found["tensors"])
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
    except OSError:
        raise
    except Exception as error:  # what unpickling raises has no common class
        raise ValueError(
            f"{file} is not what `save` has written, and nothing in it was executed; use another checkpoint: {error}"
        ) from error
    return state


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns what JSON can hold of a state, with the position in `tensors` in place of each tensor.

    Raises:
        TypeError: the state holds something else, which a file should not.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        # waits: checkpoints are written.
        found = value.detach().cpu()
        # With a view all of the memory that it is part of would be written.
        if found.untyped_storage().nbytes() != found.nbytes:
            alone = found.is_contiguous() and found.is_floating_point() and found.numel()
            found = with_own_storage(found) if alone else found.clone()
        tensors.append(found)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_taken_apart(each, tensors) for each in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_taken_apart(part, tensors) for part in item] for item in value.items()]}
    raise TypeError(
        f"expected a state of numbers, texts, tensors, lists and dictionaries, got {value!r}: save it by torch.save instead"
    )


def _put_together(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Undoes `_taken_apart`."""
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "tensor":
        return tensors[parts]
    if kind == "dict":
        return {_put_together(key, tensors): _put_together(each, tensors) for key, each in parts}
    found = [_put_together(each, tensors) for each in parts]
    return found if kind == "list" else tuple(found)
