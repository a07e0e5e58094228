"""Trainings of algorithms on parameters, step by step: parameters have the bits that they had in earlier versions.

`python -m tests.algorithms.test_records` writes the records anew, which is only for a change of results that is wanted.
Norms, products of matrices and square roots are left out: their last bits depend on the processor.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from bagua_kernels.algorithms import (
    AsyncDecentralized,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    ModelAlgorithm,
    Wagma,
)
from tests.algorithms.exact_training import TRAININGS, Loop, Training, bits
from tests.algorithms.test_earlier_model_states import ORDERS, packed
from tests.grids import grid, one_of_each

FILE = Path(__file__).parent / "states" / "records.json"
STEPS, MIDDLE = 12, 7

MORE = {
    "decentralized_states": Training("decentralized:average_states=true"),
    "choco_identity": Training("choco:codec=identity,eta=0.5,interval=2"),
    "local_sgd_encoded": Training("local_sgd:interval=3,codec=minmax_uint8,min_numel=0,average_states=true"),
    "diloco_delay": Training("diloco:interval=4,delay=2,outer_momentum=0.9"),
    "diloco_blend": Training("diloco:interval=4,delay=1,blend=0.5,outer_momentum=0.9"),
    "diloco_codecs": Training(
        "diloco:interval=3,min_numel=0,outer_momentum=0.9", {"codec": {0: "absmax_int8", 2: "sign"}, "exact": ()}
    ),
    "diloco_quorum_fragments": Training(
        "diloco:interval=4,fragments=2,quorum=2,grace=50,outer_momentum=0.9", timed=True
    ),
    "sparse_loco_delay": Training(
        "sparse_loco:interval=3,delay=1,reduce=mean", {"codec": "chunked_topk:k=4,chunk=32", "dense": None}
    ),
    "wagma_never": Training("wagma:activate=all", {"period": None}, timed=True),
}
ALL = {name: each for name, each in (TRAININGS | MORE).items() if each.exact}
# Their options name ranks.
OF_RANKS = {"decentralized_nodes", "sgp_unequal"}
ASYNCHRONOUS = ("async_model_average", "async_decentralized", "wagma")
LOCAL = ("local_sgd", "post_local_sgd", "diloco", "slow_mo", "mu_loco", "sparse_loco")


def plain(loop: Loop) -> list[str]:
    return [stepped(loop) for _ in range(STEPS)]


def in_the_middle(call: Callable[[Loop], None]) -> Callable[[Loop], list[str]]:
    def record(loop: Loop) -> list[str]:
        found = [stepped(loop) for _ in range(MIDDLE)]
        loop.rest()
        call(loop)
        return [*found, seen(loop), *(stepped(loop) for _ in range(STEPS - MIDDLE))]

    return record


def synchronize(loop: Loop) -> None:
    loop.model.synchronize()


def evaluate(loop: Loop) -> None:
    """What an evaluation of the mean reads stays in the buffers of the module."""
    with loop.model.averaged():
        loop.module.running_mean.copy_(loop.module.weights[1].float()[:3])


def switch(loop: Loop) -> None:
    """To an algorithm of another kind; the virtual clock has no threads of gradients."""
    if loop.training.timed:
        kind, options = (AsyncDecentralized, {}) if isinstance(loop.model, Wagma) else (Wagma, {"period": 3})
    elif loop.training.spec.startswith(LOCAL):
        kind, options = Decentralized, {"peers": "ring"}
    else:
        kind, options = LocalSGD, {"interval": 2}
    loop.model = loop.model.switch_to(kind, optimizer=loop.optimizer, **options)


def switch_to_gradients(loop: Loop) -> None:
    loop.model = loop.model.switch_to(GradientAllReduce)


def overflow(loop: Loop) -> list[str]:
    found = []
    while loop.steps < STEPS:
        loop.overflow = loop.rank == 1 and len(found) == 4
        found.append(stepped(loop))
    return found


def join(loop: Loop) -> list[str]:
    with loop.model.join():
        found = [stepped(loop) for _ in range(STEPS - 2 * loop.rank)]
        loop.rest()
    return found


EVENTS = {
    "plain": plain,
    "synchronize": in_the_middle(synchronize),
    "averaged": in_the_middle(evaluate),
    "switch": in_the_middle(switch),
    "gradients": in_the_middle(switch_to_gradients),
    "overflow": overflow,
    "join": join,
}


def stepped(loop: Loop) -> str:
    if loop.training.paced:
        loop.train(1)
    else:
        loop.step()
    return loop.seen.hexdigest()


def seen(loop: Loop) -> str:
    return hashlib.sha256(bits([*loop.module.parameters(), *loop.module.buffers()])).hexdigest()


def record(loop: Loop, event: str) -> list[str]:
    found = EVENTS[event](loop)
    loop.rest()
    if isinstance(loop.model, ModelAlgorithm):
        state = packed(loop.model.algorithm_state_dict())
        found.append(hashlib.sha256(bits(state) + repr(sorted(state["numbers"].items())).encode()).hexdigest())
        loop.model.synchronize()
    return [*found, seen(loop)]


def recorded(name: str, event: str, ranks: int, seed: int = 0) -> str:
    """What all ranks have seen in each step, in their states and in their mean, in six digits each."""
    training = replace(ALL[name], scaled=event == "overflow", ranks=ALL[name].ranks if name in OF_RANKS else ranks)
    together = zip_longest(*training.run(record, event, seed=seed), fillvalue="")
    return " ".join(hashlib.sha256(" ".join(digests).encode()).hexdigest()[:6] for digests in together)


def fits(name: str, event: str, ranks: int) -> bool:
    training = ALL[name]
    if training.paced and (ranks != 2 or event not in ("plain", "synchronize", "averaged")):
        return False
    if training.timed and event == "gradients":
        return False
    if event == "join" and training.spec.startswith(ASYNCHRONOUS):
        return False
    return ranks == 3 or name not in OF_RANKS


CASES = [(name, event, ranks) for name in ALL for event in EVENTS for ranks in (2, 3) if fits(name, event, ranks)]
# Each training undisturbed and with something else, and all that may be.
SAMPLE = one_of_each(
    CASES, lambda case: (case[0], case[1] == "plain"), lambda case: (ALL[case[0]].timed, *case[1:]), cover=1
)


@grid(name__event__ranks=SAMPLE)
def test_parameters_have_the_bits_of_earlier_versions(name: str, event: str, ranks: int) -> None:
    expected = json.loads(FILE.read_text())[name][f"{event} {ranks}"]
    # As in `test_earlier_model_states`: a rank answers before its first step or after it.
    for seed in range(ORDERS if ALL[name].timed else 1):
        found = recorded(name, event, ranks, seed)
        if found == expected:
            return
    differing = [one != other for one, other in zip(found.split(), expected.split(), strict=True)]
    raise AssertionError(f"parameters have other bits, first in step {differing.index(True)} of {len(differing) - 2}")


if __name__ == "__main__":
    records = json.loads(FILE.read_text()) if FILE.exists() else {}
    for one in sys.argv[1:] or ALL:
        records[one] = {
            f"{event} {ranks}": recorded(one, event, ranks)
            for event in EVENTS
            for ranks in (2, 3)
            if fits(one, event, ranks)
        }
    FILE.write_text(json.dumps(records, indent=1) + "\n")
