"""Nodes, and all-reduce over them: exact for unequal nodes, the same bits on every rank, every rank at work."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce
from bagua_kernels.comm.hierarchical.nodes import Nodes, Place
from bagua_kernels.compression import Codec, MinMaxUInt8, from_spec
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.grids import grid

LAYOUTS = [
    [[0], [1]],
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 1], [2, 3, 4]],
    [[0], [1, 2, 3]],
    [[0, 1, 2], [3], [4, 5]],
    [[0, 1, 2]],
    [[0]],
]
SIZES = [0, 1, 5, 257, 10_007]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
VARIABLES = ("BAGUA_KERNELS_NODE", "GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE")


@functools.cache
def inputs(ranks: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Small whole numbers for an integer dtype, normal values for others."""
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point:
        return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]
    return [torch.randint(-9, 10, (n,), generator=generator).to(dtype) for _ in range(ranks)]


def ranks_of(layout: list[list[int]]) -> int:
    return sum(map(len, layout))


def reduced(layout: list[list[int]], values: list[torch.Tensor], seed: int = 0, **arguments: Any) -> torch.Tensor:
    """Reduces on all ranks, twice with one object; checks that all results are the same bits, and returns them."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        x = values[communicator.rank]
        results = []
        with HierarchicalAllReduce(
            communicator, x.numel(), x.dtype, nodes=Nodes.given(layout), **arguments
        ) as all_reduce:
            for _ in range(2):
                results.append(x.clone())
                all_reduce(results[-1], seed=seed)
        return results

    results = [result for results in run_ranks(len(values), rank) for result in results]
    for result in results[1:]:
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))
    return results[0]


def tolerance(values: list[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each addition, and a division before or after, rounds once, by eps / 2 of a partial sum."""
    magnitudes = np.sum([np.abs(x.double().numpy()) for x in values], axis=0)
    return np.asarray((len(values) + 1) * torch.finfo(values[0].dtype).eps / 2 * magnitudes)


@grid(layout=LAYOUTS, dtype=[*FLOATS, torch.int64], pieces=[None, 3], cover=1)
def test_sum(layout: list[list[int]], dtype: torch.dtype, pieces: int | None) -> None:
    for n in SIZES:
        values = inputs(ranks_of(layout), n, dtype)
        result = reduced(layout, values, pieces=pieces)
        expected = np.sum([x.double().numpy() for x in values], axis=0)
        difference = np.abs(result.double().numpy() - expected)
        assert np.all(difference <= (tolerance(values) if dtype.is_floating_point else 0))


@grid(layout=LAYOUTS, dtype=FLOATS, cover=1)
def test_mean_is_that_of_ranks_and_not_of_nodes(layout: list[list[int]], dtype: torch.dtype) -> None:
    for n in SIZES:
        values = inputs(ranks_of(layout), n, dtype)
        result = reduced(layout, values, op=ReduceOp.AVG, pieces=2)
        expected = np.mean([x.double().numpy() for x in values], axis=0)
        assert np.all(np.abs(result.double().numpy() - expected) <= tolerance(values) / len(values) * 2)


@grid(layout=LAYOUTS, codec=[None, MinMaxUInt8(64)], cover=1)
def test_mean_of_large_half_precision_values_does_not_overflow(layout: list[list[int]], codec: Codec | None) -> None:
    values = [torch.full((300,), 60_000.0, dtype=torch.float16)] * ranks_of(layout)
    result = reduced(layout, values, op=ReduceOp.AVG, codec=codec)
    assert torch.all((result.double() - 60_000).abs() <= 6 * 32)


@grid(
    layout=LAYOUTS,
    op__dtype=[
        (ReduceOp.MIN, torch.float32),
        (ReduceOp.MAX, torch.bfloat16),
        (ReduceOp.PRODUCT, torch.int64),
        (ReduceOp.BXOR, torch.int32),
        (ReduceOp.SUM, torch.bool),
    ],
    cover=1,
)
def test_other_reductions_are_those_of_one_tier(layout: list[list[int]], op: ReduceOp, dtype: torch.dtype) -> None:
    values = inputs(ranks_of(layout), 257, dtype)

    def flat(communicator: Communicator) -> torch.Tensor:
        x = values[communicator.rank].clone()
        communicator.all_reduce(x, op).wait()
        return x

    assert torch.equal(reduced(layout, values, op=op), run_ranks(len(values), flat)[0])


