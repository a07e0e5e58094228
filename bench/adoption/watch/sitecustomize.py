"""Records steps of the program that this interpreter runs; Python imports this module where the folder is on its path.

The programs stay as their users have them. After each step of an optimizer a line of JSON goes to a file of the process, in the
folder that `ADOPTION_STEPS` names. It has the time, a digest of all parameters, and the bytes that algorithms have sent.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("ADOPTION_STEPS", "")
MODULE = "torch.optim.optimizer"
# Found at the first step: a look at all objects takes long.
ALGORITHMS: list[weakref.ref[Any]] = []


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module of torch's optimizers, and registers a hook when it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(record)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def record(optimizer: Any, *_: Any) -> None:
    """Writes the line of a step."""
    import torch

    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if group else int(os.environ.get("RANK", 0))
    bits, count = hashlib.sha256(), 0
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        bits.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        count += parameter.numel()
    line = {
        "rank": rank,
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "at": time.time(),
        "bits": bits.hexdigest()[:16],
        "elements": count,
        "sent": sent(),
    }
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


def sent() -> int | None:
    """Returns the bytes that algorithms in this process have sent; None without one."""
    module = sys.modules.get("bagua_kernels.algorithms")
    if module is None:
        return None
    if not ALGORITHMS:
        for each in gc.get_objects():
            # Proxies of other libraries may raise whatever is asked of them.
            with contextlib.suppress(Exception):
                if isinstance(each, module.Algorithm):
                    ALGORITHMS.append(weakref.ref(each))
    # The last figure of those that are gone is in the line before.
    return sum(algorithm.stats().bytes_sent for each in ALGORITHMS if (algorithm := each()) is not None)


if FOLDER:
    sys.meta_path.insert(0, Finder())
