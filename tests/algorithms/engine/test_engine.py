"""What the engine does beside averaging: its threads' life, its buckets, and its errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Hashable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_kernels.algorithms import Algorithm, ByteGrad, Exchange, GradientAlgorithm, GradientAllReduce, SignSGD
from bagua_kernels.bucket import Bucket, partition
from bagua_kernels.comm import Communicator, Work, run_ranks
from bagua_kernels.errors import CommunicationError
from tests.algorithms.ranks import Odd, batch, gradients


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


def test_what_is_remembered_outlives_another_order_of_buckets() -> None:
    """After the first pass buckets are laid out in the order in which gradients came, here that of registration."""

    def rank(communicator: Communicator) -> None:
        class Backwards(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last, self.first = nn.Parameter(torch.ones(40, 1)), nn.Parameter(torch.ones(40, 1))

            def forward(self) -> torch.Tensor:
                first = self.first.exp() * 3
                return (first + self.last.sin() * torch.arange(40.0)[:, None]).square().sum()

        module = Backwards()
        algorithm = SignSGD(module, communicator=communicator, bucket_bytes=1, exact=(), min_numel=0)
        plain = Backwards()
        plain().backward()
        algorithm().backward()
        assert algorithm._engine is not None
        state = algorithm.algorithm_state_dict()
        assert state["order"] == ["last", "first"]
        for name, p in module.named_parameters():
            produced = plain.get_parameter(name).grad
            assert p.grad is not None
            assert produced is not None
            # Both ranks have the same gradients, so that owners' payloads lack nothing.
            lacking = state["vectors"]["worker"][name].view_as(produced)
            torch.testing.assert_close(p.grad + lacking, produced, rtol=1e-4, atol=1e-4)
            assert lacking.any()

    run_ranks(2, rank)


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
        with pytest.raises(ValueError, match="in_flight differs between ranks: 1 on rank 0, 2 on rank 1"):
            GradientAllReduce(Odd(), communicator=communicator, in_flight=1 + communicator.rank)

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
        algorithm.communicator.abort()
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

    def test_buckets_grow_from_a_small_first_one(self) -> None:
        tensors = [torch.empty(1) for _ in range(60)]
        sizes = [len(group) for group in partition(tensors, 80, first_bytes=8)]
        assert sizes == [2, 12, 20, 20, 6]
        assert [len(group) for group in partition(tensors, 80, first_bytes=200)] == [20, 20, 20]

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
