"""What is exchanged: buckets in the measured order, sparse gradients, codecs by plan and guard; and refused options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import (
    DGC,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    GradientAllReduce,
    Guard,
    PowerSGD,
    SignSGD,
    TernGrad,
    TopK,
)
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.policy.guard import wider
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8, Cast, Sign
from bagua_kernels.compression import TopK as TopKCodec
from tests.algorithms.ranks import Odd, batch, fill, gradients, loss_of
from tests.grids import grid


class Reversed(nn.Module):
    """Parameters in the order in which backward reaches them, against what an engine expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("wrap", [GradientAllReduce, TopK, PowerSGD])
def test_buckets_follow_the_measured_order(wrap: type) -> None:
    """From the second step on, and what was remembered of a parameter goes with it."""

    def rank(communicator: Communicator) -> tuple[list, list, list, dict, dict]:
        more = {"exact": (), "min_numel": 0} if wrap is TopK else {}
        algorithm = wrap(Reversed(), communicator=communicator, bucket_bytes=1, **more)
        before = [bucket.names for bucket in algorithm._engine.buckets.all]
        state = {}
        lay_out = algorithm._engine.lay_out

        def watched(order: list[int], vectors: Mapping[str, Named], *more: object, moves: bool = False) -> None:
            # What exchanges remembered, which are gone before others are made.
            state["before"] = {key: {name: t.clone() for name, t in named.items()} for key, named in vectors.items()}
            lay_out(order, vectors, *more, moves=moves)
            state["after"] = algorithm._engine.buckets.state()

        algorithm._engine.lay_out = watched
        for step in range(3):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        after = [bucket.names for bucket in algorithm._engine.buckets.all]
        return before, after, gradients(algorithm), state["before"], state["after"]

    (before, after, grads, old, new), (*_, others, _, _) = run_ranks(2, rank)
    assert [names[0].split(".")[1] for names in before] == list("4433221100")
    assert [names[0].split(".")[1] for names in after] == list("0011223344")
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert old.keys() == new.keys()
    for key, named in old.items():
        assert named.keys() == new[key].keys()
        assert all(torch.equal(value, new[key][name]) for name, value in named.items())
    assert bool(old) == (wrap is not GradientAllReduce)


