"""Reads PTX: its instructions, how wide it reaches into memory, and what an exact kernel must not contain."""

from __future__ import annotations

import re
from collections import Counter

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# An instruction or directive, after a predicate or the brace that opens a call; a register or a label does not match.
OPCODE = re.compile(r"(?:[{}]\s*)*(?:@!?%\w+\s+)?(\.?[a-z][\w.:]*)(?=[\s;]|$)")
ARITHMETIC = ("add", "sub", "mul", "div", "sqrt", "fma", "mad", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
SMALL_FLOATS = {"f16", "f16x2", "bf16", "bf16x2"}
# What becomes of a term on its way into a sum.
SUMMING = {"cvt", "add", "selp", "mov", "ld", "st"}


def opcodes(ptx: str) -> list[str]:
    """Every instruction and directive with its modifiers and without its operands, such as `ld.global.v4.b32`."""
    matches = (OPCODE.match(line.strip()) for line in re.split(r"[;\n]", COMMENT.sub(" ", ptx)))
    return [match[1] for match in matches if match]


def widths(ptx: str, access: str) -> Counter[int]:
    """The bits that the instructions named `access`, such as `ld.global`, move at once, and how many move as many."""
    found: Counter[int] = Counter()
    for opcode in opcodes(ptx):
        if not opcode.startswith(f"{access}."):
            continue
        parts = opcode.split(".")
        vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        found[vector * int(parts[-1][1:])] += 1
    return found


def count(ptx: str, name: str, real: str = "f32") -> int:
    """How often an operation on `real` is done; an instruction on a pair does it twice."""
    found = [opcode.split(".") for opcode in opcodes(ptx)]
    return sum(1 + (f"{real}x2" in parts) for parts in found if parts[0] == name and {real, f"{real}x2"} & set(parts))


def violations(
    ptx: str,
    *,
    sums_are_marked: bool,
    real: str = "f32",
    fused: int | None = 0,
    summing: bool = False,
) -> list[str]:
    """What breaks the promise that every backend gives the same bits, or costs time for nothing.

    Arithmetic is in `real` alone, each operation is rounded once, to nearest, and nothing lies in local memory.

    Args:
        ptx: the module's text.
        sums_are_marked: whether the compiler says `.rn` of additions. Without it ptxas may contract one with a product, if
            the product is not `.rn` either: a product always must be.
        real: "f32" or "f64".
        fused: how many products and sums the rules ask to be rounded once; None where that is counted elsewhere.
        summing: whether float32 values are summed up in float64.
    """
    other = {"f32": "f64", "f64": "f32"}[real]
    reals = {real, f"{real}x2"}
    marked = ("fma", "mul", "div", "sqrt", "rcp", *(["add", "sub"] if sums_are_marked else []))
    found = []
    for opcode in opcodes(ptx):
        name, *modifiers = opcode.split(".")
        if other in modifiers and not (summing and name in SUMMING):
            found.append(f"{opcode}: not in {real}")
        if "local" in modifiers:  # also the directive `.local`
            found.append(f"{opcode}: local memory")
        if name == "mad" and reals & set(modifiers):
            found.append(f"{opcode}: contracted")
        if name in ARITHMETIC and SMALL_FLOATS & set(modifiers):
            found.append(f"{opcode}: arithmetic in half precision")
        if name in marked and reals & set(modifiers) and "rn" not in modifiers:
            found.append(f"{opcode}: not rounded to nearest by itself")
        if {"approx", "full", "ftz"} & set(modifiers):
            found.append(f"{opcode}: inexact")
    if fused is not None and count(ptx, "fma", real) != fused:
        found.append(f"fma: {count(ptx, 'fma', real)} instead of {fused}")
    return sorted(set(found))


def target(ptx: str) -> str:
    """The architecture the module was compiled for, such as `sm_90a`."""
    match = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert match, "the text is not PTX"
    return match[1]
