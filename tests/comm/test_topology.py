"""Mixing matrices against published numbers, and gossip among ranks as threads against NumPy in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.topology import (
    Complete,
    GivenMatrix,
    Graph,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    StaticExponential,
    Topology,
    Torus,
    neighbour_average,
)
from tests.grids import folded, grid


def drifting(size: int) -> GivenMatrix:
    """Columns sum to 1, rows do not, ranks hear from different numbers of others and rank 1 forgets itself."""
    w = np.random.default_rng(size).uniform(0.1, 1, (size, size)) * np.tri(size, k=1)
    w[0, -1] = 1
    w[1 % size, 1 % size] *= size == 1
    return GivenMatrix(size, w / w.sum(axis=0))


SOUND: dict[str, Callable[[int], Topology]] = {
    "complete": Complete,
    "ring": Ring,
    "torus": Torus,
    "static": StaticExponential,
    "one-peer": OnePeerExponential,
    "shift-one": ShiftOne,
    "matching": lambda size: RandomMatching(size, 3),
    "star": lambda size: Graph(size, [(0, rank) for rank in range(1, size)]),
    "given": lambda size: GivenMatrix(size, (np.eye(size) + Ring(size).matrix()) / 2),
}
DIRECTED = ("static", "one-peer")
sound = grid(cover=1, name=list(SOUND))
sizes = grid(cover=1, size=range(1, 18))


def product(topology: Topology, first: int, steps: int) -> np.ndarray:
    total = np.eye(topology.size)
    for step in range(first, first + steps):
        total = topology.matrix(step) @ total
    return total


def spread(x: np.ndarray) -> float:
    return x.shape[0] * float(x.var(axis=0).sum())


def raised(size: int, fn: Callable[[Communicator], object]) -> str:
    """The text of the ValueError that all ranks get alike, or nothing."""

    def attempt(communicator: Communicator) -> str:
        try:
            fn(communicator)
        except ValueError as error:
            return str(error)
        return ""

    (text,) = set(run_ranks(size, attempt))
    return text


@grid(
    cover=1,
    topology__rho=[
        *[(Complete(size), 0.0) for size in (4, 8, 16)],
        *[(Ring(size), rho) for size, rho in ((2, 0.0), (4, 0.333), (8, 0.805), (16, 0.949))],
        *[(StaticExponential(size), rho) for size, rho in ((4, 0.333), (8, 0.5), (16, 0.6))],
        *[(OnePeerExponential(size), 0.0) for size in (4, 8, 16)],
        (Torus(16), 0.6),
        (Torus(16, columns=2), (1 + 2 * np.sqrt(0.5) + 1) / 4),
    ],
)
def test_rho_is_the_published_one(topology: Topology, rho: float) -> None:
    assert topology.rho() == pytest.approx(rho, abs=6e-4)
    assert topology.spectral_gap() == pytest.approx(1 - rho, abs=6e-4)


@sizes
def test_static_exponential_has_its_closed_form(size: int) -> None:
    m = int(np.ceil(np.log2(size)))
    closed = (m - 1) / (m + 1) if m else 0.0
    rho = StaticExponential(size).rho()
    assert rho <= closed + 1e-12
    assert size % 2 or rho == pytest.approx(closed, abs=1e-12)


@sound
@folded(size=range(1, 18))
def test_matrices_are_stochastic_and_connected(name: str, size: int) -> None:
    topology = SOUND[name](size)
    for step in range(2 * topology.window + 1):
        w = topology.matrix(step)
        assert (w.shape, w.dtype) == ((size, size), np.float64)
        assert (w >= 0).all()
        np.testing.assert_allclose(w.sum(axis=0), 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(w.sum(axis=1), 1, rtol=0, atol=1e-12)
        if topology.period:
            np.testing.assert_array_equal(w, topology.matrix(step + topology.period))
    assert (topology.doubly_stochastic, topology.mixes) == (True, True)
    assert topology.symmetric == (name not in DIRECTED or size < (4 if name == "static" else 3))
    assert topology.rho() < 1 - 1e-6


@sound
@folded(size=[1, 2, 5, 12])
def test_neighbours_and_weights_are_those_of_the_matrix(name: str, size: int) -> None:
    topology = SOUND[name](size)
    for step in range(3):
        w, rebuilt = topology.matrix(step), np.zeros((size, size))
        for rank in range(size):
            weights = topology.weights(rank, step)
            assert list(weights) == sorted({rank, *topology.neighbours_in(rank, step)})
            rebuilt[rank, list(weights)] = list(weights.values())
            for peer in topology.neighbours_out(rank, step):
                assert rank in topology.neighbours_in(peer, step)
            assert len(topology.neighbours_out(rank, step)) == np.count_nonzero(np.delete(w[:, rank], rank))
        np.testing.assert_array_equal(rebuilt, w)


@grid(cover=1, name=[name for name in SOUND if name != "matching"], size=[3, 8])
def test_a_period_contracts_by_rho_and_no_more(name: str, size: int) -> None:
    topology = SOUND[name](size)
    m, rho = product(topology, 0, topology.period or 1), topology.rho()
    x = np.random.default_rng(size).standard_normal((size, 50))
    assert spread(m @ x) <= rho**2 * spread(x) * (1 + 1e-9) + 1e-24
    # The power method on M^T M, away from the mean, finds who contracts least.
    centre = np.eye(size) - 1 / size
    slowest = np.linalg.matrix_power(centre @ m.T @ m @ centre, 200) @ x if rho > 1e-9 else centre @ x
    assert spread(m @ slowest) == pytest.approx(rho**2 * spread(slowest), rel=1e-6, abs=1e-24)


def test_links_are_where_they_are_said_to_be() -> None:
    assert StaticExponential(7).neighbours_out(5) == (0, 2, 6)
    assert [OnePeerExponential(6).neighbours_out(5, step) for step in range(4)] == [(0,), (1,), (3,), (0,)]
    assert Torus(12).neighbours_in(0) == (1, 3, 4, 8)
    assert Ring(5).weights(0) == {0: 1 / 3, 1: 1 / 3, 4: 1 / 3}


@grid(cover=1, size=[1, 2, 4, 8, 16])
def test_one_peer_exponential_yields_the_exact_mean(size: int) -> None:
    topology = OnePeerExponential(size)
    steps = int(np.log2(size))
    assert topology.period == max(1, steps)
    for first in range(4):
        np.testing.assert_array_equal(product(topology, first, steps), np.full((size, size), 1 / size))
    assert size < 4 or abs(product(topology, 0, steps - 1) - 1 / size).max() > 0.01
    assert OnePeerExponential(size + 2).rho() > 0.01 or size == 2


@sizes
def test_shift_one_meets_everyone_in_the_other_half_once(size: int) -> None:
    topology, half = ShiftOne(size), (size + 1) // 2
    assert topology.period == half
    met, idle = [], []
    for step in range(half):
        for rank in range(size):
            peers = topology.neighbours_in(rank, step)
            assert peers == topology.neighbours_out(rank, step)
            met += [(rank, peer) for peer in peers if rank < peer]
            idle += [rank] * (not peers)
            if rank < size // 2 and size % 2 == 0:
                assert peers == ((step + rank) % (size // 2) + size // 2,)
    assert sorted(met) == list(itertools.product(range(half), range(half, size)))
    assert sorted(idle) == (list(range(half)) if size % 2 else [])


@sizes
def test_shift_one_knows_without_its_matrices_what_they_show(size: int) -> None:
    """A matrix for each step, as any topology has, gives the same facts."""
    topology = ShiftOne(size)
    every = [topology.matrix(step) for step in range(topology.period)]
    assert topology.doubly_stochastic == all(np.allclose(w.sum(axis), 1) for w in every for axis in (0, 1))
    assert topology.symmetric == all((w == w.T).all() for w in every)
    whole = product(topology, 0, topology.period)
    assert topology.mixes == bool((np.linalg.matrix_power(whole, 2 * size) > 0).all())
    assert topology.rho() == pytest.approx(float(np.linalg.norm(whole - 1 / size, 2)), abs=1e-12)
    for step, w in enumerate(every):
        for rank in range(size):
            assert topology.weights(rank, step) == {int(peer): w[rank, peer] for peer in np.flatnonzero(w[rank])}
            assert {rank, topology._partner(rank, step)} == set(np.flatnonzero(w[rank]).tolist())


def test_shift_one_is_checked_without_all_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand ranks, one matrix is looked at."""
    made = []
    monkeypatch.setattr(ShiftOne, "_matrix", lambda self, step: made.append(step) or uniform_pairs(self.size))
    assert not ShiftOne(1000)._faults(1000, "symmetric")
    assert made == [0]
    assert ShiftOne(1000)._faults(999, "symmetric")


