"""Compiles every Triton kernel without a GPU: `python -m bench.gpu.ahead_of_time [--output …/registers]`.

Makes a table of what each takes of a multiprocessor: registers a thread, memory that registers spilled to, shared memory.
The tests use the same functions to look at the PTX.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bagua_kernels.compression import FP8, QSGD, Sign, TernGrad, TwoMagnitudes, from_spec
from bagua_kernels.jit._triton import EXACT
from bagua_kernels.launchers.blockwise import _triton as blockwise
from bagua_kernels.launchers.blockwise.fusion import _triton as fusion
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, RowSum
from bagua_kernels.launchers.chunks import INFINITE, Record
from bagua_kernels.launchers.chunks import _triton as chunks
from bagua_kernels.launchers.elementwise import _triton as elementwise
from bagua_kernels.launchers.multitensor import MASTER, Variant
from bagua_kernels.launchers.multitensor import _triton as multitensor
from bagua_kernels.launchers.select import CHUNK, ROUNDS
from bagua_kernels.launchers.select import _triton as select
from bagua_kernels.rules.gossip import ADDED, DCD_TOTAL
from bagua_kernels.rules.messages import FEEDBACK, MessageRule
from bagua_kernels.rules.optimizers import ADAM, LAMB_MOMENTS, RMSPROP_CENTERED_MOMENTUM, SGD, ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.two_magnitudes import EVERY, LEAST_FIELD
from bench import speed

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
ARCHITECTURES = (80, 90, 100)
# What a launcher passes for a tensor of a dtype: bfloat16 goes as its bits.
POINTERS = {FLOAT32: "*fp32", FLOAT16: "*fp16", BFLOAT16: "*u16"}
# The rules of all codecs, with the block that each takes if none is given.
CODECS = [
    *(from_spec(name) for name in ("minmax_uint8", "minmax_uint4", "minmax_uint2", "absmax_int8", "absmax_int4")),
    *(QSGD(), QSGD(norm="l2"), TernGrad(), TernGrad(shared=True), Sign(), Sign(two_means=True), from_spec("natural")),
    *(FP8("e4m3"), FP8("e5m2"), FP8("e4m3", stochastic=True), FP8("e5m2", stochastic=True)),
    TwoMagnitudes(),
]
RULES: dict[BlockQuantizer, int] = {codec.rule: codec.block for codec in CODECS}  # type: ignore[attr-defined]
BLOCKWISE = ("encode", "encode_pieces", "decode", "decode_sum", "reduce")
MESSAGES = (FEEDBACK, DCD_TOTAL)
# How payloads get into a rule: as the weighted sum of neighbours with replicas, and as a gradient.
GOSSIP, GRADIENT = Mixture(weighted=True, tracked=True), Mixture()
BLOCKWISE_ARGUMENTS = {
    "words_ptr": "*i32", "codes_ptr": "*u8", "out_words_ptr": "*i32", "out_codes_ptr": "*u8", "addresses_ptr": "*i64",
    "sizes_ptr": "*i64", "firsts_ptr": "*i64", "piece_of_block_ptr": "*i64", "counts_ptr": "*i32", "weights_ptr": "*fp32",
    "replicas_ptr": "*fp32", "seeds_ptr": "*i32", "ranks": "i32", "size": "i32", "span": "i32", "total": "i32", "width": "i32",
    "n": "i32", "scale": "fp32", "divisor": "fp32",
    "seed_low": "i32", "seed_high": "i32",
}  # fmt: skip
SELECT = ("count", "write", "place", "permute")
SELECT_ARGUMENTS = {
    "counts_ptr": "*i64", "starts_ptr": "*i64", "offsets_ptr": "*i16", "values_ptr": "*fp32", "ends_ptr": "*i32",
    "flags_ptr": "*i32", "positions_ptr": "*i64", "keys_ptr": "*i32", "out_ptr": "*fp32", "threshold": "i32",
    "capacity": "i32", "count": "i32", "half": "i32",
}  # fmt: skip
MULTITENSOR_ARGUMENTS = {
    "addresses_ptr": "*i64", "sizes_ptr": "*i64", "rows_ptr": "*fp32", "keys_ptr": "*i32", "partials_ptr": "*fp64",
    "tensors_ptr": "*i32", "pieces_ptr": "*i32",
}  # fmt: skip
# What launchers pass as `num_warps`.
ELEMENTWISE_WARPS = 4
# A payload's size always is such a multiple, and its parts begin at such addresses.
MULTIPLES_OF_16 = ("n", "size", "span", "total", "width")


def scalars(rule: ElementwiseRule) -> int:
    """How many scalars a rule takes."""
    return len(inspect.signature(rule.function).parameters) - rule.arrays


def variant_of(
    rule: ElementwiseRule, dtypes: tuple[torch.dtype, ...] = (), extras: tuple[str, ...] = (), stochastic: bool = False
) -> Variant:
    """A rule's variant, without dtypes that for float32."""
    return Variant(rule, dtypes or (FLOAT32,) * rule.arrays, scalars(rule), extras, stochastic)