@grid(layout=LAYOUTS, dtype=[torch.float32, torch.float16, torch.bfloat16], op=[ReduceOp.AVG, ReduceOp.SUM], cover=1)
def test_compressed_is_within_the_codecs_error(layout: list[list[int]], dtype: torch.dtype, op: ReduceOp) -> None:
    ranks, nodes = ranks_of(layout), len(layout)
    for n in SIZES:
        values = inputs(ranks, n, dtype)
        result = reduced(layout, values, op=op, codec=MinMaxUInt8(64), pieces=2)
        exact = [x.double().numpy() for x in values]
        scale = ranks if op is ReduceOp.AVG else 1
        # Both passes round to half a level: of each node's sum, and of the sum of all, which lies within their ranges.
        spans = [np.ptp(np.sum([exact[r] for r in node], axis=0)) if n else 0.0 for node in layout]
        bound = sum(spans) / 255 * 1.05 / scale if nodes > 1 else 0.0
        largest = max((float(np.abs(x).max()) for x in exact if n), default=0.0)
        rounding = 4 * torch.finfo(dtype).eps * ranks * largest / scale * ranks
        assert np.all(np.abs(result.double().numpy() - np.sum(exact, axis=0) / scale) <= bound + rounding)


@pytest.mark.parametrize("spec", ["identity", "cast", "randomk", "topk:ratio=0.1", "qsgd", "sign"])
def test_every_codec_gives_all_ranks_the_same_bits(spec: str) -> None:
    codec = from_spec(spec)
    values = inputs(5, 1009, torch.float32)
    result = reduced([[0, 1], [2, 3, 4]], values, op=ReduceOp.AVG, codec=codec, seed=3)
    mean = torch.stack(values).double().mean(0)
    if spec == "identity":
        assert np.all((result - mean).abs().numpy() <= tolerance(values))
    elif codec.linear is False or spec == "cast":
        assert torch.dot(result.double(), mean) > 0.25 * torch.dot(mean, mean)


def test_stochastic_rounding_follows_the_seed() -> None:
    layout = [[0, 1], [2, 3, 4]]
    values = inputs(5, 10_007, torch.float32)
    reduce = functools.partial(reduced, layout, values, op=ReduceOp.AVG, codec=MinMaxUInt8(64, True), pieces=3)
    first = reduce(seed=1)
    assert torch.equal(first, reduce(seed=1))
    assert not torch.equal(first, reduce(seed=2))


@grid(layout=LAYOUTS, n=[12_000, 10_007], cover=1)
def test_every_rank_carries_its_share_between_nodes(layout: list[list[int]], n: int) -> None:
    def rank(communicator: Communicator) -> tuple[int, int]:
        all_reduce = HierarchicalAllReduce(communicator, n, torch.float32, nodes=Nodes.given(layout))
        all_reduce(torch.ones(n))
        assert len(layout) == 1 or all_reduce.tiers.owners
        return len(all_reduce.tiers.owners), all_reduce.bytes_across

    sent = run_ranks(ranks_of(layout), rank)
    nodes, shards = len(layout), max(map(len, layout))
    # Shards begin at multiples of 16 bytes.
    shard = 2 * (nodes - 1) / nodes * (n * 4 / shards)
    for node in layout:
        assert sum(sent[r][1] for r in node) == pytest.approx(2 * (nodes - 1) / nodes * n * 4, abs=shards)
        for owned, share in (sent[r] for r in node):
            assert share == pytest.approx(owned * shard, abs=2 * 16 * shards)
        counts = [sent[r][0] for r in node]
        assert nodes == 1 or (sum(counts) == shards and max(counts) - min(counts) <= 1)


