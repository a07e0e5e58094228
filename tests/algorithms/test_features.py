"""What a training loop may do beside plain steps: clip, weigh, join, accumulate, scale, compile, switch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
from bagua_kernels.algorithms.guard import wider
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8, Cast, Sign
from bagua_kernels.compression import TopK as TopKCodec
from tests.algorithms.ranks import Odd, batch, fill, gradients


def loss_of(module: nn.Module, rank: int, step: int, n: int = 4) -> torch.Tensor:
    """A mean over n of the rank's samples of a step."""
    return module(batch(rank, step)[:n]).square().mean()


def test_clipping_is_by_the_norm_of_the_mean() -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, list]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        loss_of(algorithm, communicator.rank, 0).backward()
        return algorithm.clip_grad_norm_(0.01), gradients(algorithm)

    everyone = run_ranks(2, rank)
    both = Odd()
    ((loss_of(both, 0, 0) + loss_of(both, 1, 0)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(both.parameters(), 0.01)
    for found, clipped in everyone:
        assert torch.allclose(found, norm)
        for ours, expected in zip(clipped, gradients(both), strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.allclose(ours, expected, atol=1e-6)


def test_weights_make_means_over_samples() -> None:
    """Ranks with 1, 2 and 4 samples of a batch: the gradient of the mean over all seven."""

    def rank(communicator: Communicator) -> list:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        n = 1 << communicator.rank
        for _ in range(2):
            algorithm.zero_grad()
            algorithm.weigh(n)
            loss_of(algorithm, communicator.rank, 0, n).backward()
        with pytest.raises(ValueError, match=r"weight must be finite and 0 or more, got -1\.0 on rank 1"):
            algorithm.weigh(-1 if communicator.rank == 1 else 1)
        with pytest.raises(ValueError, match="all ranks gave the weight 0"):
            algorithm.weigh(0)
        return gradients(algorithm)

    everyone = run_ranks(3, rank)
    whole = Odd()
    x = torch.cat([batch(r, 0)[: 1 << r] for r in range(3)])
    whole(x).square().mean().backward()
    for grads in everyone:
        for ours, expected in zip(grads, gradients(whole), strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [GradientAllReduce, ByteGrad, PowerSGD])
def test_join_with_uneven_numbers_of_batches(wrap: type) -> None:
    """Rank r has r + 1 batches; each step averages over those that still train, and all end with the last one's model."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], int]:
        algorithm = wrap(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        with algorithm.join():
            for step in range(communicator.rank + 1):
                optimizer.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        # And all together again.
        optimizer.zero_grad()
        loss_of(algorithm, communicator.rank, 9).backward()
        optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()], algorithm.stats().steps

    everyone = run_ranks(3, rank)
    assert [steps for _, steps in everyone] == [4, 4, 4]
    for other, _ in everyone[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everyone[0][0], other, strict=True))
    if wrap is GradientAllReduce:
        plain = Odd()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for ranks, step in (((0, 1, 2), 0), ((1, 2), 1), ((2,), 2), ((0, 1, 2), 9)):
            optimizer.zero_grad()
            (sum(loss_of(plain, r, step) for r in ranks) / len(ranks)).backward()
            optimizer.step()
        for ours, expected in zip(everyone[0][0], plain.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_join_hands_over_the_optimizer() -> None:
    """All end with the state of the rank that trained last, which is not rank 0."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], list[float]]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.Adam(algorithm.parameters(), lr=0.1)
        with algorithm.join(optimizer):
            for step in range((2, 5, 3)[communicator.rank]):
                optimizer.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        state = [optimizer.state[p] for p in algorithm.parameters() if p.requires_grad]
        # And all together again.
        optimizer.zero_grad()
        loss_of(algorithm, communicator.rank, 9).backward()
        steps = [float(of["step"]) for of in state]
        optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()], steps

    everyone = run_ranks(3, rank)
    for parameters, steps in everyone:
        assert set(steps) == {5.0}
        assert all(torch.equal(a, b) for a, b in zip(everyone[0][0], parameters, strict=True))


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
        before = [bucket.names for bucket in algorithm._engine.buckets]
        state = {}
        reorder = algorithm._reorder

        def watched(order: list[int]) -> None:
            state["before"] = algorithm._remembered()
            reorder(order)
            state["after"] = algorithm._remembered()

        algorithm._engine._reorder = watched
        for step in range(3):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        after = [bucket.names for bucket in algorithm._engine.buckets]
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


def test_order_that_changes_once_is_left_alone() -> None:
    """A branch taken now and then must not lay out buckets at each step."""

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
            orders.append([bucket.names[0][0] for bucket in algorithm._engine.buckets])
        return orders

    first, second = run_ranks(2, rank)
    assert first == second
    assert [order[0] for order in first] == ["b", "b", "b", "b", "a", "a", "a"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
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


def test_parameters_that_are_shared_between_layers() -> None:
    def rank(communicator: Communicator) -> list:
        module = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        module[2].weight = module[0].weight
        fill(module)
        algorithm = GradientAllReduce(module, communicator=communicator)
        loss_of(algorithm, communicator.rank, 0).backward()
        return gradients(algorithm)

    first, second = run_ranks(2, rank)
    module = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    module[2].weight = module[0].weight
    fill(module)
    ((loss_of(module, 0, 0) + loss_of(module, 1, 0)) / 2).backward()
    for a, b, expected in zip(first, second, gradients(module), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, expected, atol=1e-6)


def test_several_forward_passes_before_one_backward() -> None:
    def rank(communicator: Communicator) -> list:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        (loss_of(algorithm, communicator.rank, 0) + loss_of(algorithm, communicator.rank, 1)).backward()
        return gradients(algorithm)

    everyone = run_ranks(2, rank)
    plain = Odd()
    (sum(loss_of(plain, r, s) for r in range(2) for s in range(2)) / 2).backward()
    for ours, expected in zip(everyone[0], gradients(plain), strict=True):
        assert ours is None or torch.allclose(ours, expected, atol=1e-5)


def test_two_models_in_one_process_take_turns() -> None:
    """As a generator and a discriminator do."""

    def rank(communicator: Communicator) -> tuple[list, list]:
        one = GradientAllReduce(Odd(1), communicator=communicator)
        two = ByteGrad(Odd(2), communicator=communicator)
        for step in range(2):
            for algorithm in (one, two):
                algorithm.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
        return gradients(one), gradients(two)

    first, second = run_ranks(2, rank)
    for a, b in zip(first, second, strict=True):
        assert all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("wrap", [GradientAllReduce, ByteGrad])
def test_activation_checkpointing(wrap: type) -> None:
    class Checkpointed(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
            return self.second(hidden) * self.scale

    def rank(communicator: Communicator) -> tuple[list, list]:
        grads = []
        for kind in (Odd, Checkpointed):
            algorithm = wrap(kind(), communicator=communicator)
            loss_of(algorithm, communicator.rank, 0).backward()
            grads.append(gradients(algorithm))
        return tuple(grads)

    for plain, checkpointed in run_ranks(2, rank):
        assert all(a is None or torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


def test_grad_scaler_skips_a_step_on_all_ranks() -> None:
    """An overflow on one rank is one on all, since the mean is infinite."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], float]:
        algorithm = ByteGrad(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(algorithm, communicator.rank, step)
            scaler.scale(loss * float("inf") if step == 1 and communicator.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in algorithm.parameters()], scaler.get_scale()

    (first, scale), (second, other) = run_ranks(2, rank)
    assert scale == other == 512.0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(p.isfinite().all() for p in first)


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (SignSGD, {}),
        (CompressedAllReduce, {"codec": {0: "sign", 3: "absmax_int4", 5: None}}),
        (TopK, {"ratio": 0.1}),
        (DGC, {"ratio": 0.1, "clip": 0.05}),
        (PowerSGD, {"rank": 2}),
        (PowerSGD, {"start_step": 2}),
    ],
)
def test_scales_that_change_leave_all_bits(wrap: type, options: dict) -> None:
    """Residuals, and velocities, follow the scaler's scale, and are saved without it."""
    all_of_them = {"exact": (), "min_numel": 0} if issubclass(wrap, CompressedAllReduce) else {}

    def rank(communicator: Communicator, scaled: bool) -> tuple[list[torch.Tensor], dict, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        more = {"communicator": communicator, "scaler": scaler, **options, **all_of_them}
        one, other = wrap(Odd(), **more), wrap(Odd(), **more)
        found = []
        for step in range(6):
            if step == 4:
                other.load_algorithm_state_dict(one.algorithm_state_dict())
                one = other
            one.zero_grad()
            scaler.scale(loss_of(one, communicator.rank, step)).backward()
            found += [g / scaler.get_scale() for g in gradients(one) if g is not None]
            if scaled and step in (1, 3):
                scaler.update(2.0**9 if step == 1 else 2.0**12)
        return found, one.algorithm_state_dict()["vectors"], one.stats().residual_norm

    everyone = run_ranks(2, partial(rank, scaled=True))
    for scaled, plain in zip(everyone, run_ranks(2, partial(rank, scaled=False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(scaled[0], plain[0], strict=True))
        assert scaled[1].keys() == plain[1].keys()
        for key, named in scaled[1].items():
            assert all(torch.equal(value, plain[1][key][name]) for name, value in named.items())
        assert scaled[2] == pytest.approx(plain[2])


def test_switch_in_mid_training() -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        model = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                old, model = model, model.switch_to(TopK, ratio=0.1, exact=(), min_numel=0)
                assert model.stats().steps == 2
                assert old.module is model.module
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        assert model.stats().steps == 4
        assert model.stats().residual_norm > 0
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
        kinds = [set(bucket.names) for bucket in algorithm._engine.buckets]
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


def test_votes_know_no_weights() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = SignSGD(Odd(), communicator=communicator, majority_vote=True)
        with pytest.raises(ValueError, match="SignSGD as it was made knows no weights"):
            algorithm.weigh(2)
        with pytest.raises(ValueError, match="knows no weights"), algorithm.join():
            pass

    run_ranks(1, rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
        bucket = algorithm._engine.buckets[0]
        return type(algorithm.codec_at(bucket, 1)).__name__, first["first.weight"], first, algorithm.decisions()

    first, second = run_ranks(2, rank)
    assert first == second
    assert first[0].replace("NoneType", "None") == then
    assert 0.1 < first[1] < 2
    assert set(first[2]) == {"first.weight", "first.bias", "second.weight", "scale"}


def test_guard_that_makes_no_sense() -> None:
    for options, message in (({"every": 0}, "every"), ({"bound": 0.0}, "bound"), ({"action": "pray"}, "action")):
        with pytest.raises(ValueError, match=message):
            Guard(**options)


def test_buffers_may_be_averaged() -> None:
    """Running means of both ranks, and what cannot be averaged is rank 0's."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, int]:
        module = nn.BatchNorm1d(7, momentum=1.0)
        algorithm = GradientAllReduce(module, communicator=communicator, average_buffers=True)
        module.running_mean.fill_(float(communicator.rank))
        module.num_batches_tracked.fill_(10 * communicator.rank)
        module.momentum = 0.0
        algorithm(batch(0, 0))
        return module.running_mean.clone(), int(module.num_batches_tracked)

    for mean, count in run_ranks(3, rank):
        assert mean.tolist() == [1.0] * 7
        assert count == 1


def test_stats_for_a_board() -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: dict[str, tuple[float, int]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name] = (value, step)

    def rank(communicator: Communicator) -> None:
        algorithm = TopK(Odd(), communicator=communicator, guard=Guard(every=1, bound=10), exact=(), min_numel=0)
        loss_of(algorithm, communicator.rank, 0).backward()
        writer, stats = Writer(), algorithm.stats()
        stats.write(writer, 17, "run")
        assert writer.seen["run/steps"] == (1, 17)
        assert writer.seen["run/bytes_sent"] == (stats.bytes_sent, 17)
        assert writer.seen["run/residual_norm"][0] > 0
        assert writer.seen["run/error/second.weight"][0] == stats.errors["second.weight"]

    run_ranks(2, rank)


@pytest.mark.parametrize("weighed", ["before", "within"])
def test_weights_and_join(weighed: str) -> None:
    """A weight given before does not last, and within every rank announces its own."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        if weighed == "before":
            algorithm.weigh(1 + communicator.rank)
            loss_of(algorithm, communicator.rank, 8).backward()
        with algorithm.join():
            for step in range(2 if communicator.rank else 4):
                optimizer.zero_grad()
                if weighed == "within":
                    algorithm.weigh(1.0)
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = Odd()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ranks = (0, 1) if step < 2 else (0,)
        (sum(loss_of(plain, r, step) for r in ranks) / len(ranks)).backward()
        optimizer.step()
    for ours, expected in zip(first, plain.parameters(), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


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

        def counted(order: list[int]) -> None:
            count[0] += 1
            lay_out(order)

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
        algorithm._engine._bucket_bytes = 10 << 20
        algorithm._lay_out(algorithm._engine.order, algorithm._remembered())
        assert len(algorithm._engine.buckets) == 1
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


def test_switch_on_one_rank_keeps_the_count() -> None:
    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Odd(), communicator=communicator)
        model.load_algorithm_state_dict({"steps": 1000, "order": [], "vectors": {}, "decisions": []})
        assert model.switch_to(TopK).stats().steps == 1000

    run_ranks(1, rank)
