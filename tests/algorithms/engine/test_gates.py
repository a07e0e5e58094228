"""Forward passes that wait for their parameters: with the results of backward passes that wait for all."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import comm, optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, CompressedAllReduce, GradientAllReduce, PowerSGD
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests.algorithms.engine.test_backward_steps import ALGORITHMS, OPTIMIZERS, Parts
from tests.algorithms.ranks import batch, fill

PATIENCE = 20.0  # seconds
# Adam is given to all algorithms here, whether they go together or not.
pytestmark = pytest.mark.filterwarnings("ignore::bagua_kernels.algorithms.OptimizerFitWarning")
WAITS: dict[str, Any] = {"apply_in_backward": True, "wait_in_forward": True}


exchange = Algorithm._exchange


def late(self: Algorithm, bucket: Any, step: int) -> Callable[[], None] | None:
    """Begins an exchange late, so that whoever does not wait for it is too early."""
    time.sleep(0.01)
    return exchange(self, bucket, step)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All exchanges are late."""
    monkeypatch.setattr(Algorithm, "_exchange", late)


def trained(
    communicator: Communicator,
    name: str,
    make: Callable[..., torch.optim.Optimizer],
    waits: bool,
    buffers: bool = False,
) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    """Trains layers of which some take part in some steps only, on some ranks only, as a loop with schedules does."""
    module = Parts()
    if buffers:
        module.second = nn.Sequential(module.second, nn.BatchNorm1d(33))
    optimizer = make(module.parameters())
    kind, arguments = ALGORITHMS[name]
    algorithm = kind(
        module,
        optimizer,
        communicator=communicator,
        bucket_bytes=4000,
        apply_in_backward=waits,
        wait_in_forward=waits,
        **arguments,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(6):
        optimizer.zero_grad()
        x = batch(communicator.rank, step)
        if step == 2:
            with algorithm.no_sync():
                algorithm(x, True).backward()
        algorithm(x, (step + communicator.rank) % 3 == 1).backward()
        optimizer.step()
        # What is under way must not notice either of these.
        optimizer.zero_grad()
        schedule.step()
    return [p.detach().clone() for p in module.parameters()], copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("name", "optimizer", "ranks", "buffers"),
    [
        *((name, "adamw", 2, False) for name in ALGORITHMS if name != "dgc"),
        *(("bytegrad", each, 3, False) for each in OPTIMIZERS),
        ("allreduce", "sgd", 4, True),
        ("powersgd", "sgd momentum", 1, False),
    ],
)
def test_results_are_those_of_a_step_after_backward(name: str, optimizer: str, ranks: int, buffers: bool) -> None:
    make = OPTIMIZERS[optimizer]
    expected, found = (run_ranks(ranks, lambda c, w=w: trained(c, name, make, w, buffers)) for w in (False, True))
    for (params, state), (ours, own) in zip(expected, found, strict=True):
        assert all(map(torch.equal, params, ours))
        assert own.keys() == state.keys()
        for key, values in state.items():
            for what, value in values.items():
                assert torch.equal(torch.as_tensor(own[key][what]), torch.as_tensor(value))


class Keeping(nn.Module):
    """Has its parameter in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.kept = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kept[0]


class Indirect(nn.Module):
    """Layers that use parameters in other ways than as attributes of the module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.keeping = Keeping()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.tables = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8))})
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.recurrent(self.keeping(self.words(x)))
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.encoder(x) * self.scales[0] * self.scales[1] + self.tables["shift"]
        return self.head(x)


def indirect(communicator: Communicator, waits: bool, compiled: bool = False) -> list[list[torch.Tensor]]:
    module = Indirect()
    optimizer = optim.SGD(module.parameters(), lr=0.5)
    algorithm = GradientAllReduce(
        module,
        optimizer,
        communicator=communicator,
        bucket_bytes=500,
        apply_in_backward=waits,
        wait_in_forward=waits,
    )
    if compiled:
        module.compile(backend="aot_eager")
    seen = []
    for step in range(4):
        words = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(10 * step + communicator.rank))
        out = algorithm(words)
        seen.append(out.detach().clone())
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        seen.append(module.eval()(words))  # the encoder's short cut reads weights of its parts
    return [seen, [p.detach().clone() for p in module.parameters()]]