def test_compression_saves_bytes_between_nodes_only() -> None:
    n = 64 * 1000

    def rank(communicator: Communicator, codec: Codec | None) -> tuple[int, int]:
        nodes = Nodes.given([[0, 1], [2, 3]])
        all_reduce = HierarchicalAllReduce(communicator, n, torch.float32, nodes=nodes, codec=codec)
        all_reduce(torch.ones(n))
        return all_reduce.tiers.bytes_sent - all_reduce.bytes_across, all_reduce.bytes_across

    plain, compressed = (run_ranks(4, rank, codec) for codec in (None, MinMaxUInt8(256)))
    for (within, across), (same, less) in zip(plain, compressed, strict=True):
        assert within == pytest.approx(same, rel=0.01)
        assert 3.5 < across / less < 4


def test_close_and_abort_are_final() -> None:
    def rank(communicator: Communicator) -> None:
        all_reduce = HierarchicalAllReduce(communicator, 8, torch.float32, nodes=Nodes.given([[0, 1], [2]]))
        all_reduce.close()
        all_reduce.close()
        with pytest.raises(CommunicationError, match="closed"):
            all_reduce(torch.ones(8))
        communicator.barrier().wait()

    run_ranks(3, rank)


def test_a_lost_rank_ends_the_others() -> None:
    """None waits for its timeout, also those that share no communicator with it."""
    others_know = threading.Barrier(3)

    def rank(communicator: Communicator) -> str:
        nodes = Nodes.given([[0, 1], [2, 3]])
        all_reduce = HierarchicalAllReduce(communicator, 800, torch.float32, nodes=nodes)
        if communicator.rank == 3:
            return ""
        with pytest.raises(CommunicationError) as caught:
            all_reduce(torch.ones(800))
        others_know.wait(limits.seconds(10))
        return str(caught.value.__notes__)

    notes = run_ranks(4, rank, timeout=limits.seconds(30))
    assert "ranks of this node: [0, 1]; owners of the shards of this rank: [[0, 2]]" in notes[0]


def together(size: int, call: Callable[[Communicator], object]) -> list[str]:
    """Runs a call that fails with `ValueError` on every rank, and returns the messages."""

    def rank(communicator: Communicator) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            call(communicator)
        return str(caught.value)

    return run_ranks(size, rank)


def test_disagreement_is_named_on_every_rank() -> None:
    def other_nodes(communicator: Communicator) -> None:
        nodes = Nodes.given([[0, 1], [2, 3]] if communicator.rank != 2 else [[0], [1, 2, 3]])
        HierarchicalAllReduce(communicator, 8, torch.float32, nodes=nodes)

    def some_find(communicator: Communicator) -> None:
        nodes = None if communicator.rank == 3 else Nodes.given([[0, 1], [2, 3]])
        HierarchicalAllReduce(communicator, 8, torch.float32, nodes=nodes)

    def other_length(communicator: Communicator) -> None:
        nodes = Nodes.given([[0, 1], [2, 3]])
        HierarchicalAllReduce(communicator, 9 if communicator.rank == 0 else 8, torch.float32, nodes=nodes)

    for message in together(4, other_nodes):
        assert "ranks [2] were given other nodes than ranks [0, 1, 3]" in message
    for message in together(4, some_find):
        assert "ranks [3] look for their nodes where ranks [0, 1, 2] are given nodes" in message
    for message in together(4, other_length):
        assert "ranks [0] were given other arguments than ranks [1, 2, 3]" in message
    for message in together(3, Nodes.given([[0, 1], [2, 3]]).agree):
        assert "expected the nodes of 3 ranks, got those of 4" in message


def test_wrong_arguments() -> None:
    def rank(communicator: Communicator, dtype: torch.dtype = torch.float32, **arguments: Any) -> HierarchicalAllReduce:
        return HierarchicalAllReduce(communicator, 8, dtype, nodes=Nodes.given([[0], [1]]), **arguments)

    for error, text, arguments in (
        (TypeError, "floating-point", {"dtype": torch.int64, "op": ReduceOp.AVG}),
        (TypeError, "got torch.float64", {"dtype": torch.float64, "codec": MinMaxUInt8()}),
        (ValueError, "got ReduceOp.MAX", {"codec": MinMaxUInt8(), "op": ReduceOp.MAX}),
        (ValueError, "pieces=0", {"pieces": 0}),
    ):
        with pytest.raises(error, match=re.escape(text)):
            run_ranks(2, functools.partial(rank, **arguments))
    for error, text, x in (
        (TypeError, "got torch.float64", torch.ones(8, dtype=torch.float64)),
        (ValueError, "got shape (7,)", torch.ones(7)),
        (ValueError, "strides (2,)", torch.ones(16)[::2]),
    ):
        with pytest.raises(error, match=re.escape(text)):
            run_ranks(2, lambda communicator, x=x: rank(communicator)(x))