def uniform_pairs(size: int) -> np.ndarray:
    """The matrix of step 0 for an even number of ranks."""
    eye = np.eye(size)
    return (eye + np.roll(eye, size // 2, axis=1)) / 2


@given(size=st.integers(1, 17), seed=st.integers(0, 2**64), step=st.integers(0, 2**40))
def test_random_matching_pairs_all_but_at_most_one(size: int, seed: int, step: int) -> None:
    topology = RandomMatching(size, seed)
    w, peers = topology.matrix(step), [topology.neighbours_in(rank, step) for rank in range(size)]
    assert sorted(map(len, peers)) == [0] * (size % 2) + [1] * (size - size % 2)
    np.testing.assert_array_equal(w, w.T)
    np.testing.assert_array_equal(w @ w, w)
    np.testing.assert_array_equal(w, RandomMatching(size, seed)._matrix(step))


def test_random_matching_depends_on_seed_and_step() -> None:
    seen = {RandomMatching(16, seed).matrix(step).tobytes() for seed in range(8) for step in range(8)}
    assert len(seen) == 64
    # The same in every version of this package, and of those below it.
    pairs = [RandomMatching(7, 11).neighbours_in(rank, 5) for rank in range(7)]
    assert pairs == [(), (2,), (1,), (5,), (6,), (3,), (4,)]


@grid(cover=1, size=[2, 3, 6, 7])
def test_random_matching_contracts_by_rho_on_average(size: int) -> None:
    topology = RandomMatching(size, 1)
    mean = np.mean([w.T @ w for w in map(topology.matrix, range(2000))], axis=0)
    assert np.linalg.eigvalsh(mean - 1 / size)[-1] == pytest.approx(topology.rho() ** 2, abs=0.03)


@given(data=st.data(), size=st.integers(1, 12))
def test_metropolis_weights_fit_every_graph(data: st.DataObject, size: int) -> None:
    possible = list(itertools.combinations(range(size), 2))
    edges = data.draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    topology = Graph(size, edges)
    w = topology.matrix()
    degree = [sum(rank in edge for edge in edges) for rank in range(size)]
    for i, j in itertools.permutations(range(size), 2):
        linked = (min(i, j), max(i, j)) in edges
        assert w[i, j] == (1 / (1 + max(degree[i], degree[j])) if linked else 0)
    np.testing.assert_array_equal(w, w.T)
    np.testing.assert_allclose(w.sum(axis=0), 1, rtol=0, atol=1e-15 * size)
    assert (np.diag(w) > 0).all()
    # A second eigenvalue of 1 and a graph in pieces are the same thing.
    assert topology.mixes == (topology.rho() < 1 - 1e-9)


def test_equal_topologies_are_equal_values() -> None:
    assert Graph(3, [(1, 0), (2, 1), (0, 1)]) == Graph(3, ((0, 1), (1, 2)))
    assert Torus(12) == Torus(12, columns=4) != Torus(12, columns=6)
    assert GivenMatrix(2, np.array([[1.0, -0.0], [0.0, 1.0]])).digest() == GivenMatrix(2, [[1, 0], [0, 1]]).digest()
    assert len({Ring(4), Ring(4), Complete(4), Ring(5), RandomMatching(4, 1), RandomMatching(4, 2)}) == 5
    with pytest.raises(ValueError, match="read-only"):
        Ring(4).matrix()[0, 0] = 1


@grid(
    cover=1,
    make__message=[
        (lambda: Ring(0), "size .*int >= 1, got 0"),
        (lambda: Ring(2.0), "size .*got 2.0"),  # type: ignore[arg-type]
        (lambda: Torus(6, columns=4), "columns to divide self.size=6, got 4"),
        (lambda: Graph(3, [(0, 0)]), r"pairs of different ranks below 3, got \(0, 0\)"),
        (lambda: Graph(3, [(0, 3)]), r"below 3, got \(0, 3\)"),
        (lambda: GivenMatrix(2, [[1.5, -0.5], [0, 1]]), "finite weights >= 0"),
        (lambda: GivenMatrix(2, [[0.5, 0.5]]), r"2 rows of 2 .* shape \(1, 2\)"),
        (lambda: Ring(3).matrix(-1), "step .*int >= 0, got -1"),
        (lambda: Ring(3).weights(3), "rank .*from 0 to 2, got 3"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@sound
@folded(size=[1, 5, 8])
def test_check_accepts_what_is_sound(name: str, size: int) -> None:
    topology, needs = SOUND[name](size), "doubly" if name in DIRECTED else "symmetric"
    assert raised(size, lambda communicator: topology.check(communicator, needs)) == ""


def test_every_rank_learns_who_disagrees() -> None:
    topologies = [RandomMatching(5, 7)] * 2 + [RandomMatching(5, 8), RandomMatching(5, 7), Ring(4)]
    error = raised(5, lambda communicator: topologies[communicator.rank].check(communicator))
    held = ("0 holds RandomMatching(size=5, seed=7)", "2 holds RandomMatching(size=5, seed=8)", "4 holds Ring(size=4)")
    for line in ("ranks [2, 4] hold other topologies than rank 0", *held):
        assert line in error


def test_the_first_difference_of_long_matrices_is_shown() -> None:
    w = np.tile(Complete(16).matrix(), (16, 1, 1))
    w[1, 9, 3] += 2.0**-20
    error = raised(16, lambda communicator: GivenMatrix(16, w[communicator.rank]).check(communicator))
    assert "rank 1 holds …" in error
    assert repr(0.0625 + 2.0**-20) in error
    assert len(error) < 1000


@dataclass(frozen=True)
class Quiet(GivenMatrix):
    rows: Sequence[Sequence[float]] = field(repr=False)


def test_matrices_count_where_texts_agree() -> None:
    near, far = np.eye(3)[[1, 2, 0]], np.eye(3)[[2, 0, 1]]
    mixed = [Quiet(3, w / 2) for w in (np.eye(3) + near, np.eye(3) / 2 + near * 1.5, np.eye(3) + far)]
    error = raised(3, lambda communicator: mixed[communicator.rank].check(communicator))
    assert "ranks [1, 2] hold other topologies" in error


@pytest.mark.parametrize(
    ("topology", "needs", "message"),
    [
        (Ring(4), "doubly", "it is for 4 ranks, and the communicator has 3: make one for 3"),
        (Ring(3), "both", "needs='both' is expected to be one of ('rows', 'columns', 'doubly', 'symmetric')"),
        (Graph(3, [(0, 2)]), "symmetric", "some ranks never hear from others"),
        (GivenMatrix(3, [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]), "rows", "some ranks never hear from others"),
        (drifting(3), "doubly", "in step 0 its rows are expected to be weights >= 0 that sum to 1, got the sum"),
        (drifting(3), "rows", "in step 0 its rows are expected"),
        (GivenMatrix(3, np.transpose(drifting(3).rows)), "columns", "in step 0 its columns are expected"),
        (GivenMatrix(3, [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]), "symmetric", "its matrix is not symmetric"),
    ],
)
def test_every_rank_learns_what_is_wrong(topology: Topology, needs: str, message: str) -> None:
    error = raised(3, lambda communicator: topology.check(communicator, needs))  # type: ignore[arg-type]
    assert message in error


def test_check_asks_for_no_more_than_is_needed() -> None:
    assert raised(4, lambda communicator: drifting(4).check(communicator, "columns")) == ""
    transposed = GivenMatrix(4, np.transpose(drifting(4).rows))
    assert raised(4, lambda communicator: transposed.check(communicator, "rows")) == ""


def gossip(topology: Topology, x: torch.Tensor, steps: int) -> torch.Tensor:
    """What all ranks hold, row by row, after they began with the rows of `x`."""

    def run(communicator: Communicator) -> torch.Tensor:
        mine = x[communicator.rank].clone()
        for step in range(steps):
            neighbour_average(communicator, topology, mine, step)
        return mine

    return torch.stack(run_ranks(topology.size, run))


@grid(cover=1, name=[*SOUND, "drifting"])
@folded(size=[1, 2, 3, 5, 8])
def test_gossip_is_the_matrix_product(name: str, size: int) -> None:
    topology = SOUND.get(name, drifting)(size)
    x = torch.from_numpy(np.random.default_rng(size).standard_normal((size, 3, 67)))
    for dtype, error in ((torch.float64, 1e-15), (torch.float32, 6e-8), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)):
        start = x.to(dtype)
        expected = start.double().numpy().reshape(size, -1)
        for step in range(3):
            expected = topology.matrix(step) @ expected
        found = gossip(topology, start, 3)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        atol = 3 * error * (size + 1) * start.abs().max().item()
        np.testing.assert_allclose(found.double().numpy().reshape(size, -1), expected, rtol=0, atol=atol)


@grid(cover=1, topology=[Ring(8), Torus(6), SOUND["star"](5), StaticExponential(7)])
def test_gossip_contracts_by_rho_and_keeps_the_mean(topology: Topology) -> None:
    x = torch.randn(topology.size, 101, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = x.numpy()
    for _ in range(4):
        after = gossip(topology, torch.from_numpy(before), 1).numpy()
        assert spread(after) <= topology.rho() ** 2 * spread(before) * (1 + 1e-12)
        np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), rtol=0, atol=1e-14)
        before = after


def test_complete_graph_is_an_all_reduce_bit_for_bit() -> None:
    x = torch.randn(5, 999, generator=torch.Generator().manual_seed(2))
    x[:, 0] = -0.0

    expected = x.clone()
    run_ranks(5, lambda communicator: communicator.all_reduce(expected[communicator.rank], ReduceOp.AVG).wait())
    assert torch.equal(gossip(Complete(5), x, 1).view(torch.int32), expected.view(torch.int32))


def test_rounding_has_no_bias() -> None:
    # Weights of 1/3 in float32 add 3e-8 on average.
    x = torch.randn(20000, generator=torch.Generator().manual_seed(3)).expand(3, -1)
    assert abs((gossip(Ring(3), x, 1).double() / x.double()).mean().item() - 1) < 3e-9


def test_halves_are_added_in_float32() -> None:
    large = torch.full((8, 3), 60000.0, dtype=torch.float16)
    assert torch.equal(gossip(Complete(8), large, 1), large)


def test_gossip_writes_into_a_parameter() -> None:
    weights = [torch.nn.Parameter(torch.full((2, 2), float(rank))) for rank in range(3)]
    run_ranks(3, lambda communicator: neighbour_average(communicator, Ring(3), weights[communicator.rank]))
    for weight in weights:
        assert weight.is_leaf
        assert torch.equal(weight.detach(), torch.ones(2, 2))


def test_gossip_refuses_integers_and_other_sizes() -> None:
    def run(communicator: Communicator) -> None:
        with pytest.raises(TypeError, match=r"x to be float64.*got torch\.int64"):
            neighbour_average(communicator, Ring(2), torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"for 3 ranks: expected one for communicator\.size=2"):
            neighbour_average(communicator, Ring(3), torch.zeros(3))

    run_ranks(2, run)


def test_description_says_what_one_wants_to_know() -> None:
    text = OnePeerExponential(8).describe()
    assert text.startswith("OnePeerExponential: 8 ranks, period 3, at most 1 in and 1 out\nsymmetric False")
    assert "rho 0.000000, spectral gap 1.000000" in text
    assert text.count("\nstep ") == 3
    assert "at most 4 in and 4 out" in SOUND["star"](5).describe()
