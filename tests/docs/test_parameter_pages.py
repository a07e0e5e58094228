"""What pages say about algorithms on parameters: bytes, vectors, threads, and the names of topologies."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import (
    Algorithm,
    ModelAlgorithm,
    MuLoCo,
    OuterLoop,
    RoundAlgorithm,
    SparseLoCo,
    names,
)
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.gossip.differences import Differences
from bagua_kernels.algorithms.gossip.mixing import topology_of
from bagua_kernels.algorithms.local_steps.outer_setup import AT_ONCE
from bagua_kernels.algorithms.models import model_algorithm
from bagua_kernels.algorithms.models.round import When
from bagua_kernels.comm import Communicator, run_ranks, topology
from bagua_kernels.comm.backends.local.mailbox import LocalMailbox
from tests.comm.mailbox.common import over_sockets
from tests.docs.test_algorithm_pages import INDEX, ROWS
from tests.grids import folded, grid

ON_PARAMETERS = [name for name in names() if issubclass(Algorithm.registered[name], ModelAlgorithm)]
TOPOLOGIES = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text()
NAMES = re.findall(r'^\| `"(\w+)"` \| `(.+?)` \| (yes|no)', TOPOLOGIES, re.MULTILINE)
# One parameter, whose number of elements no other tensor of these tests has; payloads need a multiple of 4096.
INPUTS, OUTPUTS = 63, 130
SIZES = {INPUTS * OUTPUTS, -(-INPUTS * OUTPUTS // 4096) * 4096}
RANKS, STEPS = 4, 3

every = grid(name=list(ON_PARAMETERS))


def trained(name: str, communicator: Communicator) -> Any:
    module = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    kind = Algorithm.registered[name]
    if issubclass(kind, MuLoCo) and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    make = torch.optim.Muon if issubclass(kind, MuLoCo) else torch.optim.SGD
    optimizer = make(module.parameters(), lr=0.1)
    options = {"eta": 0.5} if name == "choco" else {"interval": 1} if issubclass(kind, OuterLoop) else {}
    model = kind(module, optimizer, communicator=communicator, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((2, INPUTS), 1.0 + communicator.rank + step)).square().mean().backward()
        optimizer.step()
    assert isinstance(model, ModelAlgorithm)
    model.wait()
    return model


def vectors() -> int:
    """The number of float32 vectors of the model's size in this process."""
    found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    return len({each.data_ptr() for each in found if each.numel() in SIZES and each.dtype == torch.float32})


