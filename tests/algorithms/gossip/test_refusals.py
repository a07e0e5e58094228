"""What the constructors and the wrappers of algorithms on models refuse, on all ranks, with the change to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import GivenMatrix, Graph, OnePeerExponential, Ring, StaticExponential
from bagua_kernels.optim import fuse_optimizer
from tests.algorithms.gossip.common import ALL, CASES, Case, flat, unequal
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

every = grid(cover=1, case=ALL)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def refused(size: int, case: Case, match: str, options: Callable[[int], dict[str, Any]]) -> None:
    """Checks that the constructor raises on every rank; options are those of a rank."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        with pytest.raises((ValueError, TypeError), match=match):
            case.make(module, sgd(module), communicator, **options(communicator.rank))

    run_ranks(size, rank)


@every
def test_an_optimizer_is_needed(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises((TypeError, ValueError), match="optimizer"):
            case.make(Odd(), None, communicator)
        with pytest.raises((TypeError, ValueError), match="optimizer"):
            case.kind(Odd(), communicator=communicator)
        with pytest.raises((TypeError, ValueError), match="optimizer"):
            case.make(Odd(), [0], communicator)

    run_ranks(2, rank)


@every
def test_optimizers_of_other_parameters_are_refused(case: Case) -> None:
    """A parameter that the optimizer does not have would be mixed and never trained; one of its own never mixed."""

    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="optimizer"):
            case.make(Odd(), sgd(Odd()), communicator)

    run_ranks(2, rank)


@every
def test_topologies_of_another_size(case: Case) -> None:
    refused(3, case, "4 ranks", lambda rank: {"peers": case.peers(4)})


@every
def test_topologies_that_never_mix(case: Case) -> None:
    apart = Graph(4, [(0, 1), (2, 3)])
    refused(4, case, "mix|hear", lambda rank: {"peers": apart})


@grid(cover=1, size=[2, 4, 8])
def test_d2_names_the_remedy_for_negative_eigenvalues(size: int) -> None:
    """A ring of an even number of ranks has -1/3 itself; two ranks with a half each have none below 0."""
    if size == 2:
        swapped = GivenMatrix(2, [[0.3, 0.7], [0.7, 0.3]])
        refused(2, CASES["d2"], r"\(I \+ W\) / 2", lambda rank: {"peers": swapped})
    else:
        refused(size, CASES["d2"], r"-1/3[\s\S]*\(I \+ W\) / 2", lambda rank: {"peers": "ring"})


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_d2_takes_rings_without_them(size: int) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        CASES["d2"].make(module, sgd(module), communicator, peers="ring").close()

    run_ranks(size, rank)


@grid(
    name=["low_precision", "choco", "d2"], topology=[StaticExponential(5), OnePeerExponential(5), unequal(5)], cover=1
)
def test_symmetric_static_graphs_are_needed(name: str, topology: Any) -> None:
    refused(5, ALL[name], "symmetric|static|one matrix|time|period|columns|rows", lambda rank: {"peers": topology})


def test_decentralized_needs_doubly_stochastic_weights() -> None:
    refused(3, ALL["decentralized"], "rows", lambda rank: {"peers": unequal(3)})


def test_push_sum_needs_columns() -> None:
    rows = GivenMatrix(3, unequal(3).matrix().T.tolist())
    refused(3, ALL["push"], "columns", lambda rank: {"peers": rows})


@grid(
    cover=1,
    name__options__match=[
        ("decentralized", {"peers": "rings"}, "one of all, .*ring.*, got 'rings'"),
        ("decentralized", {"interval": 0}, "interval"),
        ("decentralized", {"bucket_bytes": 0}, "bucket_bytes"),
        ("low_precision", {"codec": "minmax"}, "no codec 'minmax'"),
        ("low_precision", {"codec": 3}, "codec"),
        ("choco", {"codec": "nothing"}, "no codec 'nothing'"),
        ("choco", {"eta": 0.0}, "eta"),
        ("choco", {"eta": -1.0}, "eta"),
        ("push", {"peers": 3}, "peers"),
    ],
)
def test_values_that_make_no_sense(name: str, options: dict[str, Any], match: str) -> None:
    refused(2, ALL[name], match, lambda rank: options)


@grid(
    cover=1,
    name__first__other__match=[
        ("decentralized", {"interval": 1}, {"interval": 2}, "interval"),
        ("decentralized", {"peers": "ring"}, {"peers": "all"}, "peers"),
        (
            "decentralized",
            {"peers": Ring(3)},
            {"peers": GivenMatrix(3, np.full((3, 3), 1 / 3).tolist())},
            "peers|topolog",
        ),
        ("decentralized", {"bucket_bytes": 100}, {"bucket_bytes": 200}, "bucket_bytes"),
        ("low_precision", {"codec": "minmax_uint8"}, {"codec": "minmax_uint4"}, "codec"),
        ("low_precision", {"seed": 1}, {"seed": 2}, "seed"),
        ("choco", {"eta": 0.5}, {"eta": 0.25}, "eta"),
        ("d2", {"peers": "all"}, {"peers": "ring"}, "peers"),
        ("push", {"peers": "ring"}, {"peers": "one_peer_exponential"}, "peers"),
    ],
)
def test_options_that_differ_between_ranks(name: str, first: dict[str, Any], other: dict[str, Any], match: str) -> None:
    refused(3, ALL[name], match, lambda rank: other if rank == 1 else first)


