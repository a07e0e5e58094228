"""What the engine does beside averaging: overlap, its thread's life, and its errors."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, Exchange, GradientAlgorithm, GradientAllReduce
from bagua_kernels.algorithms.gradient_all_reduce import Mean
from bagua_kernels.bucket import Bucket, partition
from bagua_kernels.comm import Communicator, Work, run_ranks
from bagua_kernels.errors import CommunicationError
from tests.algorithms.ranks import Odd, batch, fill, gradients


def communication_threads() -> int:
    return sum(t.name == "bagua_kernels communication" for t in threading.enumerate())


@pytest.mark.parametrize("kind", [ByteGrad, GradientAllReduce])
def test_threads_and_model_go_with_the_algorithm(kind: type[Algorithm]) -> None:
    def rank(communicator: Communicator) -> weakref.ref[nn.Module]:
        module = Odd()
        algorithm = kind(module, communicator=communicator)
        algorithm(batch(communicator.rank, 0)).square().mean().backward()
        return weakref.ref(module)

    gone = run_ranks(2, rank)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert communication_threads() == 0


def test_close_removes_hooks() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        algorithm = GradientAllReduce(module, communicator=communicator)
        algorithm.close()
        module(batch(communicator.rank, 0)).square().mean().backward()
        plain = Odd()
        plain(batch(communicator.rank, 0)).square().mean().backward()
        assert torch.equal(module.first.weight.grad, plain.first.weight.grad)

    run_ranks(2, rank)


class Logged(GradientAlgorithm):
    """Notes when an exchange starts, and takes its time for it."""

    name = "logged"

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        outer = self

        class Slow(Exchange):
            def run(self, step: int) -> Iterator[Work]:
                yield from ()
                outer.log.append(("exchange", bucket.index))
                time.sleep(0.02)

        return Slow(bucket, communicator)


class Noted(torch.autograd.Function):
    """Notes when a gradient passes, and holds it up for long enough that the other thread gets its turn."""

    @staticmethod
    def forward(ctx, x, log, number):
        ctx.note = (log, number)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        log, number = ctx.note
        time.sleep(0.05)
        log.append(("backward", number))
        return grad, None, None


def test_exchanges_start_in_order_and_during_backward() -> None:
    def rank(communicator: Communicator) -> list[tuple[str, int]]:
        layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
        algorithm = Logged(nn.Sequential(*layers), communicator=communicator, bucket_bytes=1)
        algorithm.log = []
        x = batch(0, 0, 8)
        for number, layer in enumerate(layers):
            x = Noted.apply(layer(x), algorithm.log, number)
        x.sum().backward()
        return algorithm.log

    log = run_ranks(2, rank)[0]
    assert [number for kind, number in log if kind == "exchange"] == [0, 1, 2, 3]
    assert log.index(("exchange", 0)) < log.index(("backward", 1))


def test_two_buckets_are_exchanged_at_a_time() -> None:
    """Each waits in its exchange until the other is in its own."""

    class Paired(GradientAllReduce):
        name = "paired"

        def __init__(self, *arguments: object, both: threading.Barrier, **options: object) -> None:
            self.both = both
            super().__init__(*arguments, **options)

        def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
            both = self.both

            class Together(Mean):
                def run(self, step: int) -> Iterator[Work]:
                    both.wait(20)
                    yield from super().run(step)

            return Together(bucket, communicator)

    def rank(communicator: Communicator) -> list[torch.Tensor | None]:
        module = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False))
        fill(module)
        options = {"communicator": communicator, "bucket_bytes": 1}
        # Held by a name: what is deleted while backward goes on exchanges nothing more.
        paired = Paired(module, both=threading.Barrier(2), **options)
        paired(batch(communicator.rank, 0)).square().mean().backward()
        found = gradients(module)
        paired.close()
        one = GradientAllReduce(nn.Sequential(*module), lanes=1, **options)
        one.zero_grad()
        one(batch(communicator.rank, 0)).square().mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(one), strict=True))
        return found

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Ahead(GradientAllReduce):
    """Waits for no bucket but the last before the one after it has begun, and counts those under way.

    Args:
        fails: the bucket whose end is an error.
    """

    name = "ahead"

    def __init__(self, *arguments: Any, fails: int | None = None, **options: Any) -> None:
        self.fails, self.lock = fails, threading.Lock()
        self.order: list[int] = []
        self.under_way = self.most = 0
        super().__init__(*arguments, **options)
        self.begun = [threading.Event() for _ in self._engine.buckets.all]

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        return AheadMean(bucket, communicator, self)


class AheadMean(Mean):
    one_collective = True

    def __init__(self, bucket: Bucket, communicator: Communicator, ahead: Ahead) -> None:
        super().__init__(bucket, communicator)
        self.ahead = ahead

    def run(self, step: int) -> Iterator[Work]:
        ahead, index = self.ahead, self.bucket.index
        (work,) = super().run(step)
        with ahead.lock:
            ahead.under_way += 1
            ahead.most = max(ahead.most, ahead.under_way)
            ahead.order.append(index)
            ahead.begun[index].set()
        yield work
        if not all(begun.wait(20) for begun in ahead.begun[: index + 2]):
            raise TimeoutError(f"bucket {index + 1} waits for bucket {index}")
        with ahead.lock:
            ahead.under_way -= 1
        if index == ahead.fails:
            raise ArithmeticError("boom")


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_all_reduces_are_under_way_on_one_connection(in_backward: bool) -> None:
    """And no more; they start in order."""

    def train(kind: Callable[..., Algorithm], communicator: Communicator) -> tuple[Any, list[torch.Tensor]]:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
        fill(module)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        options = {"communicator": communicator, "bucket_bytes": 1, "apply_in_backward": in_backward}
        algorithm = kind(module, optimizer, **options)
        algorithm(batch(communicator.rank, 0, 8)).square().mean().backward()
        optimizer.step()
        return algorithm, [p.detach().clone() for p in module.parameters()]

    def rank(communicator: Communicator) -> None:
        ahead, found = train(Ahead, communicator)
        assert ahead.order == [0, 1, 2, 3, 4]
        assert ahead.most == 2
        assert len(ahead._engine.communicators) == len(ahead._communicators()) == 1
        _, expected = train(functools.partial(GradientAllReduce, lanes=1), communicator)
        assert all(map(torch.equal, found, expected))

    run_ranks(3, rank)


def test_an_error_while_the_next_is_under_way() -> None:
    """Leaves backward, when that one has ended too."""

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        ahead = Ahead(module, communicator=communicator, bucket_bytes=1, fails=0)
        x = batch(communicator.rank, 0, 8)
        with pytest.raises(ArithmeticError, match="boom"):
            ahead(x).sum().backward()
        assert ahead.order == [0, 1]
        with pytest.raises(RuntimeError, match="was interrupted while gradients were exchanged"):
            ahead(x).sum().backward()

    run_ranks(2, rank)


def test_gradients_of_one_memory_are_exchanged() -> None:
    """Backward of `cat` gives parts of one tensor, which count changes together though they are no views."""

    def rank(communicator: Communicator) -> None:
        class Joined(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

            def forward(self) -> torch.Tensor:
                return torch.cat([self.a, self.b]).square().sum()

        module = Joined()
        algorithm = GradientAllReduce(module, communicator=communicator)
        for _ in range(3):
            algorithm.zero_grad()
            with algorithm.no_sync():
                algorithm().backward()
            algorithm().backward()
            assert module.a.grad.tolist() == [4.0] * 3
            assert module.b.grad.tolist() == [4.0] * 4

    run_ranks(2, rank)


def test_options_that_differ_between_ranks_are_refused() -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="lanes differs between ranks: 1 on rank 0, 2 on rank 1"):
            GradientAllReduce(Odd(), communicator=communicator, lanes=1 + communicator.rank)

    run_ranks(2, rank)


def test_gradients_may_stay_in_their_buckets() -> None:
    """Kept gradients are views of a bucket, and change one another's version."""

    def rank(communicator: Communicator) -> None:
        module, copied = Odd(), Odd()
        algorithm = ByteGrad(module, communicator=communicator)
        fresh = ByteGrad(copied, communicator=communicator)
        for step in range(3):
            algorithm.zero_grad(set_to_none=False)
            fresh.zero_grad()
            for each in (algorithm, fresh):
                each(batch(communicator.rank, step)).square().mean().backward()
            for kept, other in zip(gradients(module), gradients(copied), strict=True):
                assert (kept is None) == (other is None)
                assert kept is None or torch.equal(kept, other)

    run_ranks(2, rank)


