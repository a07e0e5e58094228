"""The models that people train: what their data have, that networks learn from them, and metrics."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from bagua_kernels import algorithms
from bagua_kernels.algorithms import GradientAllReduce
from bench.convergence.measure import evaluate, make_dense, run
from bench.convergence.models import MODELS, ROWS
from bench.convergence.row import Row
from bench.convergence.tasks import Task
from bench.models import bert, flights, metrics, resnet, speech, vgg
from bench.models.data import Columns, Data, Sequences, outputs
from examples import corpus, flight_data, speech_data

not_about_invariants = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def images(seed: int = 0) -> Data:
    """Images whose class is the row that is bright."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (64,), generator=generator)
    x = torch.randn(64, 1, 28, 28, generator=generator)
    x[torch.arange(64), 0, 6 * y] += 8.0
    return Data(x, y, x[:40], y[:40])


def texts() -> Data:
    """A text that repeats itself, so that masked characters follow from the others."""
    stream = (torch.arange(48 * 16) * 5) % 9 + 60
    x, y = bert.masked(stream.view(48, 16), 3)
    return Data(x, y, x[:40], y[:40])


HEADER = "arr_delay,tailnum,dest,carrier,origin,month,day,hour,minute,distance\n"


def of_flights() -> Data:
    """Flights whose aircraft decides if they are late, from the text of a file."""
    lines = [
        f"{'NA' if n % 10 == 9 else 40 if n % 3 == 0 else -5},N{n % 3},D{n % 4},C{n % 2},O{n % 2},{n % 12 + 1},{n % 28},"
        f"{n % 24},{n % 60},{100 * (n % 7)}\n"
        for n in range(200)
    ]
    return flights.divided(flight_data.read([HEADER, *lines]))


def sounds() -> Data:
    """Prompts of unequal length, of which each label has a tone."""
    parts, labels = [], []
    for n in range(60):
        time = torch.arange(800 + 40 * (n % 17)) / speech_data.RATE
        parts.append(
            speech_data.features_of((2 * torch.pi * (300 + 400 * (n % 5)) * time).sin() * (1 + (40 * time).sin()))
        )
        labels.append(n % 5)
    return speech.joined(*speech_data.divided([f"prompt {n // 5}" for n in range(60)], parts, labels))


def tables(data: Data) -> Any:
    assert isinstance(data.x, Columns)
    rows = (data.x.tensors[0].max(0).values + 1).tolist()
    return lambda: flights.network(rows, 8)


SMALL: dict[str, tuple[Any, Any, float]] = {
    "resnet": (images, lambda: resnet.network((4, 8)), 0.5),
    "vgg": (images, lambda: vgg.network((4, 4, 4), 16), 0.5),
    "bert": (texts, lambda: bert.network(16, 1, 2), 0.02),
    "flights": (of_flights, tables(of_flights()), 0.1),
    "speech": (sounds, lambda: speech.network(16), 0.05),
}


def small(name: str) -> Task:
    """A task with a little data, of the same form, and a little network."""
    data, network, rate = SMALL[name]
    return dataclasses.replace(MODELS[name], data=data, model=network, rate=rate, batch=8, ranks=2)


@not_about_invariants
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_learn(name: str) -> None:
    task = small(name)
    data = task.data()
    torch.manual_seed(0)
    before, _ = evaluate(task, task.model(), data.test_x, data.test_y)
    found = run(task, Row("own", GradientAllReduce), data, 16, 0)
    assert found["loss"] < 0.95 * before
    assert 0 < found[task.metric_name] <= 1
    assert found["bytes_per_step"] > 0


