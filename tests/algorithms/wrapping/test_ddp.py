"""What users of `DistributedDataParallel` are told, with real process groups where it matters."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import comm, optim
from bagua_kernels.algorithms import Algorithm, ByteGrad, GradientAllReduce, TopK, from_spec
from bagua_kernels.algorithms.wrapping.ddp import ARGUMENTS
from bagua_kernels.comm import Communicator, TorchCommunicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.ranks import Odd, batch, gradients, loss_of
from tests.grids import folded

PAGE = (Path(__file__).parents[3] / "docs" / "from-ddp.md").read_text()
NOT_MODULE = [name for name in inspect.signature(DistributedDataParallel).parameters if name != "module"]


@folded(name=sorted({*NOT_MODULE, *ARGUMENTS}))
def test_every_argument_has_an_answer(name: str) -> None:
    """Those of the installed version, and what older and newer ones have: it is ours too, or a TypeError says what is."""
    if name in inspect.signature(Algorithm).parameters:
        assert name not in ARGUMENTS
        return

    def rank(communicator: Communicator) -> None:
        for kind in (GradientAllReduce, ByteGrad, TopK):
            with pytest.raises(TypeError) as caught:
                kind(Odd(), communicator=communicator, **{name: None})
            assert f"{name}: {ARGUMENTS[name]}" in str(caught.value)
        with pytest.raises(ValueError, match=name):
            from_spec("bytegrad", Odd(), communicator=communicator, **{name: None})

    run_ranks(1, rank)


def test_the_page_has_these_answers() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {name: rows.get(name) for name in ARGUMENTS} == ARGUMENTS
    ours = inspect.signature(Algorithm).parameters
    assert rows.keys() - ARGUMENTS.keys() == {name for name in NOT_MODULE if name in ours}


def test_arguments_by_position_and_of_a_class_of_ones_own() -> None:
    class Mine(ByteGrad):
        name = "mine too"

        def __init__(self, module: nn.Module, device_ids: list[int], **arguments: Any) -> None:
            self.given = device_ids
            super().__init__(module, **arguments)

    def rank(communicator: Communicator) -> None:
        with pytest.raises(
            TypeError, match=r"second argument is an optimizer, or None, got \[0\]: leave out device_ids"
        ):
            ByteGrad(Odd(), [0], communicator=communicator)
        assert Mine(Odd(), [0], communicator=communicator).given == [0]
        with pytest.raises(TypeError, match="unexpected keyword argument 'blok'"):
            ByteGrad(Odd(), communicator=communicator, blok=64)

    run_ranks(1, rank)


@pytest.mark.usefixtures("small_heap")
def test_wrapping_twice_is_refused() -> None:
    """The same module, parts of it, or modules with common parameters, until the first one is closed or gone."""

    def rank(communicator: Communicator) -> None:
        module = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
        first = GradientAllReduce(module, communicator=communicator)
        for other in (module, module[1], nn.Sequential(module[0], nn.Linear(7, 2))):
            with pytest.raises(ValueError, match="is exchanged by another GradientAllReduce already"):
                ByteGrad(other, communicator=communicator)
        for other in (first, nn.Sequential(first, nn.Linear(3, 2))):
            with pytest.raises(ValueError, match="is a GradientAllReduce already and would exchange gradients twice"):
                ByteGrad(other, communicator=communicator)
        ByteGrad(copy.deepcopy(module), communicator=communicator).close()
        frozen = nn.Sequential(module[0], nn.Linear(7, 2))
        module[0].requires_grad_(False)
        ByteGrad(frozen, communicator=communicator).close()
        first.close()
        second = ByteGrad(module, communicator=communicator)
        third = second.switch_to(TopK)
        assert third.module is module
        third.close()

    run_ranks(2, rank)


@pytest.mark.usefixtures("small_heap")
def test_what_nobody_has_any_more_claims_nothing() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        for _ in range(2):
            model = ByteGrad(module, communicator=communicator)
            model(batch(communicator.rank, 0)).square().mean().backward()
            del model

    gc.disable()
    try:
        run_ranks(2, rank)
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [1, 2])
def test_use_after_close_is_told(size: int) -> None:
    """Evaluation goes on, and so does the module by itself; what would train one rank alone does not."""

    def rank(communicator: Communicator) -> None:
        model = ByteGrad(Odd(), communicator=communicator)
        loss_of(model, communicator.rank, 0).backward()
        model.close()
        model.close()
        for use in (lambda: model(batch(0, 0)), lambda: model.weigh(1.0), lambda: model.join().__enter__()):
            with pytest.raises(RuntimeError, match=r"this ByteGrad was closed .* call its \.module"):
                use()
        with torch.no_grad():
            expected = model(batch(0, 0))
        model.eval()
        assert torch.equal(model(batch(0, 0)), expected)
        model.train()
        model.module(batch(0, 0)).sum().backward()
        again = ByteGrad(model.module, communicator=communicator)
        loss_of(again, communicator.rank, 0).backward()

    run_ranks(size, rank)


def around_and_inside() -> None:
    """Each of two ranks is refused in each direction; then it trains with either of them alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Nobody has called comm.init().
    model = GradientAllReduce(Odd(seed=rank))
    assert model.communicator.size == 2
    first, second = (ByteGrad(nn.Linear(6, 4)) for _ in range(2))
    for make in (
        lambda: DistributedDataParallel(model),
        lambda: sharded(first),
        lambda: sharded(nn.Sequential(second)),
    ):
        with pytest.raises(RuntimeError, match=r"is around a \w+, and both would exchange the same gradients: leave"):
            make()
    # Its constructor reads the outermost module only.
    outer = DistributedDataParallel(nn.Sequential(model, nn.Linear(13, 2)))
    with pytest.raises(RuntimeError, match="DistributedDataParallel is around a GradientAllReduce"):
        outer(batch(rank, 0))
    del outer
    gc.collect()
    inner = DistributedDataParallel(Odd(seed=rank))
    for wrapped in (inner, nn.Sequential(inner)):
        with pytest.raises(ValueError, match="is a DistributedDataParallel, which exchanges gradients itself"):
            ByteGrad(wrapped)
    # Beside each other they do no harm: a model that is trained, and another in the forward pass of that.
    holder = Holder(model)
    DistributedDataParallel(holder)(batch(rank, 0)).sum().backward()
    alone = copy.deepcopy(model)
    DistributedDataParallel(alone)(batch(rank, 0)).sum().backward()
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    ours = gradients(model)
    model.close()
    plain = DistributedDataParallel(model.module)
    plain.zero_grad()
    loss_of(plain, rank, 0).backward()
    for one, other in zip(ours, gradients(plain), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    subgroups(rank)
    print("through")


class Holder(nn.Module):
    """Calls a model that is no part of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.others = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.others[0](x).sum().detach()


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def subgroups(rank: int) -> None:
    """What takes the place of process_group."""
    groups = [dist.new_group([0]), dist.new_group([0, 1])]
    communicator = TorchCommunicator(groups[1])
    model = GradientAllReduce(Odd(seed=rank), communicator=communicator)
    loss_of(model, rank, 0).backward()
    expected = gradients(model)
    everyone = communicator.all_gather_object(expected)
    assert all(a is None or torch.equal(a, b) for a, b in zip(*everyone, strict=True))
    model.close()
    communicator.close()


@pytest.mark.slow
def test_neither_goes_around_the_other() -> None:
    results = run_processes(around_and_inside, 2, timeout=limits.seconds(100))
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
        assert "through" in result.stdout


def joins_by_itself() -> None:
    model = ByteGrad(Odd(seed=int(os.environ.get("RANK", "0"))))
    loss_of(model, comm.rank(), 0).backward()
    print(comm.size(), float(next(model.parameters()).sum()))
    comm.shutdown()


@pytest.mark.slow
def test_the_launchers_environment_is_joined() -> None:
    results = run_processes(joins_by_itself, 2, timeout=limits.seconds(60))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-2000:]
    assert results[0].stdout == results[1].stdout
    assert results[0].stdout.startswith("2 ")


def test_a_plain_process_is_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not comm.is_initialized()
    module = Odd()
    try:
        model = ByteGrad(module, optim.SGD(module.parameters(), lr=0.1))
        assert (comm.size(), comm.device()) == (1, torch.device("cpu"))
        model(batch(0, 0)).square().mean().backward()
        with pytest.raises(RuntimeError, match="DistributedDataParallel is around a ByteGrad"):
            hasattr(model, "_ddp_params_and_buffers_to_ignore")  # as its constructor does
        comm.shutdown()
        net, loader = nn.Linear(7, 5), [(batch(0, 0), torch.arange(4))]
        before = net.weight.detach().clone()
        for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            exec(code, {"torch": torch, "F": nn.functional, "net": net, "loader": loader})
        assert not torch.equal(before, net.weight)
    finally:
        comm.shutdown()