MIXED = (BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)
# Variants of the kernel over many tensors: with one and several states, with sums, and of mixed precision.
VARIANTS = {
    **{rule.name: variant_of(rule) for rule in (ADAM, SGD, RMSPROP_CENTERED_MOMENTUM, LAMB_MOMENTS)},
    "adam, bfloat16, stochastic": variant_of(ADAM, MIXED, stochastic=True),
    "adam, bfloat16, master": variant_of(ADAM, (*MIXED, FLOAT32), (MASTER,)),
}


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    sm: int,
    *,
    multiples: tuple[str, ...] = MULTIPLES_OF_16,
    **options: Any,
) -> str:
    """The PTX of a kernel for an architecture, specialised as a launch would do it."""
    names = kernel.arg_names
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in multiples or signature.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    text: str = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]
    return text


def blockwise_ptx(
    rule: BlockQuantizer,
    name: str,
    dtype: torch.dtype,
    sm: int,
    *,
    stochastic: bool = False,
    block: int = 256,
    n: str = "i32",
    given: bool = False,
    counted: bool = False,
    weighted: bool = False,
    divided: bool = False,
    **options: Any,
) -> str:
    """The PTX of a block quantizer's kernel."""
    kernel = blockwise.kernel(name, rule, dtype)
    types = {**BLOCKWISE_ARGUMENTS, "n": n, "x_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype]}
    if name == "encode_pieces":
        options |= blockwise.PIECES
    modes = {"STOCHASTIC": stochastic, "GIVEN": given, "COUNTED": counted}
    modes |= {"WEIGHTED": weighted, "DIVIDED": divided, "EVEN": True}
    return _blockwise(kernel, rule, types, modes, sm, block, **options)


def message_ptx(
    rule: BlockQuantizer,
    message: MessageRule,
    dtypes: Sequence[torch.dtype],
    sm: int,
    *,
    stochastic: bool = False,
    block: int = 256,
    counted: bool = False,
    rows: RowSum | None = None,
) -> str:
    """The PTX of the kernel that encodes what a rule computes from arrays of some dtypes."""
    kernel = fusion.message_kernel(rule, message, tuple(dtypes), rows is not None)
    types = BLOCKWISE_ARGUMENTS | {f"a{i}_ptr": POINTERS[dtype] for i, dtype in enumerate(dtypes)}
    types |= {f"s{i}": "fp32" for i in range(message.scalars)}
    modes = {"STOCHASTIC": stochastic, "COUNTED": counted}
    modes |= {"WEIGHTED": rows is not None and rows.weighted, "DIVIDED": rows is not None and rows.divided}
    return _blockwise(kernel, rule, types, modes, sm, block)


def apply_ptx(
    rule: BlockQuantizer,
    update: ElementwiseRule,
    dtype: torch.dtype,
    sm: int,
    *,
    block: int = 256,
    mixture: Mixture = GRADIENT,
) -> str:
    """The PTX of the kernel that decodes and applies a rule to arrays of a dtype."""
    kernel = fusion.apply_kernel(rule, update, scalars(update), mixture, (dtype,) * len(mixture.others(update)))
    types = {**BLOCKWISE_ARGUMENTS, **{f"a{i}_ptr": POINTERS[dtype] for i in range(update.arrays)}}
    types |= {f"s{i}": "fp32" for i in range(scalars(update))}
    modes = {"WEIGHTED": mixture.weighted, "DIVIDED": mixture.divided}
    modes |= {"TRACKED": mixture.tracked, "COUNTED": mixture.counted}
    return _blockwise(kernel, rule, types, modes, sm, block)


def _blockwise(
    kernel: Any,
    rule: BlockQuantizer,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    sm: int,
    block: int,
    **options: Any,
) -> str:
    shape = blockwise.tile(rule, block)
    warps = shape.pop("num_warps")
    signature = {a: types[a] for a in kernel.arg_names if a in types}
    values = {**shape, **{a: v for a, v in constants.items() if a in kernel.arg_names}}
    return compiled(kernel, signature, values, sm, num_warps=warps, **EXACT, **options)


def elementwise_ptx(rule: ElementwiseRule, dtype: torch.dtype, sm: int, **options: Any) -> str:
    """The PTX of the kernel that maps an optimizer's rule."""
    kernel = elementwise.kernel(rule, scalars(rule), (dtype,) * rule.arrays)
    signature = {f"a{i}_ptr": POINTERS[dtype] for i in range(rule.arrays)}
    signature |= {f"s{i}": "fp32" for i in range(scalars(rule))} | {"n": "i32"}
    options = {**EXACT, **options}
    return compiled(kernel, signature, {"BLOCK": elementwise.BLOCK}, sm, num_warps=ELEMENTWISE_WARPS, **options)


def multitensor_ptx(variant: Variant, sm: int, **options: Any) -> str:
    """The PTX of the kernel over many tensors."""
    likes = {f"like{i}_ptr": POINTERS[dtype] for i, dtype in enumerate(variant.dtypes)}
    constants = {"CHUNK": multitensor.CHUNK, "BLOCK": multitensor.BLOCK}
    options = {**EXACT, **options}
    kernel, warps = multitensor.kernel(variant), multitensor.WARPS
    return compiled(kernel, MULTITENSOR_ARGUMENTS | likes, constants, sm, num_warps=warps, **options)


def select_ptx(name: str, dtype: torch.dtype, sm: int, *, n: str = "i32", add: bool = False) -> str:
    """The PTX of a selection kernel."""
    kernel = select.kernel(name, dtype)
    types = {**SELECT_ARGUMENTS, "n": n, "x_ptr": POINTERS[dtype]}
    if name == "place" and not add:
        # Values are placed as their bits.
        types |= dict.fromkeys(("values_ptr", "out_ptr"), "*i32" if dtype == FLOAT32 else "*i16")
    signature = {a: types[a] for a in kernel.arg_names if a in types}
    block = select.TILE if name in ("count", "write") else select.ENTRIES
    values = {"BLOCK": block, "SPAN": CHUNK, "N_ROUNDS": ROUNDS, "ADD": add}
    constants = {a: values[a] for a in kernel.arg_names if a in values}
    return compiled(kernel, signature, constants, sm, num_warps=select.WARPS, **EXACT)


def chunks_ptx(
    name: str,
    record: Record,
    dtype: torch.dtype,
    sm: int,
    *,
    residual: bool = False,
    start: bool = False,
    counted: bool = False,
) -> str:
    """The PTX of a kernel of chunked top-k."""
    kernel = chunks.kernel(name, dtype)
    types = {
        "x_ptr": POINTERS[dtype],
        "records_ptr": "*i32",
        "record_ptr": "*i32",
        "flags_ptr": "*i32",
        "senders_ptr": "*i32",
    }
    types |= {"start_ptr": "*fp32", "residual_ptr": "*fp32", "out_ptr": "*fp32", "beta": "fp32"}
    types |= dict.fromkeys(("n", "k", "last"), "i32")
    high, codes, _ = record.starts
    values: dict[str, Any] = {"RESIDUAL": residual, "START": start, "COUNTED": counted, **chunks.form_of(record)}
    values |= {
        "BEYOND": INFINITE,
        "LEAST": LEAST_FIELD,
        "EVERY": EVERY,
        "BITS": triton.next_power_of_2(32 * (codes - high)),
    }
    signature = {a: types[a] for a in kernel.arg_names if a in types}
    constants = {a: values[a] for a in kernel.arg_names if a in values}
    return compiled(kernel, signature, constants, sm, num_warps=chunks.WARPS, **EXACT)


def assembler(sm: int) -> Path:
    """The ptxas that comes with Triton and knows the architecture; it may be missing."""
    return TOOLS / ("ptxas-blackwell" if sm >= 100 else "ptxas")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes, as ptxas, which allocates the registers, reports it.

    Attributes:
        registers: 32-bit registers a thread.
        stack: bytes of local memory a thread.
        spills: bytes stored to and loaded from it for want of registers.
        shared: bytes of shared memory a thread block that are known at compile time.
    """

    registers: int
    stack: int
    spills: int
    shared: int


def resources(ptx: str, sm: int) -> Resources:
    """Assembles PTX and reads what it takes."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
        assert arch, "the text is not PTX"
        command = [assembler(sm), "-v", "--fmad=false", f"--gpu-name={arch[1]}", text, "-o", Path(folder) / "cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    assert memory, f"ptxas does not speak of spills: {log}"
    assert registers, f"ptxas does not speak of registers: {log}"
    return Resources(
        registers=max(map(int, registers)),
        stack=max(int(m[0]) for m in memory),
        spills=max(int(m[1]) + int(m[2]) for m in memory),
        shared=max([int(s) for s in re.findall(r"(\d+) bytes smem", log)], default=0),
    )


def roundings(rule: BlockQuantizer, name: str) -> list[bool]:
    """How a kernel rounds: at random if True. Rules for one way of rounding are launched in that way only."""
    if name in ("decode", "decode_sum"):
        return [False]
    if "stochastic" in rule.name:
        return [True]
    return [False] if "nearest" in rule.name or "sign" in rule.name else [False, True]


def kernels(sm: int) -> Iterator[tuple[str, str, str]]:
    """(launcher, kernel, PTX) of every Triton kernel, quantizers with the block and rounding they are used with.

    All are for float32, but for a few updates of mixed precision.
    """
    for rule, block in RULES.items():
        for name in BLOCKWISE:
            for stochastic in roundings(rule, name):
                ptx = blockwise_ptx(rule, name, FLOAT32, sm, block=block, stochastic=stochastic)
                yield "blockwise", f"{name}, {rule.name}{', stochastic' * stochastic}", ptx
        for message in MESSAGES:
            for stochastic in roundings(rule, message.name):
                dtypes = (FLOAT32,) * message.arrays
                ptx = message_ptx(rule, message, dtypes, sm, block=block, stochastic=stochastic)
                yield "fusion", f"{message.name}, {rule.name}{', stochastic' * stochastic}", ptx
        yield "fusion", f"decode_apply, {rule.name}, adamw", apply_ptx(rule, ADAM, FLOAT32, sm, block=block)
        yield (
            "fusion",
            f"decode_apply, {rule.name}, gossip",
            apply_ptx(rule, ADDED, FLOAT32, sm, block=block, mixture=GOSSIP),
        )
    for update in (ADAM, SGD):
        yield "elementwise", update.name, elementwise_ptx(update, FLOAT32, sm)
    for name, of_many in VARIANTS.items():
        yield "multitensor", name, multitensor_ptx(of_many, sm)
    for name in SELECT:
        yield "select", name, select_ptx(name, FLOAT32, sm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write, without a suffix: .json and .txt")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    grid = Table("launcher", "kernel", title="Triton kernels, float32: registers a thread, bytes spilled, bytes shared")
    for sm in ARCHITECTURES:
        grid.add_column(f"sm_{sm}", justify="right")
    found: dict[tuple[str, str], list[Resources]] = {}
    for sm in ARCHITECTURES:
        for launcher, name, ptx in kernels(sm):
            taken = resources(ptx, sm)
            found.setdefault((launcher, name), []).append(taken)
            rows.append({"launcher": launcher, "kernel": name, "sm": sm, **asdict(taken)})
    for (launcher, name), taken_on in found.items():
        grid.add_row(launcher, name, *(f"{r.registers} / {r.spills} / {r.shared}" for r in taken_on))
    console = speed.console(record=True)
    console.print(grid)
    if options.output:
        speed.write(options.output.with_suffix(".json"), {"triton": triton.__version__, "rows": rows})
        options.output.with_suffix(".txt").write_text(console.export_text())
    spilled = [row for row in rows if row["spills"]]
    if spilled:
        console.print(json.dumps(spilled, indent=2))


if __name__ == "__main__":
    main()
