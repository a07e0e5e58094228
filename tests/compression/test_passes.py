"""Rules around block codecs: the payloads of the oracle, and every array as its formula gives it, on every backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bagua_kernels.compression import (
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    MinMaxUInt8,
    Sign,
    TernGrad,
    decode_add,
    decode_apply,
    encode_rule,
    from_spec,
    is_fused,
)
from bagua_kernels.compression.passes import stages
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.gossip import ADDED, CHOCO, DCD, DCD_TOTAL, TOWARDS
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import PLAIN_SGD, ElementwiseRule
from tests.cases import DTYPES
from tests.compression.codecs import ALL, Case
from tests.compression.test_block_codecs import equal
from tests.conftest import EMULATED, Target
from tests.grids import folded, grid, only
from tests.oracles import block_quantizers as blocks
from tests.oracles import messages as oracle
from tests.oracles.vectors import F32, make

SEED = 0xFEDC_BA98_7654_3210
N = 300 if EMULATED else 1009
WEIGHTS = (0.3, 0.45, -0.125, 1.0, 0.2)
THIRDS = (1 / 3,) * 3
MIXTURES = list(itertools.product((False, True), (WEIGHTS[:3], THIRDS)))
# Whole bytes, bits, and two bits rounded at random: what differs between other codecs, the tests of `encode_feedback` show.
every_case = grid(cover=1, case=only(ALL, ALL[0], ALL[4], ALL[12]))


def vectors(n: int, count: int) -> list[F32]:
    """A parameter, and vectors close to it."""
    x = make("heavy", n, 1e-2, 0)
    return [x, *(x + make("gaussian", n, 1e-4, seed) for seed in range(1, count))]


def on(target: Target, *arrays: F32) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()).to(target.device) for array in arrays]


def payloads_of(codec: BlockCodec, n: int, ranks: int, target: Target) -> torch.Tensor:
    rows = [codec.encode(*on(target, make("heavy", n, 1e-2, 9 + rank)), seed=rank) for rank in range(ranks)]
    return torch.stack(rows)


def decoded(case: Case, payloads: torch.Tensor, n: int) -> list[F32]:
    return [blocks.decode(case.spec, payload, n) for payload in payloads.cpu().numpy()]


def same(tensor: torch.Tensor, expected: F32) -> bool:
    return equal(tensor.cpu().numpy(), expected)


def rounded(array: F32, dtype: torch.dtype) -> F32:
    return torch.from_numpy(array).to(dtype).float().numpy()


@every_case
@folded(counted=[False, True])
def test_what_low_precision_gossip_sends(target: Target, case: Case, counted: bool) -> None:
    block = case.codec.block
    x, own, total = vectors(N, 3)
    total[N - 1], x[5] = np.nan, np.inf
    counts = np.array([block - 3] + [block] * ((N - 1) // block), np.int32) if counted else None
    here = None if counts is None else torch.from_numpy(counts).to(target.device)
    mine, replica, sums = on(target, x, own, total)
    payload = case.codec.encode_rule(DCD_TOTAL, [mine, replica, sums], seed=SEED, counts=here)
    expected, moved = oracle.dcd(case.spec, x, own, total, SEED, counts)
    belongs = oracle.own(case.spec, N, counts)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert same(replica, moved)
    assert same(mine, np.where(belongs, moved, x))
    assert same(sums, total)


@every_case
def test_what_choco_sends_and_makes_of_it(target: Target, case: Case) -> None:
    x, own, total = vectors(N, 3)
    mine, replica, sums = on(target, x, own, total)
    payloads = torch.empty((3, case.codec.payload_size(N)), dtype=torch.uint8, device=target.device)
    payloads[1:] = payloads_of(case.codec, N, 2, target)
    case.codec.encode_rule(CHOCO, [mine, replica], [0.75], seed=SEED, out=payloads[0])
    expected, moved = oracle.choco(case.spec, x, own, 0.75, SEED)
    assert np.array_equal(payloads[0].cpu().numpy(), expected)
    assert same(replica, moved)
    assert same(mine, x)
    case.codec.decode_apply(payloads, ADDED, [sums], weights=WEIGHTS[:3])
    total = total + oracle.weighted_sum(decoded(case, payloads, N), WEIGHTS)
    assert same(sums, total)
    elementwise.apply(TOWARDS, [mine, sums], [0.6])
    assert same(mine, x + total * np.float32(0.6))
    assert same(replica, moved)


@pytest.mark.slow
@every_case
@folded(counted__weights=[(False, THIRDS), (True, WEIGHTS[:3])] if EMULATED else MIXTURES)
def test_low_precision_gossip_with_a_replica_of_each_neighbour(
    target: Target, case: Case, counted: bool, weights: tuple[float, ...]
) -> None:
    """Two passes make of all replicas and the parameter what the formulas do; the rank's own replica is the second row."""
    block = case.codec.block
    x, *others = vectors(N, 4)
    counts = np.array([block] * ((N - 1) // block) + [1], np.int32) if counted else None
    here = None if counts is None else torch.from_numpy(counts).to(target.device)
    belongs = oracle.own(case.spec, N, counts)
    mine, rows = on(target, x, np.stack(others))
    payloads = torch.empty((3, case.codec.payload_size(N)), dtype=torch.uint8, device=target.device)
    payloads[::2] = payloads_of(case.codec, N, 2, target)
    options = {"counts": here, "replicas": rows, "weights": weights}
    case.codec.encode_rule(DCD, [mine, rows[1]], seed=SEED, out=payloads[1], **options)
    expected, moved = oracle.dcd(case.spec, x, others[1], oracle.weighted_sum(others, weights), SEED, counts)
    assert np.array_equal(payloads[1].cpu().numpy(), expected)
    assert same(mine, np.where(belongs, moved, x))
    total = torch.zeros(N, device=target.device)
    case.codec.decode_apply(payloads, ADDED, [total], **options)
    for row, before, change in zip(rows, others, decoded(case, payloads, N), strict=True):
        assert same(row, np.where(belongs, before + change, before))
    assert same(
        total, np.where(belongs, oracle.weighted_sum(decoded(case, payloads, N), weights), 0).astype(np.float32)
    )
    assert torch.equal(rows[1][torch.from_numpy(belongs)], mine[torch.from_numpy(belongs)])
    (again,) = on(target, np.stack(others))
    assert case.codec.decode_add(payloads, again, counts=here) is again
    assert torch.equal(again, rows)


@grid(case=only(ALL, ALL[0]), ranks=[3] if EMULATED else only([1, 3, 4, 5], 5), cover=1)
def test_weights_and_replicas(target: Target, case: Case, ranks: int) -> None:
    """The CPU takes four payloads at a time and then one."""
    payloads = payloads_of(case.codec, N, ranks, target)
    terms = decoded(case, payloads, N)
    change = oracle.weighted_sum(terms, WEIGHTS, 0.5)
    weights = torch.tensor(WEIGHTS[:ranks], device=target.device)
    summed = case.codec.decode_sum(payloads, torch.empty(N, device=target.device), 0.5, weights=weights)
    assert same(summed, change)
    if ranks == 3:
        mean = case.codec.decode_sum(payloads, torch.empty(N, device=target.device), weights=[1 / 3] * 3)
        assert same(mean, oracle.weighted_sum(terms, [1 / 3] * 3))
    total, *replicas = vectors(N, ranks + 1)
    sums, rows = on(target, total, np.stack(replicas))
    case.codec.decode_apply(payloads, ADDED, [sums], scale=0.5, weights=WEIGHTS[:ranks], replicas=rows)
    assert same(sums, total + change)
    for row, replica, term in zip(rows, replicas, terms, strict=True):
        assert same(row, replica + term)


def all_at_once(own, change, total, x, first, second):
    """Moves a replica by the first payload and the total by all; the parameter becomes the replica, less the second payload."""
    own = own + first
    return own, total + change, own - second


ALL_AT_ONCE = ElementwiseRule("all_at_once", all_at_once, arrays=6, writes=(0, 2, 3))


@grid(
    codec=only([AbsMaxInt8(), AbsMaxInt4(), Sign(64, two_means=True)], AbsMaxInt4()),
    dtype=only(DTYPES, torch.bfloat16),
    cover=1,
)
@folded(counted=[True] if EMULATED else [False, True])
def test_single_payloads_beside_their_sum(target: Target, codec: BlockCodec, dtype: torch.dtype, counted: bool) -> None:
    payloads = payloads_of(codec, N, 3, target)
    own, total, x = on(target, *vectors(N, 3))
    x = x.to(dtype)
    counts = torch.full((-(-N // codec.block),), codec.block - 1, dtype=torch.int32, device=target.device)
    arrays = [own.clone(), total.clone(), x.clone()]
    here = counts if counted else None
    codec.decode_apply(payloads, ALL_AT_ONCE, arrays, weights=WEIGHTS[:3], each=(4, 5), counts=here)
    singles = [codec.decode(payload, torch.empty_like(own)) for payload in payloads[:2]]
    change = codec.decode_sum(payloads, torch.empty_like(own), weights=WEIGHTS[:3])
    expected = [own.clone(), total.clone(), x.clone()]
    elementwise.apply(ALL_AT_ONCE, (expected[0], change, *expected[1:], *singles), ())
    outside = (torch.arange(N, device=target.device) % codec.block == codec.block - 1) & counted
    for got, want, before in zip(arrays, expected, (own, total, x), strict=True):
        assert torch.equal(got, torch.where(outside, before, want))


def stepped(p, g, own, lr, weight_decay):
    """Gradient descent."""
    return p - lr * (g + weight_decay * p)


def step_difference(p, g, own, lr, weight_decay):
    """The difference after the step."""
    return p - own


def step_moved(sent, p, g, own, lr, weight_decay):
    """The replica after the message."""
    return own + sent


@pytest.mark.slow
@grid(dtype=DTYPES, codec={"8 bits": MinMaxUInt8(stochastic=True), "1 bit": Sign()}, cover=1)
def test_arrays_written_before_are_read_as_they_are_stored(
    target: Target, codec: BlockCodec, dtype: torch.dtype
) -> None:
    step = MessageRule("step", step_difference, 3, stepped, (0,), step_moved, (2,))
    plain = ElementwiseRule("step", stepped, arrays=3, writes=(0,))
    values, own = vectors(N, 2)
    x = torch.from_numpy(values).to(dtype).to(target.device)
    g, replica = on(target, make("gaussian", N, 1.0, 5), own)
    counts = torch.full((-(-N // codec.block),), codec.block, dtype=torch.int32, device=target.device)
    counts[0] = 7
    for here in (counts,) if EMULATED else (None, counts):
        y, moved, y_expected, moved_expected = x.clone(), replica.clone(), x.clone(), replica.clone()
        payload = codec.encode_rule(step, [y, g, moved], [0.1, 0.01], seed=SEED, counts=here)
        elementwise.apply(plain, (y_expected, g, replica), (0.1, 0.01))
        belongs = torch.ones(N, dtype=torch.bool, device=target.device)
        if here is not None:
            belongs[7 : codec.block] = False
            y_expected = torch.where(belongs, y_expected, x)
        difference = y_expected.float() - replica
        assert torch.equal(payload, codec.encode(difference, seed=SEED, counts=here))
        moved_expected += codec.decode(payload, torch.empty_like(moved_expected))
        assert torch.equal(y, y_expected)
        assert torch.equal(moved, torch.where(belongs, moved_expected, replica))


@pytest.mark.slow
@grid(dtype=DTYPES[1:], case=[ALL[0], ALL[3]], cover=1)
def test_half_precision_beside_float32(target: Target, dtype: torch.dtype, case: Case) -> None:
    """Replicas are float32 whatever the parameter's dtype: the parameter is their rounded value."""
    x, own, total = vectors(N, 3)
    mine, replica, sums = on(target, x, own, total)
    mine = mine.to(dtype)
    payload = case.codec.encode_rule(DCD_TOTAL, [mine, replica, sums], seed=SEED)
    expected, moved = oracle.dcd(case.spec, rounded(x, dtype), own, total, SEED)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert same(replica, moved)
    assert same(mine.float(), rounded(moved, dtype))


@pytest.mark.skipif(EMULATED, reason="takes hours here")
@pytest.mark.parametrize("case", only([ALL[0], ALL[9]], ALL[0]), ids=str)
def test_on_several_threads(target: Target, case: Case) -> None:
    n = 150_001
    x, own, total = vectors(n, 3)
    mine, replica, sums = on(target, x, own, total)
    payload = case.codec.encode_rule(DCD_TOTAL, [mine, replica, sums], seed=SEED)
    expected, moved = oracle.dcd(case.spec, x, own, total, SEED)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert same(mine, moved)
    replicas = torch.stack([replica, sums])
    both = torch.stack([payload, payload])
    case.codec.decode_apply(both, ADDED, [sums], weights=(0.25, 0.5), replicas=replicas)
    assert same(sums, total + oracle.weighted_sum(decoded(case, both, n), (0.25, 0.5)))
    assert same(replicas[1], total + blocks.decode(case.spec, expected, n))


def test_wrong_arguments() -> None:
    codec, n = AbsMaxInt8(), 300
    x, own, total = (torch.ones(n) for _ in range(3))
    payloads = codec.encode(x)[None]
    for arrays, scalars, message in (
        ([x, own], [], "takes 3 arrays, got 2"),
        ([], [], "takes 3 arrays, got none"),
        ([x, own, total], [1.0], "takes 0 scalars, got 1"),
        ([x, own, total[:-1]], [], r"array 2 must have shape \(300,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.encode_rule(DCD, arrays, scalars)
    with pytest.raises(TypeError, match="array 1 must be of dtype float32"):
        codec.encode_rule(DCD, [x, own.double(), total])
    with pytest.raises(ValueError, match="takes 3 arrays, of which one is the sum of the replicas, and 2 more, got 3"):
        codec.encode_rule(DCD, [x, own, total], replicas=torch.zeros(2, n))
    with pytest.raises(ValueError, match="writes its last array"):
        codec.encode_rule(CHOCO, [x], [1.0], replicas=torch.zeros(2, n))
    with pytest.raises(ValueError, match="got them without replicas"):
        codec.encode_rule(DCD, [x, own, total], weights=[1.0])
    with pytest.raises(ValueError, match=r"replicas must be contiguous float32 of shape \(ranks, 300\)"):
        codec.encode_rule(DCD, [x, own], replicas=torch.zeros(2, n + 1))
    with pytest.raises(ValueError, match="own scales"):
        TernGrad(shared=True).encode_rule(DCD, [x, own, total])
    for weights in ([0.5, 0.5], torch.ones(2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"weights must be contiguous float32 of shape \(1,\)"):
            codec.decode_sum(payloads, x, weights=weights)
    for replicas in (torch.zeros(2, n), torch.zeros(1, n, dtype=torch.bfloat16), torch.zeros(n)):
        with pytest.raises(ValueError, match=r"replicas must be contiguous float32 of shape \(1, 300\)"):
            codec.decode_apply(payloads, ADDED, [total], replicas=replicas)
    for each, message in (((1,), "different arrays"), ((0,), "only read"), ((4,), "different arrays")):
        with pytest.raises(ValueError, match=message):
            codec.decode_apply(payloads, PLAIN_SGD, [x], [0.1, 0.0], each=each)
    with pytest.raises(ValueError, match="gets 2 single payloads, got 1"):
        codec.decode_apply(payloads, ALL_AT_ONCE, [own, total, x], each=(4, 5))
    with pytest.raises(ValueError, match="takes 3 arrays beside the 3 that are decoded, got 2"):
        codec.decode_apply(payloads, ALL_AT_ONCE, [own, total], each=(4, 5))


def test_rules_that_do_not_fit_together() -> None:
    for wrong in (
        lambda: MessageRule("wrong", step_difference, 3, stepped),
        lambda: MessageRule("wrong", step_difference, 3, after_writes=(0,)),
        lambda: MessageRule("wrong", step_difference, 3, stepped, (3,)),
        lambda: MessageRule("wrong", step_difference, 3, stepped, (1, 0)),
    ):
        with pytest.raises(ValueError, match="must be ascending positions below 3"):
            wrong()
    with pytest.raises(ValueError, match="the same scalars"):
        MessageRule("wrong", step_difference, 3, after=step_difference, after_writes=(0,))


OTHERS = ["identity", "cast", "terngrad:shared=true", "topk:ratio=0.1", "threshold_topk:ratio=0.1", "randomk:ratio=0.1"]


@pytest.mark.parametrize("spec", OTHERS)
def test_codecs_that_are_not_fused_do_the_same_in_steps(spec: str) -> None:
    codec = from_spec(spec)
    assert not is_fused(codec)
    x, own, total, *rest = (torch.from_numpy(v) for v in vectors(N, 5))
    mine, replica, sums = x.clone(), own.clone(), total.clone()
    payload = encode_rule(codec, DCD_TOTAL, [mine, replica, sums], seed=SEED)
    difference = (total + x) - 2 * own
    assert torch.equal(payload, codec.encode(difference, seed=SEED))
    moved = own + codec.decode(payload, torch.empty_like(x))
    assert torch.equal(replica, moved)
    assert torch.equal(mine, moved)
    payloads = torch.stack([payload, *(codec.encode(v, seed=SEED) for v in rest)])
    replicas = torch.stack([own, total, x])
    arrays = [own.clone(), total.clone(), x.clone()]
    decode_apply(codec, payloads, ALL_AT_ONCE, arrays, weights=WEIGHTS[:3], scale=0.5, replicas=replicas, each=(4, 5))
    terms = [codec.decode(one, torch.empty_like(x)) for one in payloads]
    change = torch.from_numpy(oracle.weighted_sum([term.numpy() for term in terms], WEIGHTS, 0.5))
    assert torch.equal(arrays[0], own + terms[0])
    assert torch.equal(arrays[1], total + change)
    assert torch.equal(arrays[2], own + terms[0] - terms[1])
    for before, after, term in zip((own, total, x), replicas, terms, strict=True):
        assert torch.equal(after, before + term)
    rows = torch.stack([own, total, x])
    assert torch.equal(decode_add(codec, payloads, rows.clone()), replicas)
    payload = encode_rule(codec, DCD, [x.clone(), own], seed=SEED, replicas=rows, weights=[1 / 3] * 3)
    mean = torch.from_numpy(oracle.weighted_sum(list(rows.numpy()), [1 / 3] * 3))
    assert torch.equal(payload, codec.encode((mean + x) - 2 * own, seed=SEED))


@pytest.mark.slow
def test_steps_are_those_of_one_pass() -> None:
    """The steps of other codecs, taken with a block codec, give the bits of its one pass, stage before included."""
    codec = MinMaxUInt8(stochastic=True)
    assert is_fused(codec)
    rule = MessageRule("step", step_difference, 3, stepped, (0,), step_moved, (2,))
    x, own, g = (torch.from_numpy(v).bfloat16() for v in vectors(N, 3))
    arrays = [x, g.float(), own.float()]
    fused, steps = ([a.clone() for a in arrays] for _ in range(2))
    payload = encode_rule(codec, rule, fused, [0.1, 0.01], seed=SEED)
    before, value, after = stages(rule)
    assert before is not None
    assert after is not None
    elementwise.apply(before, steps, [0.1, 0.01])
    sent = torch.empty(N)
    elementwise.apply(value, [sent, *steps], [0.1, 0.01])
    expected = codec.encode(sent, seed=SEED)
    elementwise.apply(after, [codec.decode(expected, sent), *steps], [0.1, 0.01])
    assert torch.equal(payload, expected)
    for got, want in zip(fused, steps, strict=True):
        assert torch.equal(got, want)
