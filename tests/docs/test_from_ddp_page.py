"""What docs/from-ddp.md says about held gradients, `no_sync` and loops that call parts, and the code of docs/frameworks.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm, GradientAllReduce, LocalSGD, ModelAlgorithm, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.ranks import Odd, batch, fill, loss_of

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LIMIT = limits.seconds(60)


def classifier() -> nn.Module:
    net = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    fill(net)
    return net


def given(rank: int) -> dict[str, Any]:
    """What the page's code finds."""
    data = TensorDataset(torch.cat([batch(0, step) for step in range(8)]), torch.arange(32) % 3)
    return {"torch": torch, "F": F, "net": classifier(), "loader": DataLoader(data, batch_size=4), "rank": rank}


def with_accelerate() -> None:
    """The hook's block and the loop's, on the ranks of `Accelerator()`, and local steps in the second one."""
    from accelerate import Accelerator

    whole = Accelerator(gradient_accumulation_steps=2)
    names = given(whole.process_index)
    exec(compile(BLOCKS[0], "frameworks.md", "exec"), names)
    hooked = names["model"]
    assert isinstance(hooked, nn.parallel.DistributedDataParallel)
    loss_of(hooked, whole.process_index, 0).backward()
    assert same(whole, [p.grad for p in hooked.parameters()])
    for replaced in ("ByteGrad(net)", "LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), interval=1)"):
        names = given(whole.process_index) | {"LocalSGD": LocalSGD}
        code = BLOCKS[1].replace("ByteGrad(net)", replaced)
        if "LocalSGD" in replaced:
            code = code.replace(
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "optimizer = model.optimizer"
            )
        exec(compile(code, "frameworks.md", "exec"), names)
        model = names["model"]
        assert isinstance(model, Algorithm)
        # Each rank has half of the 8 batches, and two of them are one step.
        assert model.stats().steps == 2
        model.synchronize()
        assert same(whole, list(model.parameters()))
        assert whole.unwrap_model(model) is model
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), classifier().parameters(), strict=True))
        with pytest.raises(RuntimeError, match="DistributedDataParallel is around a"):
            loss_of(whole.prepare(model), whole.process_index, 0)
        model.close()
    comm.shutdown()
    whole.end_training()


def same(accelerator: Any, tensors: list[Any]) -> bool:
    """True if all ranks have equal values."""
    first, second = accelerator.gather(torch.cat([each.detach().reshape(-1) for each in tensors])[None])
    return torch.equal(first, second)


# Two processes, which import Accelerate.
@pytest.mark.slow
@pytest.mark.processes
def test_what_works_with_accelerate() -> None:
    pytest.importorskip("accelerate")
    results = run_processes(with_accelerate, 2, env={"ACCELERATE_USE_CPU": "true"}, timeout=LIMIT)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]


@pytest.mark.parametrize(("around", "exchanges"), [("both", 0), ("backward", 0), ("forward", 1)])
def test_no_sync_counts_where_backward_begins(around: str, exchanges: int) -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        model = GradientAllReduce(module, communicator=communicator)
        if around == "both":
            with model.no_sync():
                loss_of(model, communicator.rank, 0).backward()
        elif around == "backward":
            loss = loss_of(model, communicator.rank, 0)
            with model.no_sync():
                loss.backward()
        else:
            with model.no_sync():
                loss = loss_of(model, communicator.rank, 0)
            loss.backward()
        assert model.stats().steps == exchanges
        model.close()

    run_ranks(2, rank)


def test_held_gradients() -> None:
    """What was held over a step stays; what was held since a pass without exchange has this rank's sum."""

    def rank(communicator: Communicator) -> None:
        module, alone = Odd(), Odd()
        weight = module.second.weight
        model = from_spec("allreduce", module, communicator=communicator)
        loss_of(model, communicator.rank, 0).backward()
        held, copied = weight.grad, weight.grad.clone()
        assert held.untyped_storage().nbytes() > held.nbytes
        model.zero_grad()
        loss_of(model, communicator.rank, 1).backward()
        assert torch.equal(held, copied)
        assert weight.grad is not held
        model.zero_grad()
        for step in range(2):
            loss_of(alone, communicator.rank, step).backward()
        with model.no_sync():
            loss_of(model, communicator.rank, 0).backward()
            held = weight.grad
        loss_of(model, communicator.rank, 1).backward()
        sums = communicator.all_gather_object(alone.second.weight.grad)
        assert torch.allclose(held, sums[communicator.rank])
        assert torch.allclose(weight.grad, sum(sums) / communicator.size)
        model.zero_grad(set_to_none=False)
        model.close()

    run_ranks(2, rank)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9))
        self.head = nn.Linear(9, 3)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def by_parts(model: Algorithm, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.module.head(model.module.encoder(x))
    return out


def by_module(model: Algorithm, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.module(x)
    return out


@pytest.mark.parametrize("spec", ["allreduce", "local_sgd:interval=1", "d2"])
@pytest.mark.parametrize("call", [by_parts, by_module])
def test_loops_that_call_parts(spec: str, call: Callable[[Algorithm, torch.Tensor], torch.Tensor]) -> None:
    """Exchanges are those of a loop that calls the wrapper; hooks of what is not called are not."""

    def rank(communicator: Communicator) -> None:
        ends, called = [], list[str]()
        for whole in (True, False):
            module = Parts()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            # Neither loop reads what `broadcast_buffers` would make equal.
            model = from_spec(spec, module, optimizer, communicator=communicator)
            for name, part in {"wrapper": model, "module": module, "encoder": module.encoder}.items():
                part.register_forward_hook(lambda *_, name=name: called.append(name))
            for step in range(3):
                optimizer.zero_grad()
                x = batch(communicator.rank, step)
                (model(x) if whole else call(model, x)).square().mean().backward()
                optimizer.step()
                if call is by_parts and not whole:
                    model.wait()
            model.wait()
            assert model.stats().steps == 3
            ends.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
            expected = (
                {"encoder"} | ({"module"} if whole or call is by_module else set()) | ({"wrapper"} if whole else set())
            )
            assert set(called) == expected
            called.clear()
            if spec == "allreduce" and not whole:
                means = communicator.all_gather_object(module.encoder[1].running_mean)
                assert not torch.equal(*means)
            model.close()
        assert torch.equal(*ends)

    run_ranks(2, rank)


@pytest.mark.parametrize("spec", ["local_sgd:interval=1", "d2", "diloco:interval=2"])
def test_gradients_of_before_a_mean_are_warned_of(spec: str) -> None:
    """Once on each rank; not for steps that are skipped."""

    def rank(communicator: Communicator) -> None:
        module = Parts()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = from_spec(spec, module, optimizer, communicator=communicator)
        assert isinstance(model, ModelAlgorithm)
        for _ in range(3):
            model.skip_step()
        for step in range(5):
            by_parts(model, batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        model.close()

    with pytest.warns(RuntimeWarning, match="it was not called since the last step") as caught:
        run_ranks(2, rank)
    assert len(caught) == 2


def test_parts_of_a_closed_algorithm_train_alone() -> None:
    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Parts(), communicator=communicator)
        model.close()
        by_parts(model, batch(communicator.rank, 0)).square().mean().backward()
        mine = communicator.all_gather_object(model.module.head.weight.grad)
        assert not torch.equal(*mine)
        with pytest.raises(RuntimeError, match="was closed"):
            model(batch(communicator.rank, 0))

    run_ranks(2, rank)