def test_order_is_followed_once() -> None:
    """A branch taken now and then does not lay out buckets anew, and an order that changes for good does not either."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
            fill(self)

        def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
            first, second = (self.b, self.a) if turned else (self.a, self.b)
            return second(torch.tanh(first(x)))

    def rank(communicator: Communicator) -> list[list[str]]:
        algorithm = GradientAllReduce(Branch(), communicator=communicator, bucket_bytes=1)
        orders = []
        for step, turned in enumerate([False, True, False, True, True, True, False]):
            algorithm.zero_grad()
            algorithm(batch(0, step), turned).sum().backward()
            orders.append([bucket.names[0][0] for bucket in algorithm._engine.buckets.all])
        return orders

    first, second = run_ranks(2, rank)
    assert first == second
    assert [order[0] for order in first] == ["b"] * 7


@grid(kind=[nn.Embedding, nn.EmbeddingBag], size=[1, 2, 3], cover=1)
def test_sparse_gradients_are_averaged_row_by_row(size: int, kind: type) -> None:
    """Rows that one rank, all, or none touched; and, in the last step, no gradient on rank 0."""

    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.table = kind(11, 3, sparse=sparse)
            self.head = nn.Linear(3, 2)
            fill(self)

        def forward(self, words: torch.Tensor, use: bool) -> torch.Tensor:
            return self.head(self.table(words) if use else torch.ones(1, 3))

    def words(r: int) -> torch.Tensor:
        return torch.tensor([[r, 5, 5], [2 * r, 7, r]])

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        algorithm = ByteGrad(Words(sparse=True), communicator=communicator)
        found = []
        for step in range(2):
            algorithm.zero_grad()
            algorithm(words(communicator.rank), step == 0 or communicator.rank > 0).square().sum().backward()
            grad = algorithm.module.table.weight.grad
            found.append(torch.zeros(11, 3) if grad is None else grad.to_dense())
            assert (grad is None) == (step == 1 and size == 1)
            assert grad is None or grad.is_sparse
        return found

    everyone = run_ranks(size, rank)
    for step in range(2):
        plain = Words(sparse=False)
        for r in range(size):
            if step == 0 or r > 0:
                plain(words(r), True).square().sum().div(size).backward()
        expected = torch.zeros(11, 3) if plain.table.weight.grad is None else plain.table.weight.grad
        for found in everyone:
            assert torch.equal(found[step], everyone[0][step])
            assert torch.allclose(found[step], expected, rtol=1e-5, atol=1e-6)


def test_model_of_sparse_gradients_only() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        algorithm = GradientAllReduce(nn.Embedding(5, 2, sparse=True), communicator=communicator)
        algorithm(torch.tensor([communicator.rank])).sum().backward()
        return algorithm.module.weight.grad.to_dense()

    for grad in run_ranks(2, rank):
        assert grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0], [1, 2, 3]]])
def test_hierarchical_means_are_exact(nodes: list[list[int]]) -> None:
    def rank(communicator: Communicator) -> list:
        algorithm = GradientAllReduce(
            Odd(), communicator=communicator, hierarchical=True, nodes=nodes, bucket_bytes=600
        )
        for step in range(2):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        found = gradients(algorithm)
        algorithm.close()
        return found

    everyone = run_ranks(4, rank)
    plain = Odd()
    (sum(loss_of(plain, r, 1) for r in range(4)) / 4).backward()
    for grads in everyone:
        for ours, expected, other in zip(grads, gradients(plain), everyone[0], strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or (torch.equal(ours, other) and torch.allclose(ours, expected, atol=1e-5))


def test_codecs_by_group_step_and_size() -> None:
    """A parameter's codec is told by its name, what is small or of one dimension stays exact, and codecs change by step."""

    def rank(communicator: Communicator) -> tuple[list, list, list[set[str]]]:
        algorithm = CompressedAllReduce(
            Odd(),
            communicator=communicator,
            codec={0: None, 1: "absmax_int8", 2: "absmax_int4"},
            groups={"second.*": "identity"},
            exact="1d",
        )
        kinds = [set(bucket.names) for bucket in algorithm._engine.buckets.all]
        plain, found, expected = Odd(), [], []
        for step in range(3):
            for module, kept in ((algorithm, found), (plain, expected)):
                module.zero_grad()
                loss_of(module, communicator.rank, step).backward()
                kept.append(gradients(module))
        return found, expected, kinds

    everyone = run_ranks(2, rank)
    assert sorted(map(sorted, everyone[0][2])) == [["first.bias", "first.weight", "scale"], ["second.weight"]]
    names = [name for name, _ in Odd().named_parameters()]
    errors = {}
    for step in range(3):
        for name, ours, a, b in zip(
            names, everyone[0][0][step], everyone[0][1][step], everyone[1][1][step], strict=True
        ):
            if ours is not None:
                errors[step, name] = float((ours - (a + b) / 2).abs().max() / a.abs().max())
    exact = [error for (step, name), error in errors.items() if name != "first.weight" or step == 0]
    assert max(exact) < 1e-6
    assert 1e-4 < errors[1, "first.weight"] < errors[2, "first.weight"] < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more, got -1"),
        ({"codec": {-1: "sign"}}, "by the step from which on they are used, 0 or more, got -1"),
        ({"codec": "nothing"}, "nothing"),
    ],
)
def test_plans_that_make_no_sense(options: dict, message: str) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            CompressedAllReduce(Odd(), communicator=communicator, **options)

    run_ranks(1, rank)


