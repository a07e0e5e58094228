"""What each rank of a probing job runs: it times torch.distributed's all-reduce, or runs this package's `tune`.

The launcher `bagua_kernels.comm.tune` starts it instead of the user's script, with the variables of one candidate set. It
reads the JSON that local rank 0 of each host writes. All hosts write the same, so that all launchers decide alike.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.joining.introduction import Introduction, job_secret
from bagua_kernels.comm.joining.launch import Launch
from bagua_kernels.comm.tuning import measure as tuning_measure

SIZES = (64 << 10, 1 << 20, 25 << 20)  # bytes: a bias, a layer, DDP's bucket
_IN_FLIGHT = 4  # all-reduces under way at once, as DDP has them; where sizes are worth it
_WORTH_IT = 1 << 20
_FEWEST, _MOST = 3, 15  # rounds


@dataclass(frozen=True)
class Case:
    """Something that is timed.

    Attributes:
        nbytes: of a tensor of float32.
        in_flight: all-reduces of such tensors that are started before the first one is waited for.
        rounds: how often; 0 leaves it to the time at hand.
    """

    nbytes: int
    in_flight: int
    rounds: int = 0


@dataclass(frozen=True)
class Node:
    """What a launcher knows about its host.

    Attributes:
        interface: the one that Gloo takes by itself; empty if unknown.
        outward: those through which other hosts may be reached.
        fixed: variables that the user has set, which are not varied.
    """

    interface: str = ""
    outward: tuple[str, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    """What a probing job has found, the same on all hosts.

    Attributes:
        backend: "gloo" or "nccl".
        world: the number of ranks.
        nodes: the hosts, in the order of their first ranks.
        cases: what was timed.
        seconds: of each case: the median over rounds of the slowest rank's time.
        spent: seconds that the launchers had been at work when the job began, by the one that started last.
        tuning: what `bagua_kernels.comm.tune` found, as JSON; empty if it was not asked for.
    """

    backend: str
    world: int
    nodes: tuple[Node, ...]
    cases: tuple[Case, ...] = ()
    seconds: tuple[float, ...] = ()
    spent: float = 0.0
    tuning: str = ""

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Reads what a probe has written.

        Raises:
            ValueError: the text is no result.
        """
        try:
            fields = json.loads(text)
            fields["nodes"] = tuple(_node(node) for node in fields["nodes"])
            fields["cases"] = tuple(Case(**case) for case in fields["cases"])
            fields["seconds"] = tuple(float(seconds) for seconds in fields["seconds"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no result of a probe: {error}: {text[:200]!r}") from None


@dataclass(frozen=True)
class Order:
    """What a launcher asks a probe to do.

    One word of JSON, for torchrun's parser takes exception to options of a script that resemble its own.

    Attributes:
        result: the file to write.
        node: about this host.
        backend: "auto", "gloo" or "nccl".
        cases: what to time.
        seconds: for that.
        own: seconds for this package's `tune`, which runs instead on Gloo; 0 for none.
        spent: seconds that the launcher has been at work.
        limit: seconds after which a process ends itself.
    """

    result: str
    node: Node
    backend: str = "auto"
    cases: tuple[Case, ...] = ()
    seconds: float = 1.0
    own: float = 0.0
    spent: float = 0.0
    limit: float = 60.0

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Reads what `json.dumps` has made of its fields."""
        fields = json.loads(text)
        fields["node"] = _node(fields["node"])
        fields["cases"] = tuple(Case(**case) for case in fields["cases"])
        return cls(**fields)


def _node(fields: dict[str, Any]) -> Node:
    """Makes a `Node` of what JSON has left of it."""
    return Node(fields["interface"], tuple(fields["outward"]), tuple((name, value) for name, value in fields["fixed"]))


def plan(sizes: Sequence[int]) -> tuple[Case, ...]:
    """Returns what to time for tensors of some sizes, the quickest first."""
    several = [Case(nbytes, _IN_FLIGHT) for nbytes in sizes if nbytes >= _WORTH_IT]
    return tuple(sorted([Case(nbytes, 1) for nbytes in sizes] + several, key=lambda case: case.nbytes * case.in_flight))


def measure(cases: Sequence[Case], seconds: float, device: torch.device) -> tuple[tuple[Case, ...], tuple[float, ...]]:
    """Times all-reduces of the default group; collective.

    Args:
        cases: what to time. Those without a number of rounds are given one, and left out if they do not fit.
        seconds: for all of them.
        device: where the tensors are.

    Returns:
        What was timed, and the seconds.
    """
    gather = _introduction()
    memory = torch.zeros(
        max(case.nbytes * case.in_flight for case in cases) // 4 or 1, dtype=torch.float32, device=device
    )
    started = time.perf_counter()
    done: list[Case] = []
    found: list[float] = []
    for number, case in enumerate(cases):
        # The first one opens connections, the second one measures the time of a round.
        cost = [_slowest(gather, [_round(case, memory)])[0] for _ in range(2)][-1]
        left, rounds = seconds - _slowest(gather, [time.perf_counter() - started])[0], case.rounds
        if not rounds:
            if number and cost * _FEWEST > left:
                break
            rounds = int(min(_MOST, max(_FEWEST, left / (len(cases) - number) / max(cost, 1e-6))))
        done.append(Case(case.nbytes, case.in_flight, rounds))
        found.append(statistics.median(_slowest(gather, [_round(case, memory) for _ in range(rounds)])))
    return tuple(done), tuple(found)


def _round(case: Case, memory: torch.Tensor) -> float:
    n = max(1, case.nbytes // 4)
    tensors = [memory[number * n : (number + 1) * n] for number in range(case.in_flight)]
    dist.all_reduce(memory[:1])
    _settle(memory)
    started = time.perf_counter()
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    _settle(memory)
    return time.perf_counter() - started


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _slowest(gather: Introduction, seconds: list[float]) -> list[float]:
    """Returns the longest that any rank took, for each."""
    return list(map(max, zip(*gather(seconds), strict=True)))


def _introduction() -> Introduction:
    """Returns what gathers values of all ranks; torch's own way would unpickle what anybody has sent."""
    return Introduction(dist.distributed_c10d._get_default_group(), job_secret(_get_default_store()))


def _own(budget: float, limit: float) -> str:
    communicator = rendezvous.init(timeout=limit, device="cpu")
    if communicator.size == 1:
        return ""
    return tuning_measure.tune(communicator, budget=budget, apply=False, progress=False).to_json()


def main(*words: str) -> None:
    """Runs one rank of a probing job, in torchrun's environment.

    Args:
        words: the command line; its last word is an `Order` as JSON.

    Raises:
        RuntimeError: if no launcher has set that environment.
    """
    order = Order.from_json(words[-1])
    # Not even a call that hangs in the library outlives this.
    faulthandler.dump_traceback_later(order.limit, exit=True)
    launch = Launch.read()
    if launch is None:
        raise RuntimeError("the probe found no RANK and WORLD_SIZE: it is started by torchrun, not by itself")
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and launch.number_on_host < torch.cuda.device_count()
    backend = ("nccl" if nccl else "gloo") if order.backend == "auto" else order.backend
    device = torch.device("cuda", launch.number_on_host) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    cases: tuple[Case, ...] = ()
    seconds: tuple[float, ...] = ()
    tuning = ""
    if order.own:
        tuning = _own(order.own, order.limit)
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=order.limit))
    if order.cases:
        cases, seconds = measure(order.cases, order.seconds, device)
    gather = _introduction()
    facts = gather((launch.number_on_host, asdict(order.node), order.spent))
    result = Result(
        backend,
        launch.world_size,
        tuple(_node(node) for local_rank, node, _ in facts if local_rank == 0),
        cases,
        seconds,
        min(spent for _, _, spent in facts),  # the others have waited for it
        tuning,
    )
    if launch.number_on_host == 0:
        unfinished = Path(f"{order.result}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(result)))
        unfinished.replace(order.result)
    # A host that fails before here takes the others' probes with it, so that all launchers see the same.
    gather(None)
    if order.own:
        rendezvous.shutdown()
    else:
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
