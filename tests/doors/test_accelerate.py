"""Accelerate's own loop, with an algorithm in place of DDP or a hook in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.doors.jobs import SPECS, Net, digest, job, keep_group, left_behind, loss_of, needs, report, samples

pytestmark = [needs("accelerate"), pytest.mark.processes]


def begin(kind: str, steps: int = 2, mixed: str = "no") -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator

    from bagua_kernels.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, mixed_precision=mixed)
    model = Net(accelerator.process_index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = torch.utils.data.DataLoader(samples(), batch_size=16)
    if kind == "ddp":
        return (accelerator, *accelerator.prepare(model, optimizer, loader))
    spec, hook = SPECS[kind]
    return (accelerator, *prepare(accelerator, model, optimizer, spec, hook=hook), accelerator.prepare(loader))


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, first: int = 0, end: int = 24) -> None:
    """Micro-batches from `first` to `end`; two of them are a step."""
    batches = [batch for _ in range(3) for batch in loader]
    for x, y in batches[first:end]:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def trains(kind: str, mixed: str) -> None:
    parts = begin(kind, mixed=mixed)
    accelerator, model = parts[:2]
    keep_group()
    bare = accelerator.unwrap_model(model)
    assert type(bare) is Net
    train(*parts)
    used = bare.computed_in
    accelerator.prepare_model(bare, evaluation_mode=True)  # as the Trainer does before it evaluates
    train(*parts, first=0, end=4)
    own = digest(bare)
    keys = list(accelerator.get_state_dict(model, unwrap=True) if kind != "ddp" else bare.state_dict())
    accelerator.end_training()
    report([own, digest(bare), loss_of(bare), keys, left_behind(), used])


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_training(mixed: str) -> None:
    """Equal bits on all ranks, names without a wrapper's, a loss beside DDP's, and nothing left."""
    losses = {}
    for kind in ("ddp", *SPECS):
        first, second = [found[0] for found in job(trains, 2, kind, mixed)]
        assert first[1] == second[1], kind
        assert (first[0] == second[0]) == (kind != "diloco"), "in the middle of a round ranks have their own"
        assert first[3] == list(Net().state_dict())
        assert first[4] == second[4] == [], kind
        assert first[5] == ("torch.bfloat16" if mixed == "bf16" else "torch.float32"), (
            f"{kind}: autocast has no effect (T17)"
        )
        losses[kind] = first[2]
    assert all(loss < losses["ddp"] + 0.1 for loss in losses.values()), losses


def saves(kind: str, folder: str) -> None:
    """Ends in the middle of a round of four steps: after six."""
    parts = begin(kind)
    train(*parts, end=12)
    parts[0].save_state(folder)
    train(*parts, first=12)
    report(digest(parts[0].unwrap_model(parts[1])))
    parts[0].wait_for_everyone()
    parts[0].end_training()


def resumes(kind: str, folder: str) -> None:
    parts = begin(kind)
    parts[0].load_state(folder)
    from bagua_kernels.algorithms.algorithm import Algorithm

    if isinstance(parts[1], Algorithm):
        state = parts[1].algorithm_state_dict()
        vectors = {
            key: sum(float(one.double().sum()) for one in named.values()) for key, named in state["vectors"].items()
        }
    else:
        vectors = {}
    loaded = digest(parts[0].unwrap_model(parts[1]))
    train(*parts, first=12)
    report([loaded, digest(parts[0].unwrap_model(parts[1])), vectors])
    parts[0].wait_for_everyone()
    parts[0].end_training()


@pytest.mark.parametrize("kind", SPECS)
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    """States of all ranks go on bit for bit, also in the middle of a round; other numbers of ranks begin alike (T7, T20)."""
    folder = str(tmp_path / "state")
    ended = [found[0] for found in job(saves, 2, kind, folder)]
    same = [found[0] for found in job(resumes, 2, kind, folder)]
    assert [one[1] for one in same] == ended
    if kind != "hook":  # DDP begins with other buckets
        more = [found[0] for found in job(resumes, 3, kind, folder)]
        assert len({one[0] for one in more}) == 1
        for key in more[0][2]:
            kept, had = sum(one[2][key] for one in more) / 3, sum(one[2][key] for one in same) / 2
            assert kept == pytest.approx(had, rel=1e-4, abs=1e-5), key
    (tmp_path / "state" / "bagua_kernels" / "checkpoint.json").unlink()
    with pytest.raises(AssertionError, match="checkpoint"):
        job(resumes, 2, kind, folder)


def schedules(kind: str, split: bool) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from bagua_kernels.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split))
    net = Net(accelerator.process_index)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.2)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    inner = optimizer
    model, optimizer = prepare(accelerator, net, optimizer, SPECS[kind][0])
    schedule = accelerator.prepare(schedule)
    x, y = samples(16).tensors
    rates = []
    for _ in range(6):  # rounds of DiLoCo are in between
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(round(0.2 / inner.param_groups[0]["lr"]))
    accelerator.end_training()
    report(rates)


@pytest.mark.parametrize(("kind", "split"), [("bytegrad", False), ("bytegrad", True), ("diloco", False)])
def test_schedules_step_once_per_rank(kind: str, split: bool) -> None:
    """A prepared scheduler takes a step for each rank, unless `split_batches` is set (T19); it has the inner optimizer's rate."""
    factor = 1 if split else 2
    assert job(schedules, 2, kind, split) == [[[1 + factor * step for step in range(1, 7)]]] * 2


