"""Lightning's Trainer with an algorithm in place of DDP: `python lightning_trainer.py --strategy diloco:interval=8`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer

from bagua_kernels.integrations.lightning import BaguaStrategy


class Classifier(LightningModule):
    """A small network; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> torch.utils.data.DataLoader[Any]:
    """Returns points of four classes."""
    torch.manual_seed(0)
    x, centres = torch.randn(2048, 16), torch.randn(4, 16)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.cdist(x, centres).argmin(1)), batch_size=32
    )


def main() -> None:
    """Trains, and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="bytegrad")
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    strategy = BaguaStrategy(options.strategy)
    trainer = Trainer(accelerator="cpu", devices=options.devices, strategy=strategy, max_epochs=2, logger=False)
    trainer.fit(Classifier(), data())
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()