def test_dense_gradient_of_a_sparse_embedding_is_refused() -> None:
    def rank(communicator: Communicator) -> None:
        embedding = nn.Embedding(10, 4, sparse=True)
        algorithm = ByteGrad(embedding, communicator=communicator)
        with pytest.raises(TypeError, match=r"sparse gradient for parameter 'weight'.*sparse=False"):
            embedding.weight.square().sum().backward()
        algorithm.close()

    run_ranks(2, rank)


def test_interrupted_backward_is_noticed() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("on purpose")

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        algorithm = GradientAllReduce(module, communicator=communicator, bucket_bytes=1)
        hidden = module[0](batch(0, 0))
        with pytest.raises(ArithmeticError, match="on purpose"):
            module[1](Fails.apply(hidden)).sum().backward()
        with pytest.raises(RuntimeError, match="interrupted while gradients were exchanged"):
            algorithm(batch(0, 0))

    run_ranks(2, rank)


def test_error_of_an_exchange_leaves_backward() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        algorithm._communicator.abort()
        with pytest.raises(CommunicationError):
            algorithm.module(batch(0, 0)).square().mean().backward()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: nn.Linear(3, 3 + r), r"modules differ between ranks: rank 0 has 'weight \(3, 3\)"),
        (lambda r: nn.Linear(3, 3, bias=r == 0), "modules differ between ranks: 2 tensors on rank 0, 1 on rank 1"),
        (lambda r: nn.Linear(3, 3, dtype=torch.float64 if r else None), "rank 1 has 'weight .* torch.float64"),
    ],
)
def test_different_modules_are_refused(make, message: str) -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match=message):
            ByteGrad(make(communicator.rank), communicator=communicator)

    run_ranks(2, rank)


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=str)
def test_failed_constructors_leave_nothing_open(failing: tuple[int, ...]) -> None:
    """On all ranks alike, or on one, of which the others hear at their next collective."""

    def rank(communicator: Communicator) -> None:
        made: list[Communicator] = []
        duplicate = communicator.duplicate

        def watched() -> Communicator:
            made.append(duplicate())
            return made[-1]

        class Picky(GradientAllReduce):
            def place(self, name: str, parameter: nn.Parameter) -> tuple[Hashable, bool]:
                if communicator.rank in failing:
                    raise ValueError(f"{name} has no place")
                return super().place(name, parameter)

        communicator.duplicate = watched
        if communicator.rank in failing:
            with pytest.raises(ValueError, match="weight has no place"):
                Picky(nn.Linear(3, 3), communicator=communicator)
            assert [one.is_ended() for one in made] == [True]
        else:
            algorithm = Picky(nn.Linear(3, 3), communicator=communicator)
            with pytest.raises(CommunicationError):
                algorithm(batch(0, 0, 3)).sum().backward()

    run_ranks(2, rank)


