"""Algorithms on streams of a GPU that is not there: all streams in order, and the bits of the same run on a CPU.

On a GPU the engine copies gradients together, keeps flags on the device and orders streams by events. `FakeGpu` executes these
ways on a CPU's memory, and raises `MisuseError` for a use of memory that no event orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_kernels import optim, upload
from bagua_kernels.algorithms import ByteGrad, GradientAllReduce, from_spec
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, train
from tests.algorithms.test_contract import ALGORITHMS
from tests.comm.fake_gpu import FakeGpu
from tests.grids import only

# Rounds of parameters, each with the way of its own through buckets and streams.
ROUNDS = ("decentralized", "d2", "lowprec:codec=minmax_uint8", "sgp", "local_sgd:interval=2", "diloco:interval=2")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def same(gpu: FakeGpu, rank: Callable[[Communicator], list[torch.Tensor]], rounding: float = 0.0) -> None:
    """Checks that a run on the GPU returns what it returns on the CPU."""
    expected = run_ranks(2, rank)
    for ours, theirs in zip(gpu.run_ranks(2, rank), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "name", only(ALGORITHMS, "allreduce", "bytegrad", "qsgd", "topk", "onebit", "powersgd", "dgc", "onebit_adam")
)
def test_gradients(name: str, gpu: FakeGpu) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        return train(communicator, ALGORITHMS[name], bucket_bytes=500)[0]

    # PyTorch multiplies matrices on a GPU, and a launcher of this package on a CPU.
    same(gpu, rank, 1e-4 if name.startswith("powersgd") else 0.0)


@pytest.mark.parametrize("spec", only(ROUNDS, "decentralized", "sgp", "diloco:interval=2"))
def test_rounds(spec: str, gpu: FakeGpu) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        model = from_spec(spec, module, optimizer, communicator=communicator)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        model.synchronize()
        found = [p.detach().clone() for p in module.parameters()]
        model.close()
        return found

    same(gpu, rank)


def tripled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


SIDES = {
    "with a later hook": (True, 10 << 20, False),
    "without": (False, 10 << 20, False),
    "alone in a bucket": (False, 1, True),
}


@pytest.mark.parametrize("case", SIDES)
def test_a_gradient_of_another_stream(case: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch accumulates a gradient on the stream of the layer's forward pass, which may not be that of other layers."""
    hooked, bucket_bytes, gpu.cuda.memory.strict = SIDES[case]
    fill, seen = Engine._fill_on_stream, set[bool]()

    def watched(engine: Engine, index: int) -> None:
        seen.add(any(stream != torch.cuda.current_stream(gpu.device) for stream in engine._streams[index]))
        fill(engine, index)

    monkeypatch.setattr(Engine, "_fill_on_stream", watched)

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(3)])
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
        model = GradientAllReduce(module, communicator=communicator, bucket_bytes=bucket_bytes)
        weight = module[1].weight
        if hooked:
            weight.register_post_accumulate_grad_hook(tripled)
        side = None
        if communicator.device.type == "cuda":
            main, side = torch.cuda.current_stream(communicator.device), torch.cuda.Stream(communicator.device)
            # As autograd does around the node that accumulates, which the parameter keeps alive.
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]

            def before(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
                side.wait_stream(main)
                gpu.cuda._streams()[communicator.device.index] = side
                for gradient in gradients:
                    gpu.record_stream(gradient, side)
                return tuple(gradient * 1 for gradient in gradients)

            def after(*_: object) -> None:
                gpu.cuda._streams()[communicator.device.index] = main

            node.register_prehook(before)
            node.register_hook(after)
        found = []
        for step in range(3):
            if side is not None and step:
                side.wait_stream(main)
            hidden = batch(communicator.rank, step)[:, :5]
            if bucket_bytes == 1:
                # The first bucket's parameter gets its gradient last.
                hidden = hidden @ module[2].weight.t()
            model(hidden).square().mean().backward()
            found += [p.grad.clone() for p in module.parameters()]
            module.zero_grad()
        model.close()
        return found

    same(gpu, rank)
    assert any(seen)


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "LARS", "Muon"])
def test_clipped_steps(name: str, gpu: FakeGpu) -> None:
    """Factors of clipping stay on the device, and are the host's."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shapes = [(4, 3), (6, 6)] if name == "Muon" else [(4, 3), (7,), (300, 20)]
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = getattr(optim, name)(params, lr=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        return [p.detach().clone() for p in params]

    same(gpu, rank)


def test_flags_go_to_the_device_when_they_change(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from the host's memory in each step would wait for backward."""
    copies: list[int] = []
    uploaded = upload.uploaded

    def counted(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(threading.get_ident())
        return uploaded(values, device)

    monkeypatch.setattr(upload, "uploaded", counted)

    def rank(communicator: Communicator) -> list[int]:
        model = ByteGrad(Odd(), communicator=communicator)
        counts = []
        for step in range(6):
            hidden = batch(communicator.rank, step)
            if step == 4:
                model.module.requires_grad_(False)
                next(model.module.parameters()).requires_grad_(True)
            model(hidden).square().mean().backward()
            counts.append(copies.count(threading.get_ident()))
            model.zero_grad()
        model.close()
        return counts

    for counts in gpu.run_ranks(2, rank):
        # The first two passes may differ in the flag that asks for another order of buckets.
        assert counts[1:4] == [counts[1]] * 3
        assert 0 < counts[1] <= 2
        assert counts[4] == counts[5] == counts[3] + 1


@pytest.mark.parametrize("precision", ["nearest", "stochastic"])
def test_counters_on_the_device(precision: str, gpu: FakeGpu) -> None:
    """With `capturable=True` all numbers of a step stay on the device, and are the host's."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        params = [
            nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in [(4, 3), (7,), (300, 20)]
        ]
        extras = optim.Extras(precision=precision, seed=3)
        on_device = communicator.device.type == "cuda"
        optimizer = optim.AdamW(params, lr=0.1, extras=extras, capturable=on_device)
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            if step == 2:
                params[1].grad = None
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        assert all(optimizer.state[p]["step"].is_cuda == on_device for p in params)
        return [p.detach().clone() for p in params]

    same(gpu, rank)