@pytest.mark.usefixtures("slow")
def test_modules_that_read_parameters_in_other_ways() -> None:
    expected, found = (run_ranks(2, lambda c, w=w: indirect(c, w)) for w in (False, True))
    for theirs, ours in zip(expected, found, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert all(map(torch.equal, one, other))


def compiled() -> None:
    """Trains a compiled module that waits and a plain one that does not."""
    communicator = comm.init(timeout=30)
    Algorithm._exchange = late
    expected, found = indirect(communicator, False), indirect(communicator, True, compiled=True)
    for theirs, ours in zip(expected, found, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other)
    comm.shutdown()


def test_compiled_modules() -> None:
    results = run_processes(compiled, 2, timeout=120)
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-2000:]


class Held(GradientAllReduce):
    """Exchanges one bucket only once it is told to, and notes the order of all."""

    name = "held"

    def __init__(self, *arguments: Any, held: int, **options: Any) -> None:
        self.held, self.begun, self.release = held, threading.Event(), threading.Event()
        self.order: list[int] = []
        super().__init__(*arguments, **options)

    def exchange(self, bucket: Bucket, step: int) -> None:
        self.order.append(bucket.index)
        self.begun.set()
        if bucket.index == self.held and step > 0 and not self.release.wait(PATIENCE):
            raise TimeoutError("nobody released the bucket")
        super().exchange(bucket, step)


def test_forward_begins_while_later_layers_are_exchanged() -> None:
    def rank(communicator: Communicator) -> bool:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        module = nn.Sequential(first, second)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        algorithm = Held(module, optimizer, communicator=communicator, bucket_bytes=200, lanes=2, held=0, **WAITS)
        first.register_forward_hook(lambda *_: algorithm.release.set())
        for _ in range(2):
            algorithm(torch.ones(2, 8)).sum().backward()
            algorithm.wait()
        algorithm.release.clear()
        # Without a wait this pass would end when its last exchange does: never.
        second(first.forward(torch.ones(2, 8))).sum().backward()
        before = algorithm.release.is_set()
        algorithm(torch.ones(2, 8))
        return not before and algorithm.release.is_set()

    assert run_ranks(2, rank) == [True, True]


def test_what_forward_needs_first_is_exchanged_first() -> None:
    def rank(communicator: Communicator) -> list[int]:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
        algorithm = Held(
            module, optim.SGD(module.parameters(), lr=0.1), communicator=communicator, bucket_bytes=1, held=0, **WAITS
        )
        algorithm.release.set()
        for _ in range(2):
            algorithm(torch.ones(2, 8)).sum().backward()
        algorithm.wait()
        algorithm.release.clear()
        algorithm.begun.clear()
        algorithm.order.clear()
        middle = module[:4](torch.ones(2, 8))
        middle.register_hook(lambda _: algorithm.begun.wait(PATIENCE) and None)
        # Ranks have the other buckets at different times, but all have them when they hear of the first one's end.
        time.sleep(0.05 * communicator.rank)
        module[4:](middle).sum().backward()
        communicator.barrier().wait()
        algorithm.release.set()
        algorithm.wait()
        return algorithm.order

    assert run_ranks(3, rank) == [[0, 4, 3, 2, 1]] * 3


