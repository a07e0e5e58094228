"""Saves what algorithms remember in a folder: one file for each rank, and a list that counts.

A rank's file lacks the tensors, and the text about them, that rank 0's has with the same bits. To resume on another number of
ranks, files are mapped into memory, and read tensor by tensor.

A stranger who can write to the folder decides what is loaded, but executes nothing: files are read as numbers, texts and
tensors. What failed on a rank reaches the others in objects that are signed with the job's secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.ddp.hook import Hook
from bagua_kernels.algorithms.wrapping.replicas import bytes_of
from bagua_kernels.comm import Communicator
from bagua_kernels.own_storage import with_own_storage

T = TypeVar("T")

_LIST = "checkpoint.json"
_NAME = re.compile(r"[0-9a-f]{16}")
_PART = re.compile(r"rank\d+-[0-9a-f]{16}\.pt")


def save(algorithm: Algorithm | Hook, path: str | os.PathLike[str]) -> None:
    """Writes the algorithm's state of all ranks into a directory; collective.

    The module's and the optimizer's states are not in it if they are equal on all ranks, and saved as without an algorithm. For a
    `ModelAlgorithm` they are in it, once where ranks have the same bits. What the directory holds already is replaced once all
    ranks have written their parts, so that a job that ends meanwhile leaves the earlier one.

    Args:
        algorithm: what to save, or a hook of `DistributedDataParallel` between backward passes; on each of its ranks.
        path: directory that all ranks share, of which nothing else makes use.

    Raises:
        TypeError: the state holds something else than numbers, texts, tensors, lists and dictionaries.
        OSError: this rank cannot write its part.
        RuntimeError: another rank cannot.
    """
    completed(algorithm, lambda: save_states(_ranks(algorithm), state_of(algorithm), path))


def completed(owner: object, call: Callable[[], T]) -> T:
    """Returns what a collective call returns; with an algorithm that heals, of the ranks that are left, which all complete it."""
    return owner._completed(call) if isinstance(owner, Algorithm) else call()


def save_states(communicator: Communicator, state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a state of each rank into a directory, as `save` does; collective.

    Args:
        communicator: the ranks.
        state: this rank's: numbers, texts, tensors, lists and dictionaries.
        path: as for `save`.

    Raises:
        TypeError: as `save`; and so for its other errors.
    """
    folder = Path(path)
    with communicator.within("checkpoint.save"):
        part: _Part | None = None
        error: Exception | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = _Part.of(state)
        except Exception as raised:  # the other ranks wait for an answer, whatever it is
            error = raised
        written = f"written its part of the checkpoint {folder}"
        _agree(communicator, error, None, written)
        assert part is not None
        name, first = communicator.broadcast_object((secrets.token_hex(8), part.digests))
        try:
            _write(folder / _part(communicator.rank, name), part.without(None if communicator.rank == 0 else first))
        except Exception as raised:
            error = raised
        _agree(communicator, error, None, written)
        if communicator.rank == 0:
            try:
                _list(folder, {"name": name, "ranks": communicator.size})
            except OSError as raised:
                error = raised
        _agree(communicator, error, None, f"listed the checkpoint {folder}")


def load(algorithm: Algorithm | Hook, path: str | os.PathLike[str]) -> None:
    """Restores what `save` wrote: bit for bit on the same number of ranks, else as `load_algorithm_state_dict` does it.

    Collective. Nothing in the directory is executed, also if other people have written it.

    Raises:
        ValueError: the state does not fit the module, the directory does not hold what `save` writes, or ranks see different
            directories.
        OSError: this rank cannot read its part.
        RuntimeError: another rank cannot.
    """

    def call() -> None:
        states, same = load_states(_ranks(algorithm), path)
        put_state(algorithm, states[0] if same else states)

    completed(algorithm, call)


def load_states(communicator: Communicator, path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], bool]:
    """Reads what `save_states` wrote; collective.

    Args:
        communicator: the ranks.
        path: as for `save_states`.

    Returns:
        This rank's state, and True, where there are as many ranks; else those of all ranks that wrote, and False.

    Raises:
        ValueError: as `load`; and so for its other errors.
    """
    folder = Path(path)
    states: list[dict[str, Any]] = []
    name, error, same = "", None, False
    try:
        name, ranks = _listed(folder)
        same = ranks == communicator.size
        # What is one rank's is loaded as it is. Of several the means are taken, so that their own tensors need not be copied.
        read = _Reader(folder, name, copies=same or ranks == 1)
        states = [read.state(rank) for rank in ([communicator.rank] if same else range(ranks))]
    except Exception as raised:  # the other ranks wait for an answer, whatever it is
        error = raised
    with communicator.within("checkpoint.load"):
        _agree(communicator, error, name, f"read its part of the checkpoint {folder}")
    return states, same


