"""What algorithms count."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from bagua_kernels.algorithms.policy.policy import Outcome


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

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers by name, copies of this object's, as JSON and loggers of experiments take them."""
        return asdict(self)

    def write(self, writer: Any, step: int, prefix: str = "bagua_kernels") -> None:
        """Adds all numbers to a `torch.utils.tensorboard.SummaryWriter`, or whatever else has its `add_scalar`."""
        for name in (
            "steps",
            "rounds",
            "bytes_sent",
            "wait_seconds",
            "exchange_seconds",
            "residual_norm",
            "disagreement",
        ):
            writer.add_scalar(f"{prefix}/{name}", getattr(self, name), step)
        for name, error in self.errors.items():
            writer.add_scalar(f"{prefix}/error/{name}", error, step)
        for name, times in self.guards.items():
            writer.add_scalar(f"{prefix}/guard/{name}", times, step)