def clips(kind: str, ways: str, scaled: bool) -> None:
    from accelerate import Accelerator

    from bagua_kernels.integrations.accelerate import prepare
    from bagua_kernels.optim import SGD

    accelerator = Accelerator(cpu=True)
    if scaled:
        # A machine without a GPU has no scaler of its own. Forward passes stay in float32: losses differ by the scale only.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = Net(accelerator.process_index)
    model, optimizer = prepare(accelerator, net, SGD(net.parameters(), lr=0.2), SPECS[kind][0])
    if scaled:
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
    x, y = samples(32).tensors
    for step in range(4):
        mine = slice(accelerator.process_index, None, 2) if step % 2 else slice(None)
        accelerator.backward(F.cross_entropy(model(x[mine]), y[mine]))
        if "library" in ways:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        if "step" in ways:
            if ways == "step":
                accelerator.unscale_gradients()
            optimizer.optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    accelerator.end_training()
    report(weights)


@pytest.mark.parametrize(("kind", "all_ways"), [("bytegrad", ["step", "library and step"]), ("diloco", ["library"])])
def test_gradients_are_unscaled_once(kind: str, all_ways: list[str]) -> None:
    """`clip_grad_norm_` of Accelerate unscales (T21), and so would the step of this package's optimizers, which clips, too."""
    expected = [found[0] for found in job(clips, 2, kind, "library", False)]
    for ways in all_ways:
        for found, wanted in zip(job(clips, 2, kind, ways, True), expected, strict=True):
            assert found[0] == pytest.approx(wanted, rel=1e-3, abs=1e-4), ways


class Tied(torch.nn.Module):
    """Two layers with one weight, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def saves_tied(spec: str, folder: str) -> None:
    from accelerate import Accelerator

    from bagua_kernels.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    bare = Tied()
    model, optimizer = prepare(accelerator, bare, torch.optim.SGD(bare.parameters(), lr=0.1), spec)
    ends = []
    for step in range(8):
        if step == 4:
            accelerator.save_state(folder)
        accelerator.backward(model(torch.full((4, 8), float(accelerator.process_index + step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    ends.append(digest(bare))
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    for step in range(4, 8):
        accelerator.backward(model(torch.full((4, 8), float(accelerator.process_index + step))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    ends.append(digest(bare))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    report(ends)


@pytest.mark.parametrize("spec", ["bytegrad:block=64", "diloco:interval=3"])
def test_tied_weights_are_loaded_again(spec: str, tmp_path: Path) -> None:
    """Copies of the mean model share what the model shares: safetensors leaves out all but one of the names."""
    for ((ended, again),) in job(saves_tied, 2, spec, str(tmp_path)):
        assert ended == again


def refuses() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    from bagua_kernels.integrations.accelerate import BaguaKwargs, prepare

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyError):  # T15: so it is an attribute
        Accelerator(cpu=True, kwargs_handlers=[BaguaKwargs("bytegrad")])
    assert isinstance(BaguaKwargs("bytegrad", bucket_cap_mb=1), DistributedDataParallelKwargs)
    assert BaguaKwargs("bytegrad", bucket_cap_mb=1).to_kwargs() == {"bucket_cap_mb": 1}
    with pytest.raises(ValueError, match="no hook"):
        BaguaKwargs("diloco")
    with pytest.raises(ValueError, match="one hook"):
        BaguaKwargs("bytegrad", comm_hook="fp16")
    with pytest.raises(ValueError, match="makes its own optimizer"):
        prepare(accelerator, model, optimizer, "onebit_adam:freeze_step=2,lr=0.1")
    wrapped = accelerator.prepare_model(Net())
    with pytest.raises(ValueError, match="not prepared"):  # T18
        prepare(accelerator, wrapped, optimizer)
    with pytest.raises(ValueError, match="optimizer that is not prepared"):
        prepare(accelerator, model, accelerator.prepare_optimizer(optimizer))
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):  # T22
        accelerator.state.distributed_type = kind
        with pytest.raises(ValueError, match=f"got one of {kind.value}: leave out its plugin"):
            prepare(accelerator, model, optimizer)
    report("done")


def test_refusals() -> None:
    """What does not go together, in one sentence."""
    assert job(refuses, 2) == [["done"], ["done"]]
