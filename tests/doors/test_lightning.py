"""Lightning's Trainer, of both of its packages, with the strategy."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.doors.jobs import LIMIT, SPECS, Net, digest, job, left_behind, loss_of, needs, report, samples

pytestmark = [needs("lightning"), pytest.mark.processes]
MIDDLE = 6  # steps, of rounds of four
CLIP = 0.3


def module_of(package: str) -> Any:
    found = importlib.import_module(package)

    class Task(found.LightningModule):
        """Notes the digest of what validation sees, and of what training goes on with."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = Net(), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            if number == 0:
                self.seen.append(digest(self.net))
            self.log("loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=16, shuffle=False)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(64), batch_size=16)

    return Task()


def trainer_of(package: str, kind: str, folder: str, **more: Any) -> Any:
    from bagua_kernels.integrations.lightning import BaguaStrategy

    warnings.simplefilter("ignore")
    found = importlib.import_module(package)
    # A process may have both: which one is meant has to be named then.
    strategy: Any = "ddp"
    if kind != "ddp":
        spec, hook = SPECS[kind]
        strategy = BaguaStrategy(spec, hook=hook, package=package.partition(".")[0])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    given = {
        "accelerator": "cpu", "devices": 2, "strategy": strategy, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0,
        "max_steps": 12, "max_epochs": -1, "default_root_dir": folder, "check_val_every_n_epoch": None,
        "val_check_interval": 2 * MIDDLE, "num_sanity_val_steps": 1, "enable_checkpointing": True,
    }  # fmt: skip
    return found.Trainer(**{**given, **quiet, **more})


def saver(package: str, folder: str) -> Any:
    callbacks = importlib.import_module(f"{package}.callbacks")
    return callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=MIDDLE, save_top_k=-1, filename="{step}")


def fits(package: str, kind: str, folder: str) -> None:
    trainer, task = trainer_of(package, kind, folder, callbacks=[saver(package, folder)]), module_of(package)
    own: list[str] = []
    task.on_train_batch_end = lambda *_: own.append(digest(task.net))
    trainer.validate(task, verbose=False)  # alone, and before training (T10)
    trainer.fit(task)
    saved = (
        torch.load(Path(folder) / f"step={MIDDLE}.ckpt", weights_only=False)["state_dict"]
        if trainer.is_global_zero
        else {}
    )
    names = list(saved)
    averaged = Net()
    if saved:
        averaged.load_state_dict({name.removeprefix("net."): value for name, value in saved.items()})
    report(
        [
            own[2 * MIDDLE - 1],
            own[-1],
            digest(task.net),
            task.seen,
            digest(averaged),
            names,
            loss_of(task.net),
            left_behind(),
        ]
    )


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_fit(package: str, tmp_path: Path) -> None:
    """Accumulation, clipping, validation before and within training, checkpoints; nothing is left."""
    losses = {}
    for kind in ("ddp", *SPECS) if package == "lightning.pytorch" else ("diloco",):
        folder = str(tmp_path / kind)
        first, second = [found[0] for found in job(fits, 2, package, kind, folder)]
        assert first[2] == second[2], kind
        assert (first[0] == second[0]) == (kind != "diloco"), "in the middle of a round ranks have their own"
        assert first[3] == second[3], f"{kind}: validation sees the same model on all ranks"
        assert first[4] == first[3][-2], f"{kind}: what is saved is what validation sees"
        assert first[5] == [f"net.{name}" for name in Net().state_dict()]
        assert first[7] == second[7] == [], kind
        losses[kind] = first[6]
    assert all(loss < losses.get("ddp", 0.3) + 0.1 for loss in losses.values()), losses


def resumes(package: str, kind: str, folder: str, devices: int) -> None:
    trainer, task = trainer_of(package, kind, folder, devices=devices, enable_checkpointing=False), module_of(package)
    own: list[str] = []
    loaded: list[str] = []
    task.on_train_start = lambda: loaded.append(digest(task.net))
    task.on_train_batch_end = lambda *_: own.append(digest(task.net))
    trainer.fit(task, ckpt_path=str(Path(folder) / f"step={MIDDLE}.ckpt"))
    report([own[-1], digest(task.net), loaded[0], trainer.global_step])