def state_of(algorithm: Algorithm | Hook) -> dict[str, Any]:
    """Returns what `save` writes of this rank, in memory that the next step may change; collective."""
    return algorithm.state_dict() if isinstance(algorithm, Hook) else algorithm._state_to_save()


def put_state(algorithm: Algorithm | Hook, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Restores what `state_of` returned: this rank's, or those of all earlier ranks; collective."""
    if isinstance(algorithm, Hook):
        algorithm.load_state_dict(state)
    else:
        algorithm.load_algorithm_state_dict(state)


def _ranks(algorithm: Algorithm | Hook) -> Communicator:
    if isinstance(algorithm, Hook):
        # Its ranks connect in the first backward pass.
        return algorithm.communicators[0] if algorithm.communicators else comm.world()
    # That of an algorithm which was closed is closed, too.
    if not algorithm._closed:
        return algorithm.communicator
    return algorithm._world if algorithm.members is None else algorithm.members.communicator


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


@dataclass(frozen=True)
class _Digests:
    """Digests of what a part has, which another part may lack."""

    text: bytes
    tensors: list[bytes]


@dataclass
class _Part:
    """A rank's state as a text, and tensors of the CPU to which it refers by their numbers."""

    text: str
    tensors: list[torch.Tensor]
    digests: _Digests

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Part:
        tensors: list[torch.Tensor] = []
        text = json.dumps(_taken_apart(state, tensors))
        return cls(text, tensors, _Digests(_digest(text.encode()), [_digest_of(tensor) for tensor in tensors]))

    def without(self, first: _Digests | None) -> dict[str, Any]:
        """Returns the content of the file: each tensor once.

        Args:
            first: of rank 0's part, whose text and tensors are not repeated; None for that one.

        Returns:
            `text`, None for rank 0's; `tensors`; and `places`, int64. It has for each number the position i of the tensor in
            `tensors`, or -1 - i for that in rank 0's.
        """
        elsewhere: dict[bytes, int] = {}
        for digest in [] if first is None else first.tensors:
            # As rank 0 counts what it writes.
            elsewhere.setdefault(digest, len(elsewhere))
        here: dict[bytes, int] = {}
        stored, places = list[torch.Tensor](), list[int]()
        for digest, tensor in zip(self.digests.tensors, self.tensors, strict=True):
            if digest in elsewhere:
                places.append(-1 - elsewhere[digest])
                continue
            if digest not in here:
                here[digest] = len(stored)
                stored.append(tensor)
            places.append(here[digest])
        text = None if first is not None and self.digests.text == first.text else self.text
        return {"text": text, "tensors": stored, "places": torch.tensor(places, dtype=torch.int64)}


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def _digest_of(tensor: torch.Tensor) -> bytes:
    form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
    return _digest(_digest(bytes_of(tensor).numpy().data) + form.encode())


def _write(file: Path, content: Mapping[str, Any]) -> None:
    with file.open("wb") as opened:
        torch.save(content, opened)
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


class _Reader:
    """Reads the parts of a checkpoint, of which rank 0's may have what others lack."""

    def __init__(self, folder: Path, name: str, *, copies: bool) -> None:
        """Reads nothing yet.

        Args:
            folder: of the checkpoint.
            name: by which its parts are known.
            copies: False to leave tensors in the files until they are read, in memory that the system takes back by itself.
        """
        self._folder, self._name, self._copies = folder, name, copies
        self._first: dict[str, Any] | None = None
        self._structure: Any = None  # of rank 0's text

    def state(self, rank: int) -> dict[str, Any]:
        """Returns the state of a rank.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is not what `save` has written.
        """
        file = self._folder / _part(rank, self._name)
        try:
            state = self._state(file)
            if not isinstance(state, dict):
                raise TypeError(f"a {type(state).__name__}")
        except OSError:
            raise
        except Exception as error:  # what unpickling raises has no common class
            raise ValueError(
                f"{file} is not what `save` has written, and nothing in it was executed; use another checkpoint: {error}"
            ) from error
        return state

    def _state(self, file: Path) -> Any:
        found = _mapped(file)
        text, tensors = found["text"], found["tensors"]
        if "places" in found:  # earlier versions wrote whole parts
            # waits: none, they are numbers of a file.
            places = found["places"].tolist()
            others = self._of_first("tensors") if min(places, default=0) < 0 else []
            tensors = [tensors[place] if place >= 0 else others[-1 - place] for place in places]
        if self._copies:
            tensors = [tensor.clone() for tensor in tensors]
        if text is not None:
            return _put_together(json.loads(text), tensors)
        if self._structure is None:
            self._structure = json.loads(self._of_first("text"))
        return _put_together(self._structure, tensors)

    def _of_first(self, key: str) -> Any:
        if self._first is None:
            self._first = _mapped(self._folder / _part(0, self._name))
        return self._first[key]


def _mapped(file: Path) -> Any:
    # Without weights_only a file is a program.
    return torch.load(os.fspath(file), map_location="cpu", weights_only=True, mmap=True)


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
