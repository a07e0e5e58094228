"""Saves what algorithms remember, through `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from bagua_kernels.algorithms.algorithm import Algorithm


def save(algorithm: Algorithm, path: str | os.PathLike[str]) -> None:
    """Writes the algorithm's state of all ranks into a directory; collective.

    The module's and the optimizer's states are not in it: they are equal on all ranks, and saved as without an algorithm.

    Args:
        algorithm: what to save; its module on each rank of `torch.distributed`'s default group, or alone in the process.
        path: directory, of which nothing else makes use.
    """
    state = {"ranks": {str(_rank(algorithm)): algorithm.algorithm_state_dict()}}
    save_state_dict(state, checkpoint_id=path)


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
    found = _load_state_dict_from_keys(_key(rank), checkpoint_id=path)
    # Of empty dictionaries nothing is saved.
    return {"vectors": {}, **found["ranks"][str(rank)]}


def _rank(algorithm: Algorithm) -> int:
    return algorithm._communicator.rank


def _key(rank: int) -> str:
    return f"ranks.{rank}"