@pytest.fixture
def on_their_way(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Copies of messages whose senders have gone on, for ranks that have not come to them: the network, as it were."""
    copies: list[weakref.ref[torch.Tensor]] = []
    settle = LocalMailbox._settle

    def recorded(box: LocalMailbox, key: Any) -> None:
        settle(box, key)
        if key in box._office.tensors:
            copies.append(weakref.ref(box._office.tensors[key]))

    monkeypatch.setattr(LocalMailbox, "_settle", recorded)
    return copies


@pytest.mark.usefixtures("small_heap")
@every
def test_vectors_are_as_many_as_the_table_says(name: str, on_their_way: list[weakref.ref[torch.Tensor]]) -> None:
    """Counted in memory, beside parameters and gradients."""
    counts: list[int] = []
    shared: list[int] = []
    gc.collect()
    before = vectors()

    def rank(communicator: Communicator) -> None:
        model = trained(name, communicator)
        communicator.barrier().wait()
        # Pseudo-gradients share the memory of two buckets, however many a model has; here one bucket is the model.
        turns = model.setup.turns if isinstance(model, OuterLoop) else None
        if turns is not None:
            memory = list(turns._memory.values())
            assert sum(each.numel() for each in memory) <= AT_ONCE * max(
                b.flat.numel() for b in model.local.flat.buckets
            )
            shared.append(sum(each.numel() in SIZES for each in memory))
        communicator.barrier().wait()
        if communicator.rank == 0:
            sent = [copy for each in on_their_way if (copy := each()) is not None and copy.numel() in SIZES]
            counts.append(vectors() - len(sent) - before - sum(shared))
        communicator.barrier().wait()
        model.close()

    run_ranks(RANKS, rank)
    beside = counts[0] / RANKS - 2 - (name == "mu_loco")  # Muon's momentum is the optimizer's state
    if issubclass(Algorithm.registered[name], CourierAlgorithm):
        # Some are made when they are first needed, or live as long as an exchange.
        assert 0 <= beside <= int(ROWS[name][1][3])
    else:
        assert ROWS[name][1][3] == f"{beside:g}"


@every
def test_bytes_are_those_of_the_table(name: str) -> None:
    def rank(communicator: Communicator) -> tuple[int, float, float]:
        model = trained(name, communicator)
        payload = 4.0
        if isinstance(model, CourierAlgorithm):
            model.close()
            stats = model.stats()
            part = {"wagma": 1.0, "async_model_average": 2 * (RANKS - 1) / RANKS, "async_decentralized": 2.0}[name]
            # Of pairs, each rank sends for its own questions and for those of others.
            rounds = sum(communicator.all_gather_object(stats.rounds)) / RANKS
            sent = sum(communicator.all_gather_object(stats.bytes_sent)) / RANKS
            return STEPS * sent / rounds if rounds else 0.0, payload, part
        if isinstance(model, SparseLoCo):
            sent, payload = model.stats().bytes_sent, model.codec.payload_size(10**6) / 10**6
            model.close()
            return sent, payload, RANKS - 1
        if isinstance(model, OuterLoop):
            sent = model.stats().bytes_sent
            if model.assignment.codecs:
                payload = model.assignment.codecs[0].payload_size(10**6) / 10**6
            model.close()
            return sent, payload, 2 * (RANKS - 1) / RANKS
        if isinstance(model, Differences):
            payload = model.codec.payload_size(10**6) / 10**6
        graph = model._neighbourhood.topology if isinstance(model, Differences) else model._mixing.topology
        sent = model.stats().bytes_sent
        neighbours = len(graph.neighbours_out(communicator.rank))
        model.close()
        return sent, payload, neighbours

    for sent, payload, neighbours in run_ranks(RANKS, rank):
        _, size, times, *_ = ROWS[name][1]
        if issubclass(Algorithm.registered[name], CourierAlgorithm):
            texts = {"wagma": "2 b (S-1)/S", "async_model_average": "2 b (P-1)/P", "async_decentralized": "2 b"}
            assert times == texts[name]
            assert size == "4"
            # Letters and the last mean are in it.
            assert not sent or 0.9 <= sent / (STEPS * neighbours * payload * INPUTS * OUTPUTS) < 2.0
            continue
        assert size == f"{payload:g}" or size == f"{payload:.3f}"
        local = {"sparse_loco": "b (P-1)/H"}.get(name, "2 b (P-1)/(P H)")
        on_neighbours = "b" if neighbours == 1 else f"{neighbours} b"
        assert times == (local if issubclass(Algorithm.registered[name], OuterLoop) else on_neighbours)
        # Padding, and what is sent ahead of the next round.
        assert 1 <= sent / (STEPS * neighbours * payload * INPUTS * OUTPUTS) < 1.4


@folded(name=list(ON_PARAMETERS))
def test_index_says_when_exchanges_run(name: str) -> None:
    beside = {"step": "beside forward and backward", "forward": "after the step", "round": "beside the next step"}
    kind = Algorithm.registered[name]
    if issubclass(kind, CourierAlgorithm):
        assert ROWS[name][1][4] == "beside training"
        return
    if issubclass(kind, OuterLoop):
        assert ROWS[name][1][4] == "once in H steps"
        return

    def rank(communicator: Communicator) -> When:
        model = trained(name, communicator)
        assert isinstance(model, RoundAlgorithm)
        assert model.rounds is not None
        with model:
            return model.rounds.when

    assert {ROWS[name][1][4]} == {beside[when.value] for when in run_ranks(RANKS, rank)}


def test_threads_are_as_many_as_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_algorithm, "open_mailbox", lambda communicator, **_: over_sockets(communicator))
    before = set(threading.enumerate())

    def rank(communicator: Communicator) -> list[str]:
        model = trained("decentralized", communicator)
        communicator.barrier().wait()
        here = [each.name for each in set(threading.enumerate()) - before if each.name.startswith("bagua_kernels")]
        communicator.barrier().wait()
        model.close()
        return here

    found, *_ = run_ranks(2, rank)
    assert len(found) == 2 * 3, found
    assert "**Threads:** three more" in INDEX


def test_names_of_topologies() -> None:
    size = 8
    assert len(NAMES) == 9
    for name, text, static in NAMES:
        graph = topology_of(name, size)
        assert eval(text, {**vars(topology), "P": size}) == graph
        assert static == ("yes" if graph.symmetric and graph.period == 1 else "no")
    with pytest.raises(ValueError, match="expected peers to be one of") as error:
        topology_of("nothing", size)
    assert all(name in str(error.value) for name, _, _ in NAMES)