@pytest.mark.usefixtures("slow")
def test_one_rank_may_look_at_what_it_has() -> None:
    """Whatever waits for updates says nothing to the other ranks, so that one alone may save or evaluate the model."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        fill(module)
        optimizer = optim.AdamW(module.parameters(), lr=0.1)
        algorithm = CompressedAllReduce(
            module,
            optimizer,
            codec="minmax_uint8",
            communicator=communicator,
            bucket_bytes=100,
            **WAITS,
            only_if_faster=True,
        )
        looks: list[Callable[[], Any]] = [
            module.state_dict,
            optimizer.state_dict,
            algorithm.stats,
            lambda: copy.deepcopy(module),
            lambda: pickle.dumps(module),
            lambda: module[0].weight.sum(),
            lambda: module[0]._parameters.get("bias"),
            lambda: list(module[0]._parameters.values()),
            lambda: module[0]._parameters.copy(),
        ]
        for step in range(2 * len(looks)):
            algorithm(batch(communicator.rank, step)).square().mean().backward()
            if communicator.rank == step % 2:
                looks[step // 2]()
        return [p.detach().clone() for p in module.parameters()]

    first, second = run_ranks(2, rank)
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("slow")
def test_looks_wait() -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 3, bias=False)
        optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        weight = module.weight
        algorithm = GradientAllReduce(module, optimizer, communicator=communicator, **WAITS)

        def gradient() -> None:
            weight.grad = torch.zeros_like(weight)
            optimizer.step()

        looks: list[Callable[[], Any]] = [
            algorithm.wait,
            algorithm.stats,
            lambda: module.weight,
            lambda: next(module.parameters()),
            lambda: module._parameters.get("weight"),
            lambda: module._parameters.copy(),
            module.state_dict,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: copy.deepcopy(module),
            lambda: pickle.dumps(module),
            lambda: module(torch.ones(7)),
            algorithm.algorithm_state_dict,
            gradient,
        ]
        for number, look in enumerate(looks):
            version = weight._version
            algorithm(torch.ones(7)).sum().backward()
            assert weight._version == version, number  # still under way
            look()
            assert weight._version > version, number
            optimizer.zero_grad()

    run_ranks(2, rank)


def test_copies_wait_for_nothing() -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2))
        algorithm = PowerSGD(module, optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **WAITS)
        algorithm(torch.ones(1, 7)).sum().backward()
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for one in copies:
            assert all(type(part._parameters) is dict for part in one.modules())
            assert torch.equal(one(torch.ones(1, 7)), module(torch.ones(1, 7)))
        other = algorithm.switch_to(ByteGrad, optimizer=optim.SGD(module.parameters(), lr=0.1), **WAITS)
        assert type(module[0]._parameters) is not dict
        other(torch.ones(1, 7)).sum().backward()
        assert other.stats().steps == 2
        other.close()
        assert all(type(part._parameters) is dict for part in module.modules())
        assert not any(part._forward_pre_hooks for part in module.modules())

    run_ranks(2, rank)


@pytest.mark.usefixtures("slow")
def test_join_and_weights() -> None:
    def rank(communicator: Communicator, waits: bool) -> list[torch.Tensor]:
        module = nn.Linear(7, 3)
        fill(module)
        optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        algorithm = GradientAllReduce(
            module, optimizer, communicator=communicator, apply_in_backward=waits, wait_in_forward=waits
        )
        for step in range(3):
            algorithm.weigh(1 + communicator.rank * step)
            algorithm(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with algorithm.join(optimizer):
            for step in range(2 + communicator.rank):
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in module.parameters()]

    expected, found = (run_ranks(2, lambda c, w=w: rank(c, w)) for w in (False, True))
    for theirs, ours in zip(expected, found, strict=True):
        assert all(map(torch.equal, theirs, ours))


@pytest.mark.parametrize("first", range(4))
def test_errors_reach_whoever_waits(first: int) -> None:
    class Failing(GradientAllReduce):
        name = "failing"

        def exchange(self, bucket: Bucket, step: int) -> None:
            raise ArithmeticError("no mean")

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 3)
        algorithm = Failing(module, optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **WAITS)
        algorithm(torch.ones(7)).sum().backward()
        looks = [
            lambda: algorithm(torch.ones(7)),
            module.state_dict,
            algorithm.wait,
            algorithm.algorithm_state_dict,
        ]
        with pytest.raises(ArithmeticError, match="no mean"):
            looks.pop(first)()
        # From then on what is there can be saved, and nothing goes on.
        assert set(module.state_dict()) == {"weight", "bias"}
        for look in (look for look in looks if look != module.state_dict):
            with pytest.raises(RuntimeError, match=r"ArithmeticError: no mean.*restart from a checkpoint"):
                look()
        algorithm.close()

    run_ranks(2, rank)


@pytest.mark.usefixtures("slow")
def test_evaluation_may_be_the_first_that_waits() -> None:
    """States that a late step makes there are of use in training."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        fill(module)
        algorithm = GradientAllReduce(
            module, optim.AdamW(module.parameters(), lr=0.1), communicator=communicator, **WAITS
        )
        for step in range(4):
            # Each rank has gradients of one part only.
            module[communicator.rank](torch.ones(4)).sum().backward()
            with torch.inference_mode(step < 2):
                module[1 - communicator.rank](torch.ones(4))
        algorithm.close()
        return [p.detach().clone() for p in module.parameters()]

    first, second = run_ranks(2, rank)
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("slow")
def test_close_waits() -> None:
    """Also with hierarchies, whose communicators it closes too."""

    def rank(communicator: Communicator, hierarchical: bool) -> list[float]:
        module = nn.Linear(4, 4, bias=False)
        fill(module)
        algorithm = GradientAllReduce(
            module,
            optim.SGD(module.parameters(), lr=0.1),
            communicator=communicator,
            hierarchical=hierarchical,
            **WAITS,
        )
        for _ in range(2):
            algorithm(torch.ones(4)).sum().backward()
        algorithm.close()
        assert not algorithm._hierarchies
        return module.weight.flatten().tolist()

    expected, found = (run_ranks(2, lambda c, h=h: rank(c, h)) for h in (False, True))
    assert expected == found


