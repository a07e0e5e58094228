"""Which variables to try next, given what has been measured, and which to choose; no process is started here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagua_kernels import knobs
from bagua_kernels.comm.programs.tuning.probe import Result

Variables = tuple[tuple[str, str], ...]
DEFAULTS: Variables = ()

GLOO, OWN, SOCKETS = "GLOO_SOCKET_IFNAME", knobs.TUNING.variable, knobs.SOCKETS.variable
_NCCL = {
    "NCCL_SOCKET_NTHREADS": ("2", "4", "8"),
    "NCCL_NSOCKS_PERTHREAD": ("2", "4", "8"),
    "NCCL_BUFFSIZE": (f"{2 << 20}", f"{8 << 20}", f"{16 << 20}"),  # 4 MB is NCCL's own
}
NAMES = (*_NCCL, GLOO, OWN, SOCKETS)
GAIN = 1.03  # less cannot be distinguished from noise
_MOST_SOCKETS = 64  # NCCL refuses more threads times sockets


class ProbeError(RuntimeError):
    """A probing job has not come to an end."""


def options(first: Result, step: int, best: Variables) -> list[Variables] | None:
    """Returns the candidates of a step of the search, given the best so far; None after the last step."""
    fixed: dict[str, str] = {name: value for node in first.nodes for name, value in node.fixed}
    several = len(first.nodes) > 1
    if first.backend == "nccl":
        if step == len(_NCCL):
            return None
        name = list(_NCCL)[step]
        # Within a host NCCL uses no sockets.
        if name in fixed or (not several and name != "NCCL_BUFFSIZE"):
            return []
        found = [{**dict(best), name: value} for value in _NCCL[name]]
        made = [{**fixed, **one} for one in found]
        sockets = [int(one.get("NCCL_SOCKET_NTHREADS", 1)) * int(one.get("NCCL_NSOCKS_PERTHREAD", 1)) for one in made]
        return [tuple(one.items()) for one, count in zip(found, sockets, strict=True) if count <= _MOST_SOCKETS]
    if step == 2:
        return None
    if GLOO in fixed or not first.nodes:
        return []
    default = first.nodes[0].interface if len({node.interface for node in first.nodes}) == 1 else ""
    if step == 0:
        shared = [name for name in first.nodes[0].outward if all(name in node.outward for node in first.nodes)]
        return [((GLOO, name),) for name in shared if name != default] if several else []
    # Gloo opens its connections once more for each time that an interface is listed, and deals collectives over them.
    name = dict(best).get(GLOO, default)
    return [((GLOO, ",".join([name] * count)),) for count in (2, 4)] if name else []


def choose(candidates: Sequence[Variables], ratios: Mapping[Variables, float]) -> Variables:
    """Returns the candidate with the smallest ratio if that is more than 3 % below the first one's, else the first."""
    best = min(candidates, key=lambda one: ratios.get(one, math.inf))
    return best if ratios.get(best, math.inf) * GAIN < ratios[candidates[0]] else candidates[0]


def next_candidate(first: Result, ratios: Mapping[Variables, float]) -> Variables | None:
    """Returns what to measure next, by what has been measured (infinity if it failed); None if that was all."""
    best, step = DEFAULTS, 0
    while (candidates := options(first, step, best)) is not None:
        for one in candidates:
            if one not in ratios:
                return one
        best, step = choose([best, *candidates], ratios), step + 1
    return None


def ratio(seconds: Sequence[float], defaults: Sequence[float]) -> float:
    """Returns the geometric mean of a candidate's times relative to those of the defaults."""
    return math.exp(math.fsum(math.log(a / b) for a, b in zip(seconds, defaults, strict=True)) / len(defaults))


@dataclass
class Search:
    """What has been measured, and what was chosen.

    Attributes:
        first: the result of the defaults.
        runs: the seconds of each run of each candidate; none of one that failed.
        chosen: variables to set.
        notes: for the user.
    """

    first: Result | None = None
    runs: dict[Variables, list[tuple[float, ...]]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ratios(self, most: int = 2) -> dict[Variables, float]:
        """Returns the candidates' times relative to the defaults' of the same turn, the worse one of two turns."""
        defaults = self.runs[DEFAULTS]
        return {
            one: max((ratio(*pair) for pair in zip(runs[:most], defaults, strict=False)), default=math.inf)
            for one, runs in self.runs.items()
        }