@every
def test_algorithms_that_differ_between_ranks(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        chosen = ALL["d2" if case is not ALL["d2"] else "push"] if communicator.rank == 1 else case
        with pytest.raises(ValueError, match="differs between ranks"):
            chosen.make(module, sgd(module), communicator, peers="all")

    run_ranks(3, rank)


def test_nodes_of_unequal_size_are_refused() -> None:
    """Each local rank mixes a shard with the same local rank of other nodes."""
    options = {"hierarchical": True, "nodes": [[0, 1], [2]], "peers": "ring"}
    refused(3, ALL["decentralized"], "as many ranks on each node", lambda rank: options)


@every
def test_weights_are_refused(case: Case) -> None:
    """There is no mean of gradients that could have weights."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        model = case.make(module, sgd(module), communicator)
        with pytest.raises(ValueError, match="weigh"):
            model.weigh(2.0)
        model.close()

    run_ranks(2, rank)


def to_float64(module: Odd) -> None:
    module.to(torch.float64)


def shared(module: Odd) -> None:
    """Part of memory that has another owner, as after `fuse_optimizer`."""
    other = torch.zeros(module.first.weight.numel() + 1)
    view = other[1:].view_as(module.first.weight)
    module.first.weight.data = view.copy_(module.first.weight.detach())


@grid(case=ALL, move=[to_float64, shared], when=["before forward", "before step"], cover=1)
def test_parameters_that_were_moved(case: Case, move: Callable[[Odd], None], when: str) -> None:
    """What is no longer in its bucket would silently not be mixed."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        optimizer = sgd(module)
        model = case.make(module, optimizer, communicator)

        def step(moved: str = "") -> None:
            optimizer.zero_grad()
            if moved == "before forward":
                move(module)
            x = batch(communicator.rank, 0).to(module.first.weight.dtype)
            model(x).square().mean().backward()
            if moved == "before step":
                move(module)
            optimizer.step()
            model.wait()

        def twice() -> None:
            step(when)
            step()

        step()
        with pytest.raises(RuntimeError, match=r"parameter '(first\.weight|scale)' was moved"):
            twice()

    run_ranks(2, rank)


def clone(module: Odd) -> None:
    module.first.weight.data = module.first.weight.data.clone()


def to_numbered_device(module: Odd) -> None:
    module.to("cpu:0")


@grid(case=ALL, move=[clone, to_numbered_device], when=["before forward", "before step"], cover=1)
def test_parameters_with_memory_of_their_own_are_taken_back(case: Case, move: Callable[[Odd], None], when: str) -> None:
    def rank(communicator: Communicator, moving: bool) -> torch.Tensor:
        module = Odd()
        optimizer = sgd(module)
        model = case.make(module, optimizer, communicator)
        places = [p.data_ptr() for p in model.local.flat.parameters.values()]
        for step in range(4):
            optimizer.zero_grad()
            if moving and when == "before forward":
                move(module)
            model(batch(communicator.rank, step)).square().mean().backward()
            if moving and when == "before step":
                move(module)
            optimizer.step()
        model.wait()
        model.synchronize()
        assert places == [p.data_ptr() for p in model.local.flat.parameters.values()]
        model.close()
        return flat(module)

    plain, moved = (run_ranks(2, rank, moving) for moving in (False, True))
    for expected, found in zip(plain, moved, strict=True):
        assert torch.equal(expected, found)


@every
def test_fusing_after_wrapping(case: Case) -> None:
    """`fuse_optimizer` would take parameters out of buckets without gaps, which is an error. It leaves the others there."""

    def rank(communicator: Communicator, fuse: bool) -> torch.Tensor | None:
        module = Odd()
        optimizer = sgd(module)
        model = case.make(module, optimizer, communicator)
        places = [p.data_ptr() for p in module.parameters()]
        used = fuse_optimizer(optimizer) if fuse else optimizer

        def train() -> None:
            for step in range(3):
                used.zero_grad()
                model(batch(communicator.rank, step)).square().mean().backward()
                used.step()
            model.wait()

        problem = ""
        try:
            train()
        except RuntimeError as error:
            problem = str(error)
        if problem:
            assert "was moved out of the memory" in problem
            assert "fuse_optimizer" in problem
            return None
        assert places == [p.data_ptr() for p in module.parameters()]
        model.close()
        return flat(module)

    plain, fused = (run_ranks(2, rank, fuse) for fuse in (False, True))
    assert all(b is None or torch.equal(a, b) for a, b in zip(plain, fused, strict=True))
    assert case in (ALL["low_precision"], ALL["choco"]) or fused == [None, None]


@pytest.mark.usefixtures("small_heap")
@every
def test_a_module_is_wrapped_once(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        model = case.make(module, sgd(module), communicator)
        with pytest.raises(ValueError, match="already"):
            case.make(module, sgd(module), communicator)
        model.close()

    run_ranks(2, rank)
