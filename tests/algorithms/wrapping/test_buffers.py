"""Buffers that ranks make equal between forward passes, while autograd has yet to go back through earlier ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, ByteGrad, GradientAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import batch, fill, gradients
from tests.grids import grid

Loss = Callable[[nn.Module, int, int], torch.Tensor]


class Normalized(nn.Module):
    """Batch norm, instance norm with statistics, and a constant that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.InstanceNorm1d(6, track_running_stats=True),
            nn.Linear(6, 3),
        )
        self.register_buffer("scale", torch.tensor([0.7, 1.1, 1.3]))
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[2](self.layers[1](self.layers[0](x)))
        return self.layers[4](self.layers[3](hidden.t()[None])[0].t()) / self.scale


class Replacing(nn.Module):
    """Puts another tensor in its buffer's place in each forward pass, and divides by it: backward needs its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("size", torch.ones(3))
        self.second_name = nn.Module()
        self.second_name.register_buffer("size", self.size)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.size = 0.5 * self.size + y.detach().abs().mean(0)
            self.second_name.size = self.size
        return y.square() / self.size


def contrastive(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Two views of a sample, each through the model, before one backward pass."""
    one, other = model(batch(rank, 2 * step)), model(batch(rank, 2 * step + 1))
    return (one - other).square().mean() - one.mean() * other.mean()


