"""What a tuner chooses among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.algorithms.gradient_all_reduce import GradientAllReduce
from bagua_kernels.algorithms.tuner.cost.methods import Method, methods
from bagua_kernels.compression.codec import parse_spec

PLAIN = "GradientAllReduce"


@dataclass(frozen=True)
class Candidate:
    """One way to average gradients.

    Attributes:
        method: what it sends, for the cost model.
        bucket_bytes: of gradients that are exchanged together.
        recipe: makes the exchanges; around no module, so that it has none itself.
    """

    method: Method
    bucket_bytes: int
    recipe: GradientAlgorithm

    @property
    def label(self) -> str:
        """For tables and states, the same on all ranks."""
        return f"{self.method.name}, {self.bucket_bytes / (1 << 20):g} MiB"


def candidates(
    exactness: str, bucket_bytes: Sequence[int], forgiving: bool, scaler: torch.amp.GradScaler | None
) -> list[Candidate]:
    """Lists what changes no more than is allowed; the plain mean is the first.

    Args:
        exactness: "exact" or "synchronous".
        bucket_bytes: sizes of buckets; compression is tried with the first one.
        forgiving: False if the optimizer divides by a second moment, so that payloads which lack most of a gradient cost loss.
        scaler: of the loss, for residuals.
    """
    scaled: dict[str, Any] = {} if scaler is None else {"scaler": scaler}
    known = {method.name: method for method in methods()}
    found = [Candidate(known[PLAIN], size, GradientAllReduce.recipe()) for size in bucket_bytes]
    if exactness == "exact":
        return found
    for method in known.values():
        if method.exactness != "synchronous" or not method.spec:
            continue
        name, options = parse_spec(method.spec)
        kind = Algorithm.registered[name]
        # Those without a hook do more than average gradients: QAdam brings its own optimizer.
        if issubclass(kind, GradientAlgorithm) and kind.has_hook:
            arguments: dict[str, Any] = {**options, **scaled}
            recipe = kind.recipe(**arguments)
            if forgiving or not recipe.holds_back:
                found.append(Candidate(method, bucket_bytes[0], recipe))
    return found