@not_about_invariants
@pytest.mark.filterwarnings("ignore::bagua_kernels.algorithms.OptimizerFitWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_row_runs(name: str) -> None:
    """Past the first round of those with local steps."""
    task = small(name)
    data = task.data()
    for row in (row for row in ROWS if name in row.tasks):
        found = run(task, row, data, 33, 0)
        assert 0 < found["loss"] < 20, row.label
        assert found["bytes_per_step"] > 0, row.label


@pytest.mark.parametrize(
    ("module", "least", "most"), [(resnet, 3e5, 1e6), (vgg, 1e6, 2e6), (bert, 5e5, 1e6), (flights, 2e5, 4e5)]
)
def test_sizes(module: Any, least: float, most: float) -> None:
    torch.manual_seed(0)
    model = module.network()
    assert least < sum(p.numel() for p in model.parameters()) < most
    if module is vgg:
        matrices = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
        assert matrices > 0.97 * sum(p.numel() for p in model.parameters())
    if module is flights:
        assert sum(p.numel() for p in model.tables.parameters()) > 0.9 * sum(p.numel() for p in model.parameters())
        assert [table.sparse for table in model.tables] == [True] + [False] * 6


def test_metrics() -> None:
    outputs = torch.tensor([0.1, 0.9, 0.4, 0.4])
    # Of four pairs one is wrong and one has equal outputs.
    assert metrics.auc(outputs, torch.tensor([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.5)
    assert metrics.auc(outputs, torch.tensor([0.0, 1.0, 0.0, 1.0])) == pytest.approx(3.5 / 4)
    with pytest.raises(ValueError, match="labels of both kinds, got 0 positive and 4"):
        metrics.auc(outputs, torch.zeros(4))
    logits = torch.eye(3)
    assert metrics.accuracy(logits, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)
    assert metrics.accuracy(logits, torch.tensor([0, 0, metrics.IGNORED])) == pytest.approx(1 / 2)


def test_characters_are_masked_in_three_ways() -> None:
    windows = torch.randint(1, corpus.SYMBOLS, (400, 64), generator=torch.Generator().manual_seed(0))
    x, y = bert.masked(windows, 5)
    guessed = y != metrics.IGNORED
    assert guessed.float().mean() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(y[guessed], windows[guessed])
    assert torch.equal(x[~guessed], windows[~guessed])
    assert (x[guessed] == bert.MASK).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (x[guessed] == windows[guessed]).float().mean() == pytest.approx(0.1, abs=0.03)
    assert all(map(torch.equal, bert.masked(windows, 5), (x, y)))


def test_a_prompt_has_the_same_logits_in_any_batch() -> None:
    torch.manual_seed(0)
    model, data = speech.network(8).eval(), sounds()
    assert isinstance(data.x, Sequences)
    frames, lengths = data.x[torch.tensor([0, 5, 9, 11])]
    assert frames.shape == (4, lengths.max(), speech_data.BANDS)
    together = outputs(model, (frames, lengths))
    for place, number in enumerate([0, 5, 9, 11]):
        alone = outputs(model, data.x[number : number + 1])
        torch.testing.assert_close(alone, together[place : place + 1])


def test_prompts_of_one_name_are_in_one_set() -> None:
    data = sounds()
    assert (len(data.y), len(data.test_y)) == (50, 10)
    # Each name has all five languages.
    assert data.test_y.bincount().tolist() == [2] * 5
    assert data.costs is not None
    assert data.costs.tolist() == data.x.lengths.tolist()  # type: ignore[attr-defined]


def test_flights_that_have_landed() -> None:
    data = of_flights()
    numbers, dense = data.x[torch.arange(len(data.y))]
    assert len(data.y) + len(data.test_y) == 180
    assert numbers.shape[1] == len(flight_data.COLUMNS)
    assert dense.shape == (len(data.y), flight_data.DENSE)
    # Every third aircraft is late, and its row of the first table has always the same number.
    assert len(numbers[data.y == 1, 0].unique()) == 1
    assert data.y.mean() == pytest.approx(1 / 3, abs=0.05)


@not_about_invariants
def test_sparse_gradients_train_as_dense_ones_do() -> None:
    task = small("flights")
    data = task.data()
    rows = [Row(label, algorithms.GradientAllReduce, dense=label == "dense") for label in ("sparse", "dense")]
    sparse, dense = (run(task, row, data, 5, 0) for row in rows)
    assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-6)
    model = task.model()
    twin = copy.deepcopy(model)
    make_dense(twin)
    for one, layout in ((model, torch.sparse_coo), (twin, torch.strided)):
        outputs(one, data.x[:8]).sum().backward()
        assert one.tables[0].weight.grad.layout == layout
        assert one.tables[1].weight.grad.layout == torch.strided