def real_and_generated(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    real, generated = model(batch(rank, step)), model(0.5 * batch(rank, step + 50) + 1)
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(generated).mean()


@grid(
    cover=1,
    make=[Normalized, Replacing],
    loss=[contrastive, real_and_generated],
    average={"broadcast": False, "average": True, "patterns": ["*size", "scale", "*running_var"]},
    size=[2, 3],
)
def test_two_forward_passes_before_one_backward(make: type[nn.Module], loss: Loss, average: Any, size: int) -> None:
    """Gradients are the mean of what each rank has by itself, with the buffers that its forward passes had."""

    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(make(), communicator=communicator, average_buffers=average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            alone = copy.deepcopy(model.module)
            loss(model, communicator.rank, step).backward()
            expected = simulated(alone, loss, communicator, average, step)
            for ours, mean in zip(gradients(model), expected, strict=True):
                assert torch.allclose(ours, mean, rtol=1e-5, atol=1e-6)
            optimizer.step()

    run_ranks(size, rank)


class Simulated(nn.Module):
    """A module whose buffers become all ranks' before each forward pass, as new tensors each time."""

    def __init__(self, module: nn.Module, communicator: Communicator, average: Any) -> None:
        super().__init__()
        endings = ["running_mean", "running_var"] if average is True else [each.strip("*") for each in average or []]
        self.module, self.communicator, self.endings = module, communicator, tuple(endings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                everyone = torch.stack(self.communicator.all_gather_object(buffer))
                mean = name.endswith(self.endings) and buffer.is_floating_point()
                setattr(part, name, everyone.double().mean(0).to(buffer.dtype) if mean else everyone[0].clone())
        return self.module(x)


def simulated(
    module: nn.Module, loss: Loss, communicator: Communicator, average: Any, step: int
) -> list[torch.Tensor | None]:
    loss(Simulated(module, communicator, average), communicator.rank, step).backward()
    everyone = communicator.all_gather_object([g.double() for g in gradients(module)])
    return [torch.stack(grads).mean(0).float() for grads in zip(*everyone, strict=True)]


@grid(cover=1, average={"broadcast": False, "average": True})
def test_two_forward_and_then_two_backward_passes(average: bool) -> None:
    """The second one's gradients are added to the first one's means, and averaged with them."""

    def rank(communicator: Communicator) -> None:
        both, apart = (ByteGrad(Normalized(), communicator=communicator, average_buffers=average) for _ in range(2))
        for step in range(2):
            both.zero_grad()
            first, second = (both(batch(communicator.rank, 2 * step + i)).square().mean() for i in range(2))
            first.backward()
            second.backward()
            apart.zero_grad()
            for i in range(2):
                apart(batch(communicator.rank, 2 * step + i)).square().mean().backward()
            for one, other in zip(gradients(both), gradients(apart), strict=True):
                assert torch.equal(one, other)
            for one, other in zip(both.buffers(), apart.buffers(), strict=True):
                assert torch.equal(one, other)

    run_ranks(2, rank)


def test_a_generator_and_a_discriminator() -> None:
    """Both are wrapped; the discriminator sees real and generated samples, and the generator learns through it."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        generator = GradientAllReduce(
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)), communicator=communicator, broadcast_buffers=True
        )
        discriminator = GradientAllReduce(Normalized(), communicator=communicator)
        fill(generator, 3)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, discriminator)]
        for step in range(3):
            made = generator(batch(communicator.rank, step))
            discriminator.zero_grad()
            real, fake = discriminator(batch(communicator.rank, step + 9)), discriminator(made.detach())
            (nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()).backward()
            optimizers[1].step()
            discriminator.requires_grad_(False)
            generator.zero_grad()
            nn.functional.softplus(-discriminator(made)).mean().backward()
            optimizers[0].step()
            discriminator.requires_grad_(True)
        return [p.detach().clone() for m in (generator, discriminator) for p in m.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_change_that_backward_must_know_of_is_an_error() -> None:
    """As without an algorithm: a buffer that is needed as it was has been written in place."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3)
            self.register_buffer("size", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) / self.size

    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Written(), communicator=communicator)
        one = model(batch(communicator.rank, 0))
        model.module.size.mul_(2.0 + communicator.rank)
        other = model(batch(communicator.rank, 1))
        assert model.module.size.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (one + other).sum().backward()

    run_ranks(2, rank)


def test_a_change_of_the_modules_own_hides_no_other_from_backward() -> None:
    """A tensor that the module has written, and then used, may be needed as it was when other ranks' values come."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3)
            self.register_buffer("size", torch.ones(3))
            self.grows = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.grows:
                self.size.mul_(2.0)
            return self.linear(x) / self.size

    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Growing(), communicator=communicator)
        one = model(batch(communicator.rank, 0))
        if communicator.rank == 1:
            model.module.size.data.mul_(3.0)  # this rank's values are not those of rank 0
        model.module.grows = False
        model(batch(communicator.rank, 1))
        assert model.module.size.tolist() == [2.0] * 3
        if communicator.rank == 1:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one.sum().backward()

    run_ranks(2, rank)


def test_buffers_are_those_of_rank_0_whatever_happened_to_them() -> None:
    """They stay the same tensors unless the module replaced them, and what is equal is not written."""

    def rank(communicator: Communicator) -> None:
        module = Normalized()
        model: Algorithm = GradientAllReduce(module, communicator=communicator)
        norm = module.layers[1]
        before = dict(module.named_buffers())
        for step in range(3):
            with torch.no_grad():
                model(batch(communicator.rank, step))
        assert all(before[name] is buffer for name, buffer in module.named_buffers())
        norm.running_mean = torch.full((6,), float(communicator.rank + 5))
        norm.running_var.data.fill_(communicator.rank + 7.0)
        module.scale.fill_(communicator.rank + 9.0)
        mine = norm.running_mean
        norm.eval()
        module.layers[3].eval()
        model(batch(communicator.rank, 0))
        assert norm.running_mean.tolist() == [5.0] * 6
        assert norm.running_var.tolist() == [7.0] * 6
        assert module.scale.tolist() == [9.0] * 3
        assert mine.tolist() == [communicator.rank + 5.0] * 6
        versions = {name: buffer._version for name, buffer in module.named_buffers()}
        model(batch(communicator.rank, 0))
        assert versions == {name: buffer._version for name, buffer in module.named_buffers()}
        everyone = communicator.all_gather_object(dict(module.state_dict()))
        assert all(torch.equal(value, everyone[0][name]) for name, value in everyone[1].items())

    run_ranks(2, rank)


def test_synchronized_batch_norm() -> None:
    """Without a process group it is batch norm by itself, and gets the same gradients."""

    def rank(communicator: Communicator) -> None:
        plain = GradientAllReduce(Normalized(), communicator=communicator)
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(Normalized())
        assert isinstance(converted.layers[1], nn.SyncBatchNorm)
        other = GradientAllReduce(converted, communicator=communicator)
        for model in (plain, other):
            contrastive(model, communicator.rank, 0).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(other), strict=True))

    run_ranks(2, rank)


def test_what_has_not_changed_is_not_sent() -> None:
    """A large buffer travels where any rank's bytes are others, whatever versions and tensors say."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 3)
        module.register_buffer("mask", torch.zeros(1 << 16))
        module.register_buffer("small", torch.zeros(3))
        model = GradientAllReduce(module, communicator=communicator)

        def sent() -> int:
            before = communicator.bytes_sent, model.communicator.bytes_sent
            model(batch(communicator.rank, 0))
            total = communicator.all_gather_object(model.communicator.bytes_sent - before[1])
            assert not module.mask.isnan().any()
            everyone = communicator.all_gather_object(module.mask)
            assert all(torch.equal(each, everyone[0]) for each in everyone)
            return sum(total)

        assert sent() < 1000
        module.mask.add_(0.0)
        module.mask = module.mask.clone()
        assert sent() < 1000
        if communicator.rank == 1:
            module.mask.data[5] = 7.0
        assert sent() > 1 << 18
        assert module.mask[5] == 0.0
        assert sent() < 1000
        module.mask.numpy()[6] = communicator.rank + 3.0
        assert sent() > 1 << 18
        assert module.mask[6] == 3.0
        module.mask[2] = -0.0 if communicator.rank == 0 else 0.0
        assert sent() > 1 << 18
        assert torch.signbit(module.mask[2])
        model.close()

    run_ranks(2, rank)
