"""What a tuner chooses among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.allreduce import GradientAllReduce
from bagua_kernels.algorithms.choosing.cost.methods import Method, known, methods
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.comm import Nodes
from bagua_kernels.compression.codec import parse_spec

PLAIN = "GradientAllReduce"


@dataclass(frozen=True)
class Candidate:
    """One way to average gradients.

    Attributes:
        method: what it sends, for the cost model.
        bucket_bytes: of gradients that are exchanged together.
        recipe: makes the exchanges; around no module, so that it has none itself.
        in_flight: exchanges at a time; None for the engine's number.
        in_backward: where the engine updates parameters, False to do so when all exchanges have ended.
        sockets: between two ranks that are used; None for as many as before.
        nodes: whose ranks take their mean first; None if all ranks are alike.
    """

    method: Method
    bucket_bytes: int
    recipe: GradientAlgorithm
    in_flight: int | None = None
    in_backward: bool = True
    sockets: int | None = None
    nodes: Nodes | None = None

    @property
    def label(self) -> str:
        """For tables and states, the same on all ranks."""
        parts = [self.method.name, f"{self.bucket_bytes / (1 << 20):.3g} MiB"]
        parts += ["by nodes"] * (self.nodes is not None)
        parts += ["steps at the end"] * (not self.in_backward)
        parts += ["one at a time"] * (self.in_flight == 1)
        parts += [] if self.sockets is None else [f"sockets: {self.sockets}"]
        return ", ".join(parts)

    @property
    def is_plain(self) -> bool:
        """True if it is an exact mean of all ranks at once."""
        return self.method.name == PLAIN and self.nodes is None

    def variations(self, sockets: Sequence[int], several: bool, applies: bool) -> list[Candidate]:
        """Variations of this candidate: other sockets, one exchange at a time, all updates at the end.

        Args:
            sockets: numbers of them between two ranks, beside that of before.
            several: True if the engine has several exchanges at a time.
            applies: True if the engine updates parameters.
        """
        found = [replace(self, in_backward=False)] if applies else []
        if several and self.in_flight is None:
            found.append(replace(self, in_flight=1))
        return found + [replace(self, sockets=count) for count in sockets]


def candidates(
    exactness: str,
    bucket_bytes: Sequence[int],
    module: torch.nn.Module | None,
    forgiving: bool,
    scaler: torch.amp.GradScaler | None,
) -> list[Candidate]:
    """Lists what changes no more than is allowed; the plain mean is the first.

    Args:
        exactness: "exact", or anything else for means that are rounded alike on all ranks, too.
        bucket_bytes: sizes of buckets for exact means.
        module: for which each compression has its default size of buckets; None to use the first of `bucket_bytes`.
        forgiving: False if the optimizer divides by a second moment, so that payloads which lack most of a gradient cost loss.
        scaler: of the loss, for residuals.
    """
    scaled: dict[str, Any] = {} if scaler is None else {"scaler": scaler}
    found = [Candidate(known()[PLAIN], size, GradientAllReduce.recipe(hierarchical=False)) for size in bucket_bytes]
    if exactness == "exact":
        return found
    for method in methods():
        if method.exactness != "synchronous" or not method.spec:
            continue
        name, options = parse_spec(method.spec)
        kind = Algorithm.registered[name]
        # Those without a hook do more than average gradients: QAdam brings its own optimizer.
        if issubclass(kind, GradientAlgorithm) and kind.has_hook:
            arguments: dict[str, Any] = {**options, **scaled}
            recipe = kind.recipe(**arguments)
            if forgiving or not recipe.holds_back:
                size = bucket_bytes[0] if module is None else kind.default_bucket_bytes(module)
                found.append(Candidate(method, size, recipe))
    return found


def by_nodes(plain: Candidate, nodes: Nodes) -> Candidate:
    """The exact mean, first of the ranks of a node."""
    return replace(plain, recipe=GradientAllReduce.recipe(hierarchical=True), nodes=nodes)