def test_layouts_that_differ_are_refused() -> None:
    """Buckets follow the strides of parameters, so that equal shapes are not enough."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(4, 3)
        if communicator.rank:
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
        with pytest.raises(ValueError, match=r"strides=\(4, 1\).*rank 1 has .*strides=\(1, 3\)"):
            GradientAllReduce(module, communicator=communicator)
        with pytest.raises(ValueError, match=r"sparse=True.*sparse=False"):
            GradientAllReduce(nn.Embedding(3, 2, sparse=communicator.rank == 0), communicator=communicator)

    run_ranks(2, rank)


def test_reentrant_checkpoints_are_refused() -> None:
    """They would end a backward pass of their own before other gradients are there."""

    class Checkpointed(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda y: torch.tanh(self.first(y)), x.requires_grad_(), use_reentrant=True)
            return self.second(hidden)

    def rank(communicator: Communicator) -> None:
        algorithm = GradientAllReduce(Checkpointed(), communicator=communicator, bucket_bytes=1 << 20)
        algorithm.module.second.requires_grad_(False)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            algorithm(batch(0, 0)).sum().backward()

    run_ranks(2, rank)


def test_interrupted_wait_is_noticed() -> None:
    """Ctrl-C while exchanges are under way, and then another step."""

    def rank(communicator: Communicator) -> None:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        wait = algorithm._engine._wait

        def interrupted() -> None:
            wait()
            raise KeyboardInterrupt

        algorithm._engine._wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            algorithm(batch(0, 0)).square().mean().backward()
        for call in (lambda: algorithm(batch(0, 0)), lambda: algorithm.weigh(1), algorithm.algorithm_state_dict):
            with pytest.raises(RuntimeError, match="interrupted while gradients were exchanged"):
                call()

    run_ranks(2, rank)


def test_failed_exchange_keeps_nothing_alive() -> None:
    class Fails(GradientAlgorithm):
        name = "fails"

        def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
            class Failing(Exchange):
                def run(self, step: int) -> Iterator[Work]:
                    raise ZeroDivisionError("on purpose")

            return Failing(bucket, communicator)

    def rank(communicator: Communicator) -> weakref.ref[nn.Module]:
        algorithm = Fails(Odd(), communicator=communicator, bucket_bytes=1)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            algorithm.module(batch(0, 0)).square().mean().backward()
        return weakref.ref(algorithm)

    gone = run_ranks(2, rank)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert communication_threads() == 0


def test_wrong_device_and_dtype_are_refused() -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="'weight' is on meta, expected cpu"):
            ByteGrad(nn.Linear(3, 3, device="meta"), communicator=communicator)
        with pytest.raises(TypeError, match=r"'weight' is torch\.complex64"):
            ByteGrad(nn.Linear(3, 3, dtype=torch.complex64), communicator=communicator)

    run_ranks(2, rank)


def test_float64_is_exact() -> None:
    """No codec takes it, and whoever computes in it wants it all."""

    def rank(communicator: Communicator) -> torch.Tensor:
        algorithm = ByteGrad(nn.Linear(3, 3, dtype=torch.float64), communicator=communicator)
        algorithm(torch.full((1, 3), 1.0 + communicator.rank, dtype=torch.float64)).sum().backward()
        return algorithm.module.weight.grad

    for grad in run_ranks(2, rank):
        assert (grad == 1.5).all()


def test_optimizer_state_becomes_rank_0s() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module = Odd()
        optimizer = torch.optim.Adam(module.parameters())
        (module(batch(communicator.rank, 0)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        GradientAllReduce(module, optimizer, communicator=communicator)
        return optimizer.state[module.first.weight]["exp_avg"]

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


class TestPartition:
    def test_closes_at_the_target(self) -> None:
        tensors = [torch.empty(10) for _ in range(5)]
        assert partition(tensors, 80) == [[0, 1], [2, 3], [4]]
        assert partition(tensors, 1) == [[0], [1], [2], [3], [4]]
        assert partition(tensors, 1000) == [[0, 1, 2, 3, 4]]

    def test_what_is_large_has_a_bucket_alone(self) -> None:
        tensors = [torch.empty(n) for n in (1, 20, 2, 21, 3, 9)]
        assert partition(tensors, 80, alone=80) == [[1], [3], [0, 2, 4, 5]]
        assert partition(tensors, 12, alone=12) == [[1], [0, 2], [3], [4], [5]]
        assert partition(tensors, 80, alone=30) == [[1], [3], [0, 2, 4], [5]]
        assert partition(tensors, 80) == [[0, 1], [2, 3], [4, 5]]

    def test_buckets_grow_from_a_small_first_one(self) -> None:
        tensors = [torch.empty(1) for _ in range(60)]
        sizes = [len(group) for group in partition(tensors, 80, first_bytes=8)]
        assert sizes == [2, 12, 20, 20, 6]
        assert [len(group) for group in partition(tensors, 80, first_bytes=200)] == [20, 20, 20]

    def test_buckets_grow_from_what_has_one_alone(self) -> None:
        tensors = [torch.empty(30), *(torch.empty(1) for _ in range(60))]
        groups = partition(tensors, 80, first_bytes=8, alone=80)
        assert [len(group) for group in groups] == [1, 20, 20, 20]
        tensors = [torch.empty(2), *(torch.empty(1) for _ in range(60))]
        groups = partition(tensors, 80, first_bytes=4, alone=8)
        assert [len(group) for group in groups] == [1, 12, 20, 20, 8]

    def test_pieces_are_found_wherever_a_part_begins(self) -> None:
        shapes, exact = [(3,), (0,), (2, 4), (5,), (9,), (0,), (1,)], [False, False, False, True, False, False, False]
        bucket = Bucket([torch.empty(shape) for shape in shapes], align=8, exact=exact, flags=2)
        bucket.flat.copy_(torch.arange(40.0))
        assert bucket.flat.numel() == 40
        for begin in range(0, 40, 8):
            for end in range(begin, 41, 8):
                expected = [
                    bucket.flat[max(begin, span.start) : min(end, span.stop)].tolist()
                    for span in bucket.spans
                    if max(begin, span.start) < min(end, span.stop, 40)
                ]
                assert [piece.tolist() for piece in bucket.pieces(slice(begin, end))] == expected

    def test_one_dtype_a_bucket(self) -> None:
        tensors = [torch.empty(10, dtype=d) for d in (torch.float32, torch.float16, torch.float32, torch.float16)]
        assert partition(tensors, 1000) == [[0, 2], [1, 3]]
        assert partition(tensors, 40) == [[0], [2], [1, 3]]

    def test_bucket_of_mixed_dtypes_is_refused(self) -> None:
        with pytest.raises(ValueError, match="one dtype on one device"):
            Bucket([torch.empty(3), torch.empty(3, dtype=torch.float16)], align=1)

    def test_alignment_and_gaps(self) -> None:
        bucket = Bucket([torch.empty(3), torch.empty(2, 4)], align=8, flags=2)
        assert bucket.flat.numel() == 16
        assert bucket.whole.numel() == 18
        assert [v.storage_offset() for v in bucket.views] == [0, 8]
        bucket.flat.fill_(5)
        bucket.fill(0, torch.ones(3))
        assert bucket.flat[:8].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
        bucket.fill(1, None)
        assert bucket.flat[8:].tolist() == [0] * 8