@pytest.mark.parametrize("kind", SPECS)
def test_resume(kind: str, tmp_path: Path) -> None:
    """Bit for bit, in the middle of a round, too (T7, T13); other numbers of ranks begin with equal parameters."""
    package = "lightning.pytorch"
    ended = [found[0][2] for found in job(fits, 2, package, kind, str(tmp_path))]
    same = [found[0] for found in job(resumes, 2, package, kind, str(tmp_path), 2)]
    assert [one[1] for one in same] == ended
    if kind == "diloco":
        more = [found[0] for found in job(resumes, 3, package, kind, str(tmp_path), 3)]
        assert len({one[2] for one in more}) == 1
        assert {one[3] for one in more} == {12}


def breaks(package: str, kind: str, folder: str) -> None:
    trainer, task = trainer_of(package, kind, folder, enable_checkpointing=False), module_of(package)
    step = task.training_step

    def fails(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and trainer.global_rank == 1:
            raise KeyError("a sample")
        loss = step(batch, batch_idx)
        task.log("loss_of_all", loss.detach(), sync_dist=True)  # where the other rank may be waiting meanwhile
        return loss

    task.training_step = fails
    try:
        trainer.fit(task)
    except Exception as error:
        report([type(error).__name__, left_behind()])


@pytest.mark.parametrize("kind", ["hook", "bytegrad", "diloco"])
def test_an_exception_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """The rank that fails reports its own error, and the other one does not wait for ever."""
    first, second = [found[0] for found in job(breaks, 2, "lightning.pytorch", kind, str(tmp_path))]
    assert second == ["KeyError", []]
    assert first[0] in ("RankLostError", "CommunicationError", "RuntimeError")
    assert first[1] == []


class Converts:
    """Stands for the conversion to synchronized batch norms: it puts another module with the same weights into the model."""

    def apply(self, model: Any) -> Any:
        old = model.net.first
        model.net.first = torch.nn.Linear(12, 40)
        model.net.first.load_state_dict(old.state_dict())
        return model

    def revert(self, model: Any) -> Any:
        return model


def clips(kind: str, folder: str) -> None:
    trainer, task = (
        trainer_of("lightning.pytorch", kind, folder, enable_checkpointing=False),
        module_of("lightning.pytorch"),
    )
    seen: list[list[float]] = []

    def norm() -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in task.parameters() if p.grad is not None]))

    def configure(optimizer: Any, gradient_clip_val: float, gradient_clip_algorithm: str) -> None:
        before = norm()
        task.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )
        seen.append([before, norm()])

    trainer.gradient_clip_val = CLIP
    task.configure_gradient_clipping = configure
    trainer.fit(task)
    report(seen)


@pytest.mark.parametrize("kind", ["bytegrad", "diloco"])
def test_clipping_sees_what_the_step_takes(kind: str, tmp_path: Path) -> None:
    """`clip_gradients` reads `grad` of the LightningModule (T11): the mean of all ranks, or in local steps this rank's own."""
    first, second = [found[0] for found in job(clips, 2, kind, str(tmp_path))]
    assert len(first) == len(second) == 12
    pairs = list(zip(first, second, strict=True))
    assert all((one[0] == other[0]) == (kind == "bytegrad") for one, other in pairs)
    assert all(one[1] == pytest.approx(min(one[0], CLIP), rel=1e-4) for one in (*first, *second))
    assert any(one[0] > CLIP for one in first)


TWO_PACKAGES = """
import sys
import warnings
warnings.simplefilter("ignore")
import lightning.pytorch as ours, pytorch_lightning as theirs
from bagua_kernels.integrations.lightning import BaguaStrategy
quiet = {"accelerator": "cpu", "logger": False, "default_root_dir": sys.argv[1], "enable_progress_bar": False}
for own, other, package in ((ours, theirs, "lightning"), (theirs, ours, "pytorch_lightning")):
    assert "bagua" in own.strategies.StrategyRegistry, package
    for strategy in ("bagua", BaguaStrategy("bytegrad", package=package)):
        found = own.Trainer(strategy=strategy, **quiet).strategy
        assert isinstance(found, own.strategies.DDPStrategy), package
        assert not isinstance(found, other.strategies.DDPStrategy), package
        assert found.guest.spec == "bytegrad"
    try:
        other.Trainer(strategy=BaguaStrategy("bytegrad", package=package), **quiet)
    except Exception as error:
        print(type(error).__name__)
"""