def test_given_nodes_are_sorted_and_checked() -> None:
    nodes = Nodes.given([[3, 1], (2, 0)])
    assert nodes.members == ((0, 2), (1, 3))
    assert (nodes.size, nodes.largest, nodes.node_of(3)) == (4, 2, 1)
    assert nodes == Nodes.given([[0, 2], [1, 3]])
    for wrong, text in (
        ([[0, 1], [1, 2]], "twice: [1]"),
        ([[0], [2]], "missing: [1]"),
        ([[0, 1], []], "no empty node"),
        ([[-1, 0]], "every rank from 0 upwards"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            Nodes.given(wrong)
    with pytest.raises(TypeError, match="True"):
        Nodes.given([[0, True]])
    with pytest.raises(ValueError, match=r"Nodes\.given"):
        Nodes(((1,), (0,)))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets some of the variables that name a node, and no others."""

    def set_variables(**variables: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_variables()
    return set_variables


def test_environment_names_the_node(environment: Callable[..., None]) -> None:
    here = Place.here()
    assert here.source == "the host"
    assert here == Place.here()
    environment(NODE_RANK="2")
    assert Place.here() == Place("NODE_RANK", "2")
    environment(NODE_RANK="2", GROUP_RANK="01", LOCAL_WORLD_SIZE="8")
    assert Place.here() == Place("GROUP_RANK", "1", 8)
    environment(BAGUA_KERNELS_NODE="rack 3", GROUP_RANK="1")
    assert Place.here() == Place("BAGUA_KERNELS_NODE", "rack 3")
    environment(GROUP_RANK="-1")
    with pytest.raises(ValueError, match="GROUP_RANK='-1' cannot be used: expected a whole number >= 0"):
        Place.here()


def test_threads_share_a_host(environment: Callable[..., None]) -> None:
    nodes = Nodes.given([[0, 1, 2]])
    assert run_ranks(3, Nodes.find) == [nodes] * 3
    assert run_ranks(3, lambda communicator: HierarchicalAllReduce(communicator, 8, torch.int8).nodes) == [nodes] * 3


def find(places: list[Place | None]) -> Callable[[Communicator], Nodes]:
    return lambda communicator: Nodes.find(communicator, places[communicator.rank])


def test_nodes_are_found_from_places(environment: Callable[..., None]) -> None:
    places: list[Place | None] = [Place("the host", name) for name in ("b", "a", "b", "c")]
    assert run_ranks(4, find(places)) == [Nodes.given([[0, 2], [1], [3]])] * 4


def test_places_that_make_no_sense_are_named_on_every_rank(environment: Callable[..., None]) -> None:
    group = [Place("GROUP_RANK", "0", 2) for _ in range(3)]
    for message in together(3, find([*group])):
        assert "ranks [0, 1, 2] all have GROUP_RANK=0, but LOCAL_WORLD_SIZE=2" in message
    for message in together(3, find([group[0], Place("the host", "a"), group[0]])):
        assert "ranks [0, 2] by GROUP_RANK, ranks [1] by the host" in message
    environment(NODE_RANK="first")
    for message in together(3, find([group[0], None, group[0]])):
        assert "rank 1: NODE_RANK='first' cannot be used" in message


def test_cut_covers_the_vector_in_equal_shards() -> None:
    for n in (*SIZES, 4096):
        for members in ([[0, 1, 2]], [[0], [1, 2]]):
            nodes = Nodes.given(members)
            for pieces in (0, 1, 7):
                cut = nodes.cut(n, 64, pieces)
                shards = [shard for piece in cut for shard in piece]
                assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
                assert 1 <= len(cut) <= max(1, pieces)
                assert all(len(piece) == nodes.largest for piece in cut)
                assert all(shard.start % 64 == 0 or shard.start == n for shard in shards)
                assert len({shard.stop - shard.start for piece in cut[:-1] for shard in piece}) <= 2


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hierarchical.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "hierarchical.md", "exec"), {})
