"""Which rivals are measured side by side, and how they are to compare."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

WAYS = ("", " in backward")
SIDES = ("", " in turn")  # of PowerSGD: both factors in a step, or one
RANKS = (1, 2, 4)
# DDP is in all, as what ratios refer to: rivals of different groups are not measured at the same time. The more there are
# side by side, the less of each is left in caches and the longer it lasts until a turn comes again.
GRADIENTS = [
    ["alone", "ddp", "ddp fp16", "allreduce", "allreduce in backward", *(f"bytegrad{way}" for way in WAYS)],
    ["ddp", "int8", "sign", "topk"],
    ["ddp", "bytegrad", "hook bytegrad"],
    ["ddp", "ddp powersgd 1", "powersgd 1"],
    *(
        ["ddp", f"ddp powersgd {rank}", *(f"powersgd {rank}{sides}{way}" for way in WAYS)]
        for rank in (2, 4)
        for sides in SIDES
    ),
]
OURS = ["bytegrad", "int8", "sign", "topk", *(f"powersgd {rank}" for rank in RANKS)]
# `only_if_faster` is measured without a limit, where compression hardly pays.
TRIED = [["ddp", *(f"{name} if faster" for name in names)] for names in (OURS[:4], OURS[4:])]
# Ranks that exchange parameters. They keep vectors beside the model, so that no more fit into the memory side by side.
DECENTRALIZED = [
    ["ddp", "allreduce", "decentralized", "sgp"],
    ["ddp", "allreduce", "lowprec 8", "lowprec 2"],
    ["ddp", "allreduce", "choco"],
    ["ddp", "allreduce", "d2 chain", "d2"],
]
DELAYED = ["ddp", "allreduce", "decentralized"]
DELAY, DELAYED_RATE = 20.0, 500.0  # ms one way; a delay costs the processor's time, in proportion to the rate


def own(names: Iterable[str]) -> set[str]:
    """The rivals by which a group is known: others are in several groups, to compare with."""
    counts = Counter(itertools.chain(*GRADIENTS, *TRIED, *DECENTRALIZED))
    return {name for name in names if name != "alone" and not name.startswith("ddp") and counts[name] < 2}


def wanted(methods: list[str] | None) -> list[tuple[list[str], bool]]:
    """The groups to measure, each with True if it is measured without a limit of the links only.

    Args:
        methods: "gradients", "decentralized", or names of rivals; all groups if None.

    Raises:
        ValueError: no group has a rival of one of the names.
    """
    kinds = {
        "gradients": [*((group, False) for group in GRADIENTS), *((group, True) for group in TRIED)],
        "decentralized": [(group, False) for group in DECENTRALIZED],
    }
    everything = list(itertools.chain(*kinds.values()))
    if methods is None:
        return everything
    known = {*kinds, *itertools.chain(*(group for group, _ in everything))}
    if unknown := sorted(set(methods) - known):
        raise ValueError(f"expected methods to be among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return [
        one for kind, groups in kinds.items() for one in groups if kind in methods or set(methods).intersection(one[0])
    ]


def bars(rate: float | None, rivals: list[str], delay: float | None = None) -> list[tuple[str, str, float]]:
    """What is to be at most how many times what, where both were measured."""
    if delay is not None:
        found = [("decentralized", "ddp", 0.6), ("decentralized", "allreduce", 0.95)]
        return [bar for bar in found if set(bar[:2]) <= set(rivals)]
    found = [("allreduce", "ddp", 1.0), ("allreduce in backward", "ddp", 1.0)]
    if rate == 100.0:
        found += [("lowprec 8", "ddp", 0.44), ("lowprec 2", "ddp", 0.18)]
    if rate == 500.0:
        for way in WAYS:
            found += [(f"bytegrad{way}", "ddp", 0.35), (f"bytegrad{way}", "ddp fp16", 0.65)]
        found += [("decentralized", "ddp", 0.75), ("hook bytegrad", "ddp", 0.45), ("hook bytegrad", "bytegrad", 1.25)]
    for rank in (2, 4):
        found += [(f"powersgd {rank}{sides}{way}", f"ddp powersgd {rank}", 0.6) for sides in SIDES for way in WAYS]
    if rate is None:
        found += [(name, "ddp", 1.02) for name in (*OURS, *itertools.chain(*(names[1:] for names in TRIED)))]
        found += [(name, "allreduce", 1.02) for group in DECENTRALIZED for name in group[2:]]
    return [bar for bar in found if set(bar[:2]) <= set(rivals)]
