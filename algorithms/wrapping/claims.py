"""Which parameters' gradients are exchanged already, since two engines must not write the same `grad`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping

import torch

_lock = threading.Lock()
_collecting = threading.Lock()  # `gc.collect` does nothing while another thread is in it
_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """The trainable parameters of one algorithm, until it is closed or deleted.

    Attributes:
        owner: the algorithm; None once it is deleted.
        parameters: by name.
    """

    def __init__(self, owner: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Claims parameters for an algorithm; `taken` finds those that another one has claimed."""
        self.owner = weakref.ref(owner)
        self.parameters = dict(parameters)
        self.renew()

    def renew(self) -> None:
        """Claims them again after `release`."""
        with _lock:
            _claims.add(self)

    def release(self) -> None:
        """Leaves them to others; calling it again does nothing."""
        with _lock:
            _claims.discard(self)


def taken(parameters: Mapping[str, torch.nn.Parameter]) -> str:
    """Returns which of some parameters another algorithm exchanges, and what to do; an empty text if there is none."""
    if _overlap(parameters):
        # A deleted algorithm is part of cycles, and lives until the next collection.
        with _collecting:
            gc.collect()
    found = _overlap(parameters)
    if found is None:
        return ""
    name, owner = found
    return (
        f"the gradient of parameter {name!r} is exchanged by another {owner} already: close() that one first, go on with its "
        "switch_to(), or wrap one module that holds both"
    )


def _overlap(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[str, str] | None:
    with _lock:
        claims = list(_claims)
    for claim in claims:
        owner = claim.owner()
        theirs = set() if owner is None else set(claim.parameters.values())
        for name, parameter in parameters.items():
            if parameter in theirs:
                return name, type(owner).__name__
    return None
