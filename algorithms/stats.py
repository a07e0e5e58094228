"""What algorithms count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from bagua_kernels.algorithms.policy.policy import Outcome

# Of each dictionary whose name in loggers is not that of its field.
_GROUPS = {"errors": "error", "guards": "guard"}


@dataclass(frozen=True)
class Stats:
    """What an algorithm has done since it was made, on this rank.

    Attributes:
        steps: backward passes whose gradients were exchanged, or steps of the optimizer of algorithms on parameters. A rank
            alone counts the passes, or steps, of which several ranks would exchange something.
        bytes_sent: bytes put on the wire for gradients, parameters and buffers.
        wait_seconds: time that training waited for communication. Of gradients the compilation of kernels is left out.
        exchange_seconds: time that a communication thread was busy, most of it beside training.
        residual_norm: Euclidean norm of what this rank's payloads have lacked so far; 0 without error feedback.
        errors: of each parameter's mean, relative to the exact one, when the guard last looked; empty without a guard.
        disagreement: root mean square difference between a parameter here and at a neighbour, in the last exchange of
            parameters; 0 for algorithms that exchange gradients.
        rounds: rounds of exchanges of parameters that have begun, so that bytes_sent / rounds are the bytes of a round; 0 for
            algorithms that exchange gradients.
        decay: the factor by which a period of the topology shrinks disagreement at worst, without steps; None if there is
            no topology.
        fresh: the fraction of averages that had this rank's newest model, of `wagma`; None for others.
        staleness: of `wagma`, how often this rank's contribution was so many versions old.
        trial: of `only_if_faster`: "" before it begins or if it was not asked for, "running", or what was found to be
            faster, "compressed" or "plain".
        guards: how often guards have acted here. Of a `Penalty`, in exchanges of a bucket: "left out", this rank; "void", all
            ranks; "restarted", norms that have risen are usual from then on. Of a `Guard`: "exceeded", looks that found more
            lost than its bound. Of gossip with differences: "grown", looks that found them larger than they should be.
        epochs: of the members, see `comm.Membership`; None where training does not heal.
        losses: ranks that were lost so far, without whom training went on; None likewise.
        healing_seconds: time from the errors of lost ranks to the next epochs; None likewise.
    """

    steps: int
    bytes_sent: int
    wait_seconds: float
    exchange_seconds: float
    residual_norm: float
    errors: dict[str, float]
    trial: Outcome = ""
    disagreement: float = 0.0
    rounds: int = 0
    decay: float | None = None
    fresh: float | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    guards: dict[str, int] = field(default_factory=dict)
    epochs: int | None = None
    losses: int | None = None
    healing_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers by name, copies of this object's, as JSON and loggers of experiments take them."""
        return asdict(self)

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Returns all finite numbers in one flat dictionary, as loggers with `log(dict)` take them.

        >>> wandb.log(model.stats().numbers("bagua_kernels"), step=step)

        Names are those of `write`, such as "steps", "error/layer.weight", "guard/void" and "staleness/2". Numbers that this
        algorithm does not have, infinities and NaN are left out.

        Args:
            prefix: begins each name, with "/" behind it; "" for names without one.
        """
        begin = f"{prefix}/" if prefix else ""
        return {begin + name: float(value) for name, value in self._named() if math.isfinite(value)}

    def write(self, writer: Any, step: int, prefix: str = "bagua_kernels") -> None:
        """Adds all numbers to a `torch.utils.tensorboard.SummaryWriter`, or whatever else has its `add_scalar`."""
        for name, value in self._named():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    def _named(self) -> Iterator[tuple[str, float]]:
        """Yields each number with its name; texts and missing numbers are left out."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Mapping):
                group = _GROUPS.get(each.name, each.name)
                yield from ((f"{group}/{name}", one) for name, one in value.items())
            elif isinstance(value, int | float):
                yield each.name, value
