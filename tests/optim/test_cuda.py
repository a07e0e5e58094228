"""On a GPU: PyTorch's fused and foreach results, counters on the device, and replay in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import optim
from tests.grids import grid
from tests.optim.pairs import ARGUMENTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False")

NAMES = [name for name in ARGUMENTS if hasattr(torch.optim, name)]
SHAPES = [(1000, 33), (7,), (1 << 20,), (3, 5, 2), ()]


def parameters(name: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [s for s in SHAPES if len(s) == 2] if name == "Muon" else SHAPES
    return [torch.nn.Parameter(torch.randn(s, generator=generator).cuda()) for s in shapes]


def give_gradients(step: int, *several: list[torch.nn.Parameter]) -> None:
    for params in several:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            gradient = torch.randn(p.shape, generator=generator).cuda()
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)


def ways(name: str) -> list[dict[str, bool]]:
    fused = [{"fused": True}] if name in ("SGD", "Adam", "AdamW", "Adagrad") else []
    capturable = [{"capturable": True}] if "capturable" in torch.optim.__dict__[name]([torch.zeros(1)]).defaults else []
    return [{}, *fused, *capturable]


@grid(cover=1, name=NAMES)
def test_results_are_torchs(name: str) -> None:
    for way in ways(name) if name != "Muon" else [{}]:
        mine, other = parameters(name), parameters(name)
        ours = getattr(optim, name)(mine, **ARGUMENTS[name], **way)
        theirs = getattr(torch.optim, name)(other, **ARGUMENTS[name], **way)
        for step in range(10):
            give_gradients(step, mine, other)
            ours.step()
            theirs.step()
        for p, q in zip(mine, other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-3 if name == "Muon" else 1e-5)
            for key, value in theirs.state[q].items():
                assert ours.state[p][key].device == value.device
                torch.testing.assert_close(ours.state[p][key], value, rtol=1e-4, atol=1e-5)


@grid(cover=1, name=[n for n in NAMES if {"capturable": True} in (ways(n) if n != "Muon" else [])])
def test_a_graph_replays_steps(name: str) -> None:
    mine, other = parameters(name), parameters(name)
    ours = getattr(optim, name)(mine, **ARGUMENTS[name], capturable=True)
    theirs = getattr(torch.optim, name)(other, **ARGUMENTS[name], capturable=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(3):
            give_gradients(step, mine, other)
            ours.step()
            theirs.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(3, 8):
        give_gradients(step, mine, other)
        graph.replay()
        theirs.step()
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_parameters_on_both_devices() -> None:
    on_gpu, on_cpu = torch.nn.Parameter(torch.ones(3000).cuda()), torch.nn.Parameter(torch.ones(3000))
    optimizer = optim.AdamW([on_gpu, on_cpu], lr=0.1)
    for _ in range(3):
        on_gpu.grad, on_cpu.grad = torch.ones(3000).cuda(), torch.ones(3000)
        optimizer.step()
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-6, atol=1e-7)
