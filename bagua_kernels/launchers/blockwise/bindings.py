"""What the templates of every backend know of a rule and of pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from bagua_kernels.rules import random, rounding
from bagua_kernels.rules.quantizers import BlockQuantizer


def rule_bindings(rule: BlockQuantizer) -> dict[str, Callable[..., Any]]:
    """The names by which the templates of every backend call rules."""
    return {
        "ordered": rounding.ordered,
        "quotient": rounding.quotient,
        "float_bits": rounding.float_bits,
        "unit": rule.unit,
        "terms": rule.terms,
        "steps": rule.steps,
        "threshold": rule.threshold,
        "random_key": random.random_key,
        "random_bits": random.random_bits,
        "dither": random.dither,
        "scales": rule.scales,
        "encode_constants": rule.encode_constants,
        "encode": rule.encode,
        "decode_constants": rule.decode_constants,
        "decode": rule.decode,
    }


def rule_constants(rule: BlockQuantizer) -> dict[str, int]:
    """The numbers that the templates of every backend know a rule by."""
    return {
        "WORDS": rule.words,
        "BITS": rule.bits,
        "FIELDS": 8 // rule.bits,
        "MASK": (1 << rule.bits) - 1,
        "HALF": 1 << (rule.bits - 1),
        "LEVELS": rule.levels,
        "SIGNED": int(rule.signed),
        "RANGE": int(rule.extremes == "range"),
        "SUMS": rule.sums,
        "SPLITS": rule.splits,
    }


def piece_table(pieces: Sequence[torch.Tensor], block: int) -> tuple[Any, Any, Any]:
    """Where the pieces' memory is and how long it is, and each one's first block, with the number of all blocks at the end.

    Three arrays of int64.
    """
    sizes = [piece.numel() for piece in pieces]
    firsts = [0, *accumulate(-(-size // block) for size in sizes)]
    addresses = [piece.data_ptr() for piece in pieces]
    return np.array(addresses, np.int64), np.array(sizes, np.int64), np.array(firsts, np.int64)