@needs("pytorch_lightning")
def test_each_package_has_a_class_of_its_own(tmp_path: Path) -> None:
    """`lightning` and `pytorch_lightning` share neither their registries nor their classes (T9), and a process may have both."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_PACKAGES, str(tmp_path)], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # A Trainer of one package refuses the strategy of the other by itself.
    assert len(done.stdout.split()) == 2, done.stdout


def fits_by_hand(kind: str, folder: str) -> None:
    trainer = trainer_of("lightning.pytorch", kind, folder, enable_checkpointing=False, gradient_clip_val=None)
    trainer.strategy._layer_sync = Converts()
    trainer.accumulate_grad_batches = 1
    task = module_of("lightning.pytorch")
    task.automatic_optimization = False
    before = digest(task.net)

    def by_hand(batch: Any, batch_idx: int) -> None:
        optimizer = task.optimizers()
        optimizer.zero_grad()
        task.manual_backward(F.cross_entropy(task(batch[0]), batch[1]))
        optimizer.step()

    task.training_step = by_hand
    trainer.fit(task)
    algorithm_steps = trainer.global_step
    report([digest(task.net), digest(task.net) != before, algorithm_steps, loss_of(task.net), left_behind()])


@pytest.mark.parametrize("kind", ["bytegrad", "diloco"])
def test_manual_optimization_and_conversions(kind: str, tmp_path: Path) -> None:
    """Steps by hand (T12), of a model whose layers were exchanged before it is wrapped (T14)."""
    first, second = [found[0] for found in job(fits_by_hand, 2, kind, str(tmp_path))]
    assert first[0] == second[0]
    assert first[1:3] == [True, 12]
    assert first[3] < 0.6
    assert first[4] == second[4] == []


def validates(kind: str, folder: str) -> None:
    """Each rank trains on other samples, of which the model keeps running means."""
    trainer, task = (
        trainer_of("lightning.pytorch", kind, folder, enable_checkpointing=False),
        module_of("lightning.pytorch"),
    )
    norm = task.net.norm = torch.nn.BatchNorm1d(12)
    plain, seen = task.net.forward, list[Any]()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not task.training and not trainer.sanity_checking:
            seen.append(norm.running_mean.tolist())
        return plain(norm(x + trainer.global_rank * task.training))

    task.net.forward = forward
    trainer.fit(task)
    report(seen)


@pytest.mark.parametrize("kind", ["ddp", "hook", "bytegrad", "diloco"])
def test_all_ranks_validate_with_the_same_running_means(kind: str, tmp_path: Path) -> None:
    """DDP evaluates with rank 0's, and so metrics are those of one model."""
    first, second = [found[0] for found in job(validates, 2, kind, str(tmp_path))]
    assert first
    assert first == second


def averages(folder: str) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    trainer = trainer_of("lightning.pytorch", "diloco", folder, callbacks=[EMAWeightAveraging()])
    with pytest.raises(ValueError, match="EMAWeightAveraging averages parameters that each rank has of its own"):
        trainer.fit(module_of("lightning.pytorch"))
    report(left_behind())


def test_an_average_of_each_rank_is_refused(tmp_path: Path) -> None:
    """A checkpoint would have rank 0's alone, with which all ranks went on."""
    assert job(averages, 2, str(tmp_path)) == [[[]], [[]]]


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_names_and_refusals(tmp_path: Path) -> None:
    """The strategy's name, two optimizers, an optimizer of the algorithm's own, a hook that there is not."""
    from lightning.pytorch import Trainer

    from bagua_kernels.integrations.lightning import BaguaStrategy, strategy_class

    trainer = Trainer(accelerator="cpu", strategy="bagua", logger=False, default_root_dir=tmp_path)
    assert isinstance(trainer.strategy, strategy_class("lightning"))
    assert trainer.strategy.guest.spec == "bytegrad"
    assert BaguaStrategy("bytegrad", find_unused_parameters=True, block=64).guest.spec == "bytegrad"
    with pytest.raises(ValueError, match="makes its own optimizer"):
        BaguaStrategy("onebit_adam:freeze_step=2,lr=0.1")
    with pytest.raises(ValueError, match="no hook"):
        BaguaStrategy("diloco", hook=True)
    with pytest.raises(ValueError, match="expected one of lightning, pytorch_lightning"):
        strategy_class("torch")