def test_no_algorithm_lives_on_after_a_forward_pass() -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        algorithm = GradientAllReduce(
            module, optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **WAITS
        )
        algorithm(torch.ones(4)).sum().backward()
        alive = weakref.ref(algorithm)
        module(torch.ones(4))
        del algorithm
        deadline = time.monotonic() + PATIENCE
        while alive() is not None and time.monotonic() < deadline:
            gc.collect()  # does nothing while another thread collects
            time.sleep(0.01)
        assert alive() is None

    run_ranks(1, rank)
    run_ranks(2, rank)


def test_resume_is_bit_identical() -> None:
    def rank(communicator: Communicator) -> None:
        def wrap() -> tuple[nn.Module, torch.optim.Optimizer, Algorithm]:
            module = nn.Linear(7, 40)
            fill(module)
            optimizer = optim.AdamW(module.parameters(), lr=0.1)
            options = {"communicator": communicator, **WAITS}
            return module, optimizer, CompressedAllReduce(module, optimizer, codec="sign", **options)

        def train(algorithm: Algorithm, first: int) -> None:
            for step in range(first, first + 3):
                algorithm(batch(communicator.rank, step)).square().mean().backward()

        module, optimizer, algorithm = wrap()
        train(algorithm, 0)
        saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), algorithm.algorithm_state_dict()))
        train(algorithm, 3)
        again, optimizer, resumed = wrap()
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        resumed.load_algorithm_state_dict(saved[2])
        train(resumed, 3)
        assert all(map(torch.equal, module.parameters(), again.parameters()))

    run_ranks(2, rank)


def test_refusals() -> None:
    def rank(communicator: Communicator) -> None:
        def wrap(module: nn.Module, parameters: Any, **options: Any) -> Algorithm:
            optimizer = optim.SGD(parameters, lr=0.1)
            return GradientAllReduce(module, optimizer, communicator=communicator, wait_in_forward=True, **options)

        linear = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="set apply_in_backward=True too"):
            wrap(linear, linear.parameters())
        with pytest.raises(ValueError, match="it lacks 'bias'"):
            wrap(linear, [linear.weight], apply_in_backward=True)
        words = nn.Embedding(3, 2, sparse=True)
        with pytest.raises(ValueError, match="that of 'weight' is sparse"):
            wrap(words, words.parameters(), apply_in_backward=True)

    run_ranks(2, rank)
