"""The cases whose results are compared with those of the CPU: the same list where digests are made and where they are read.

A case runs several operations on one input. Cases are in groups, one process each, such as one group per codec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bagua_kernels import optim
from bagua_kernels.compression import (
    FP8,
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    ChunkedTopK,
    Codec,
    MinMaxUInt2,
    MinMaxUInt4,
    MinMaxUInt8,
    Natural,
    RandomK,
    Sign,
    TernGrad,
    ThresholdTopK,
    TopK,
    TwoMagnitudes,
)
from bagua_kernels.compression.codec import from_spec
from bagua_kernels.compression.codec import names as registered
from bagua_kernels.compression.powersgd.orthonormal import orthonormalize
from bagua_kernels.launchers import elementwise, select
from bagua_kernels.launchers.blockwise import Rows
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.rules.gossip import ADDED, CHOCO
from bagua_kernels.rules.optimizers import ADAM, SGD
from bench.gpu.inputs import DTYPES, FEW_KINDS, KINDS, name_of, vector
from bench.workloads.elementwise import adamw_scalars

CPU = torch.device("cpu")
RANKS = 3
SEED = 0xFEDC_BA98_7654_3210
BLOCK = 256
# Around the pads of 16 bytes and the ends of blocks, and more than one wave of programs.
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 1009, 16_387)
LONG_LENGTHS = (150_001, 4_000_037)
# Other sizes of blocks, one dtype each: (elements, elements per block, dtype).
OTHER_BLOCKS = ((1009, 32, torch.float32), (16_389, 4096, torch.bfloat16))

Outputs = Callable[[torch.device], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        group: what shares a process.
        name: unique within the group.
        operations: the names of the results.
        outputs: yields the results on a device, in the order of `operations`.
    """

    group: str
    name: str
    operations: tuple[str, ...]
    outputs: Outputs

    def digests(self, device: torch.device) -> list[str]:
        """One digest per operation; from an operation that raises an error on, that of the error's type."""
        found: list[str] = []
        try:
            found.extend(digest(result) for result in self.outputs(device))
        except ValueError as error:
            # A codec may refuse an input; any other error is one of the machine.
            missing = len(self.operations) - len(found)
            found += [digest_of(f"raises {type(error).__name__}".encode())] * missing
        if len(found) != len(self.operations):
            raise AssertionError(f"{self.group}, {self.name}: {len(found)} results for {self.operations}")
        return found


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all: which NaN a decoder makes is not fixed, the bytes of payloads are."""
    if not x.is_floating_point():
        return x
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def digest(x: torch.Tensor) -> str:
    return digest_of(bits(x.detach().cpu()).contiguous().numpy().tobytes())


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def codecs(block: int) -> dict[str, Codec]:
    """Every codec with bytes of its own at one size of blocks; the sparsifiers have no blocks."""
    found: dict[str, Codec] = {
        "minmax_uint8": MinMaxUInt8(block),
        "minmax_uint8, stochastic": MinMaxUInt8(block, stochastic=True),
        "minmax_uint4, stochastic": MinMaxUInt4(block, stochastic=True),
        "minmax_uint2": MinMaxUInt2(block),
        "absmax_int8": AbsMaxInt8(block),
        "absmax_int4": AbsMaxInt4(block),
        "qsgd, l2": QSGD(norm="l2", block=block),
        "terngrad": TernGrad(block),
        "sign": Sign(block),
        "sign, two means": Sign(block, two_means=True),
        "two_magnitudes": TwoMagnitudes(block),
        "natural": Natural(block),
        "fp8 e4m3": FP8("e4m3", block),
        "fp8 e5m2, stochastic": FP8("e5m2", block, stochastic=True),
    }
    if block == BLOCK:
        found |= {
            "topk": TopK(0.05),
            "threshold_topk": ThresholdTopK(0.05),
            "randomk": RandomK(0.05),
            "chunked_topk": ChunkedTopK(),
            "identity": from_spec("identity"),
            "cast": from_spec("cast"),
        }
    return found


def defaults() -> dict[str, Codec]:
    """The registered codecs whose options without arguments are not in `codecs`."""
    listed = list(codecs(BLOCK).values())
    made = {name: from_spec(name) for name in registered()}
    return {name: codec for name, codec in made.items() if codec not in listed and isinstance(codec, BlockCodec)}


def operations_of(codec: Codec) -> tuple[str, ...]:
    common = ("encode", "decode", "decode_sum", "reduce")
    if isinstance(codec, BlockCodec):
        return (*common, "feedback", "residual", "pieces")
    if isinstance(codec, ChunkedTopK):
        return (*common, "feedback", "residual", "outer", "outer_residual", "mean")
    return common


def codec_outputs(codec: Codec, x: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """The results of all operations of a codec on a vector of the CPU."""
    n, flipped = x.numel(), x.flip(0).to(device)
    residual = (x.float().flip(0) * 0.25).to(device)
    x = x.to(device)
    payload = codec.encode(x, seed=SEED)
    yield payload
    out = torch.empty_like(x)
    yield codec.decode(payload, out)
    payloads = torch.stack([payload, *(codec.encode(flipped, seed=rank) for rank in range(1, RANKS))])
    yield codec.decode_sum(payloads, out, 1 / RANKS)
    yield codec.reduce(payloads, n, scale=1 / RANKS, seed=SEED)
    if isinstance(codec, BlockCodec):
        yield codec.encode_feedback(x, residual, seed=SEED)
        yield residual
        yield codec.encode_pieces((x, x[: n // 3]), seed=SEED)
    elif isinstance(codec, ChunkedTopK):
        before = residual.clone()
        yield codec.encode_feedback(x, residual, beta=0.9)
        yield residual
        yield codec.encode_outer(flipped.float(), x, before, 0.95)
        yield before
        yield codec.mean(payloads, out)


def codec_case(group: str, codec: Codec, kind: str, dtype: torch.dtype, n: int) -> Case:
    name = f"{kind} {name_of(dtype)} {n}" + (f" block {codec.block}" if isinstance(codec, BlockCodec) else "")
    return Case(group, name, operations_of(codec), lambda device: codec_outputs(codec, vector(kind, n, dtype), device))


def codec_cases(group: str) -> Iterator[Case]:
    """All cases of a codec: short ones in all dtypes first, so that a process that is stopped has seen each dtype."""
    if group.startswith("default "):
        codec = defaults()[group.removeprefix("default ")]
        yield from (codec_case(group, codec, kind, DTYPES[0], n) for n in (1009, 16_387) for kind in KINDS)
        return
    codec = codecs(BLOCK)[group]
    for dtype in DTYPES:
        yield from (codec_case(group, codec, kind, dtype, n) for n in LENGTHS for kind in KINDS)
    if isinstance(codec, BlockCodec):
        for n, block, dtype in OTHER_BLOCKS:
            yield from (codec_case(group, codecs(block)[group], kind, dtype, n) for kind in KINDS)
    for dtype in DTYPES:
        yield from (codec_case(group, codec, kind, dtype, n) for n in LONG_LENGTHS for kind in FEW_KINDS)


def select_outputs(x: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """Collects, writes, places and adds up the elements of magnitude 1/2 or more."""
    n, half = x.numel(), 0x3F00_0000
    residual = (x.float().flip(0) * 0.25).to(device)
    x = x.to(device)
    collected = select.Collected(x, half, residual)
    yield residual
    room = max(1, collected.count)
    offsets = torch.zeros(room, dtype=torch.int16, device=device)
    entries = torch.zeros(room, device=device)
    collected.write(offsets, entries)
    yield collected.ends
    yield offsets
    yield entries
    ends = collected.ends.to(torch.int32)
    placed = torch.zeros(n, device=device)
    wrong = select.place(ends, offsets, entries, placed)
    yield placed
    total = torch.empty(n, device=device)
    wrong |= select.place_sum(
        ends.expand(RANKS, -1), offsets.expand(RANKS, -1), entries.expand(RANKS, -1), total, 1 / RANKS
    )
    yield total
    yield torch.tensor([wrong])


def permuted_outputs(n: int, device: torch.device) -> Iterator[torch.Tensor]:
    yield select.permuted(n, n // 3 + 1, SEED, device)


def select_cases() -> Iterator[Case]:
    operations = ("residual", "ends", "offsets", "values", "placed", "sum", "flags")

    def case(kind: str, dtype: torch.dtype, n: int) -> Case:
        return Case(
            "select",
            f"{kind} {name_of(dtype)} {n}",
            operations,
            lambda device: select_outputs(vector(kind, n, dtype), device),
        )

    for n in (1, 255, 1009, 65_535, 65_536, 65_537, 150_001):
        yield from (case(kind, torch.float32, n) for kind in ("heavy", "equal", "inf", "nan"))
    yield from (case("heavy", dtype, 65_537) for dtype in DTYPES[1:])
    for n in (1, 2, 17, 1009, 65_537, 1_000_003):
        yield Case("select", f"permuted {n}", ("permuted",), partial(permuted_outputs, n))


def fusion_outputs(codec: BlockCodec, n: int, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """Rules before the blocks are encoded, and after payloads are decoded."""
    x, own = (vector("normal", n, dtype, salt).to(device) for salt in (1, 2))
    yield codec.encode_rule(CHOCO, [x, own], [0.7], seed=SEED)
    yield own
    payloads = torch.stack(
        [codec.encode(vector("normal", n, dtype, 3 + rank).to(device), seed=rank) for rank in range(4)]
    )
    state = [x.float(), torch.zeros(n, device=device), torch.zeros(n, device=device)]
    codec.decode_apply(payloads, ADAM, state, adamw_scalars(10), scale=1 / 4)
    yield from state
    total, replicas = torch.zeros(n, device=device), torch.zeros(4, n, device=device)
    codec.decode_apply(payloads, ADDED, [total], weights=[0.4, 0.3, 0.2, 0.1], replicas=replicas)
    yield total
    yield replicas


def fusion_cases() -> Iterator[Case]:
    operations = ("payload", "own", "parameter", "first moment", "second moment", "total", "replicas")

    def case(name: str, codec: BlockCodec, n: int, dtype: torch.dtype) -> Case:
        return Case(
            "fusion",
            f"{name} {name_of(dtype)} {n}",
            operations,
            lambda device: fusion_outputs(codec, n, dtype, device),
        )

    several: dict[str, BlockCodec] = {
        "minmax_uint8, stochastic": MinMaxUInt8(BLOCK, stochastic=True),
        "absmax_int8": AbsMaxInt8(BLOCK),
        "sign": Sign(BLOCK),
    }
    for n in (1009, 16_387):
        yield from (case(name, codec, n, torch.float32) for name, codec in several.items())
    yield case("minmax_uint8, stochastic", several["minmax_uint8, stochastic"], 1009, torch.bfloat16)


def elementwise_outputs(rule: str, dtype: torch.dtype, n: int, device: torch.device) -> Iterator[torch.Tensor]:
    arrays = [vector("normal", n, dtype, salt).to(device) for salt in (1, 2)]
    if rule == "adam":
        arrays += [
            vector("normal", n, torch.float32, 3).to(device),
            vector("normal", n, torch.float32, 4).to(device) ** 2,
        ]
        elementwise.apply(ADAM, arrays, adamw_scalars(10))
        yield from (arrays[i] for i in ADAM.writes)
    else:
        arrays.append(vector("normal", n, torch.float32, 3).to(device))
        elementwise.apply(SGD, arrays, (1e-2, 0.9, 0.75, 0.1, 0.0))
        yield from (arrays[i] for i in SGD.writes)


def elementwise_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for n in (1, 16, 257, 1009, 150_001):
            for rule, writes in (("adam", ADAM.writes), ("sgd", SGD.writes)):
                yield Case(
                    "elementwise",
                    f"{rule} {name_of(dtype)} {n}",
                    tuple(f"array {i}" for i in writes),
                    partial(elementwise_outputs, rule, dtype, n),
                )


# Elements of the parameters of a small model; none of the later ones begins at a multiple of 16 bytes when they are packed.
SIZES = (33_000, 7, 1 << 16, 30, 1)


def step_outputs(
    name: str, dtype: torch.dtype, extras: Extras | None, packed: bool, device: torch.device
) -> Iterator[torch.Tensor]:
    """Three steps of an optimizer over tensors with memory of their own, or packed into one vector without gaps."""
    values = vector("normal", sum(SIZES), dtype, 1).to(device)
    whole = values.clone() if packed else None
    parts = [part if packed else part.clone() for part in (values if whole is None else whole).split(SIZES)]
    parameters = [torch.nn.Parameter(part) for part in parts]
    options = {"lr": 1e-2, **({"momentum": 0.9} if name == "SGD" else {})}
    optimizer = getattr(optim, name)(parameters, **options, extras=extras)
    for step in range(3):
        for parameter, gradient in zip(
            parameters, vector("normal", sum(SIZES), dtype, 10 + step).to(device).split(SIZES), strict=True
        ):
            parameter.grad = gradient if packed else gradient.clone()
        optimizer.step()
    yield torch.cat([parameter.detach().view(-1) for parameter in parameters])
    key = "momentum_buffer" if name == "SGD" else "exp_avg_sq"
    yield torch.cat([optimizer.state[parameter][key].view(-1) for parameter in parameters])


def step_cases() -> Iterator[Case]:
    plain = [(name, dtype, None, packed) for name in ("AdamW", "SGD") for dtype in DTYPES for packed in (False, True)]
    special = [
        ("AdamW", torch.bfloat16, Extras(precision=precision, seed=5), True)
        for precision in ("stochastic", "master", "kahan")
    ]
    for name, dtype, extras, packed in [*plain, *special]:
        yield Case(
            "multitensor",
            f"{name} {name_of(dtype)} {extras.precision if extras else 'nearest'}{' packed' if packed else ''}",
            ("parameters", "state"),
            partial(step_outputs, name, dtype, extras, packed),
        )


def low_rank_cases() -> Iterator[Case]:
    def outputs(matrices: int, rows: int, columns: int, device: torch.device) -> Iterator[torch.Tensor]:
        p = vector("normal", matrices * rows * columns).view(matrices, rows, columns).to(device)
        orthonormalize(p)
        yield p

    for shape in ((1, 5, 1), (3, 64, 2), (2, 1009, 4)):
        yield Case(
            "low_rank",
            "x".join(map(str, shape)),
            ("orthonormal",),
            partial(outputs, *shape),
        )


def rows_outputs(codec: BlockCodec, rows: Rows, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """The payloads of chunks in the rows of a message, with and without counts, and the decoded chunks."""
    x = vector("heavy", rows.total, dtype).to(device)
    seeds = [SEED + row for row in range(rows.count)]
    counts = (torch.arange(-(-rows.total // codec.block), dtype=torch.int32) % codec.block + 1).to(device)
    for own in (None, counts):
        message = torch.zeros((rows.count, codec.payload_size(rows.width) + 32), dtype=torch.uint8, device=device)
        payloads = message[:, :-32]
        codec.encode_rows(x, payloads, rows, seeds=seeds, counts=own)
        yield message
        yield codec.decode_rows(payloads, torch.zeros_like(x), rows)


def rows_cases() -> Iterator[Case]:
    operations = ("encode", "decode", "encode, counted", "decode, counted")
    for name in ("minmax_uint8", "minmax_uint4, stochastic", "sign, two means", "fp8 e5m2, stochastic"):
        codec = codecs(BLOCK)[name]
        assert isinstance(codec, BlockCodec)
        for dtype in DTYPES:
            # All chunks full; the last one short; one empty; of odd lengths.
            for cut in ((4096, 1024, 1024, 4), (16_387, 4352, 4352, 4), (300, 256, 256, 4), (1009, 512, 307, 2)):
                text = f"{name} {name_of(dtype)} {'x'.join(map(str, cut))}"
                yield Case("rows", text, operations, partial(rows_outputs, codec, Rows(*cut), dtype))


def input_outputs(kind: str, n: int, dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    yield vector(kind, n, dtype)


def input_cases() -> Iterator[Case]:
    """The inputs themselves, so that vectors that differ are not taken for kernels that differ."""
    for dtype in DTYPES:
        for n in (*LENGTHS, *LONG_LENGTHS):
            for kind in KINDS if n in LENGTHS else FEW_KINDS:
                yield Case(
                    "inputs",
                    f"{kind} {name_of(dtype)} {n}",
                    ("input",),
                    partial(input_outputs, kind, n, dtype),
                )


OTHERS: dict[str, Callable[[], Iterator[Case]]] = {
    "inputs": input_cases,
    "select": select_cases,
    "fusion": fusion_cases,
    "elementwise": elementwise_cases,
    "multitensor": step_cases,
    "low_rank": low_rank_cases,
    "rows": rows_cases,
}


def group_names() -> list[str]:
    """All groups: those of codecs with their own list of cases first."""
    return [*codecs(BLOCK), *OTHERS, *(f"default {name}" for name in defaults())]


def cases_of(group: str) -> Iterator[Case]:
    """All cases of a group."""
    return OTHERS[group]() if group in OTHERS else codec_cases(group)


def all_cases() -> Iterator[Case]:
    for group in group_names():
        yield from cases_of(group)


# One case per launcher, for a first look. The interpreter handles each of them in seconds.
SMOKE: dict[str, tuple[str, str]] = {
    "encode": ("minmax_uint8", "heavy float32 257 block 256"),
    "feedback, stochastic": ("fp8 e5m2, stochastic", "heavy float32 257 block 256"),
    "fusion": ("fusion", "absmax_int8 float32 1009"),
    "elementwise": ("elementwise", "adam float32 257"),
    "multitensor": ("multitensor", "AdamW float32 nearest"),
    "select": ("select", "heavy float32 1009"),
    "chunks": ("chunked_topk", "heavy float32 1009"),
    "low_rank": ("low_rank", "3x64x2"),
    "rows": ("rows", "minmax_uint8 float32 300x256x256x4"),
}


def case_named(group: str, name: str) -> Case:
    for case in cases_of(group):
        if case.name == name:
            return case
    raise KeyError(f"group {group!r} has no case {name!r}")


def named(places: Sequence[tuple[str, str]]) -> list[Case]:
    return [case_named(*place) for place in places]