def test_residual_of_a_parameter_without_a_gradient_is_not_lost() -> None:
    """Two branches take turns: what error feedback sends for the one that rests is applied too."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            fill(self)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return self.left(x) if left else self.right(x)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        algorithm = SignSGD(Turns(), communicator=communicator, min_numel=0)
        applied = produced = torch.zeros(32, 32)
        for step in range(6):
            algorithm.zero_grad()
            x = batch(communicator.rank, step, 32)
            algorithm(x, step % 2 == 0).sum().backward()
            if step % 2 == 0:
                produced = produced + x.sum(0).expand(32, 32)
            if algorithm.module.left.weight.grad is not None:
                applied = applied + algorithm.module.left.weight.grad
        vectors = algorithm.algorithm_state_dict()["vectors"]
        return (
            applied,
            produced,
            vectors["worker"]["left.weight"].view(32, 32),
            vectors["owner"]["left.weight"].view(32, 32),
        )

    everyone = run_ranks(2, rank)
    owner = everyone[0][3]
    kept = sum(residual for _, _, residual, _ in everyone) / 2
    made = sum(produced for _, produced, _, _ in everyone) / 2
    assert torch.allclose(everyone[0][0] + kept + owner, made, atol=1e-4)


@grid(
    cover=1,
    make__message=[
        (lambda *a, **k: DoubleSqueeze(*a, codec="topk", **k), "encodes means again, which TopK"),
        (lambda *a, **k: DoubleSqueeze(*a, owner_feedback=False, **k), "both passes, got owner_feedback=False"),
        (lambda *a, **k: TernGrad(*a, shared=True, error_feedback=True, **k), "shared scales allow no error feedback"),
        (lambda *a, **k: TernGrad(*a, clip=0.0, **k), "clip must be above 0, or None, got 0"),
        (
            lambda *a, **k: SignSGD(*a, majority_vote=True, error_feedback=True, **k),
            "a majority vote has no error feedback",
        ),
        (lambda *a, **k: DGC(*a, error_feedback=False, **k), "DGC is error feedback"),
        (lambda *a, **k: DGC(*a, momentum=1.0, **k), "momentum must be 0 or more and below 1, got 1"),
        (lambda m, **k: DGC(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9), **k), "with momentum=0"),
        (lambda *a, **k: PowerSGD(*a, start_step=-1, **k), "start_step must be 0 or more, got -1"),
    ],
)
def test_options_that_make_no_sense(make: Callable[..., Algorithm], message: str) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            make(Odd(), communicator=communicator)

    run_ranks(1, rank)


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 9}, {"masking": False}, {"nesterov": True}])
def test_overflow_does_not_stay_in_a_velocity(warmup: dict) -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = DGC(Odd(), communicator=communicator, ratio=0.5, exact=(), min_numel=0, **warmup)
        for step in range(3):
            algorithm.zero_grad()
            loss = loss_of(algorithm, communicator.rank, step)
            (loss * float("inf") if step == 1 and communicator.rank == 0 else loss).backward()
            finite = all(g.isfinite().all() for g in gradients(algorithm) if g is not None)
            assert finite == (step != 1)

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:the mean of bucket 0:RuntimeWarning")
@pytest.mark.parametrize(("action", "then"), [("warn", "Sign"), ("widen", "AbsMaxInt4"), ("exact", "None")])
def test_guard_sees_what_is_lost_and_acts(action: str, then: str) -> None:
    def rank(communicator: Communicator) -> tuple[str, float, dict[str, float], list]:
        guard = Guard(every=2, bound=1e-3, action=action)
        algorithm = SignSGD(Odd(), communicator=communicator, guard=guard, exact=(), min_numel=0)
        loss_of(algorithm, communicator.rank, 0).backward()
        first = algorithm.stats().errors
        bucket = algorithm._engine.buckets.all[0]
        return (
            type(algorithm.policy.codec(bucket.kind, 1)).__name__,
            first["first.weight"],
            first,
            algorithm.policy.state(),
        )

    first, second = run_ranks(2, rank)
    assert first == second
    assert first[0].replace("NoneType", "None") == then
    assert 0.1 < first[1] < 2
    assert set(first[2]) == {"first.weight", "first.bias", "second.weight", "scale"}


def test_guard_that_makes_no_sense() -> None:
    for options, message in (({"every": 0}, "every"), ({"bound": 0.0}, "bound"), ({"action": "pray"}, "action")):
        with pytest.raises(ValueError, match=message):
            Guard(**options)


def test_ranks_whose_orders_differ_for_good_lay_out_once() -> None:
    class Turned(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.a, self.b, self.turned = nn.Linear(7, 7), nn.Linear(7, 7), turned
            fill(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = (self.b, self.a) if self.turned else (self.a, self.b)
            return second(torch.tanh(first(x)))

    def rank(communicator: Communicator) -> int:
        algorithm = TopK(Turned(communicator.rank == 1), communicator=communicator, bucket_bytes=1)
        lay_out, count = algorithm._engine.lay_out, [0]

        def counted(order: list[int], vectors: Mapping[str, Named]) -> None:
            count[0] += 1
            lay_out(order, vectors)

        algorithm._engine.lay_out = counted
        for step in range(6):
            algorithm.zero_grad()
            algorithm(batch(0, step)).sum().backward()
        return count[0]

    assert max(run_ranks(2, rank)) <= 1


def test_nothing_is_kept_of_buckets_that_are_no_more() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = TopK(Odd(), communicator=communicator, bucket_bytes=1, exact=(), min_numel=0)
        loss_of(algorithm, communicator.rank, 0).backward()
        before = algorithm.stats().residual_norm
        engine = algorithm._engine
        engine._bucket_options = dataclasses.replace(engine._bucket_options, bucket_bytes=10 << 20)
        engine.lay_out(engine.buckets.order, engine.buckets.state())
        assert len(algorithm._engine.buckets.all) == 1
        assert algorithm.stats().residual_norm == pytest.approx(before)

    run_ranks(2, rank)


def test_momentum_of_float64_is_float64() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        algorithm = DGC(module, communicator=communicator)
        algorithm(torch.full((1, 2), 1 / 3, dtype=torch.float64)).sum().backward()
        return module.weight.grad

    for grad in run_ranks(2, rank):
        assert grad.tolist() == [[1 / 3, 1 / 3]]


def test_wider_codecs_keep_to_the_alignment() -> None:
    assert wider(Sign(), 256) == AbsMaxInt4(block=128)
    assert wider(Sign(64), 64) == AbsMaxInt4(block=64)
    assert wider(AbsMaxInt4(), 128) == AbsMaxInt8(block=128)
    assert wider(TopKCodec(), 1) == Cast()
    assert wider(AbsMaxInt8(), 256) == Cast()
    assert wider(Cast(), 1) is None
