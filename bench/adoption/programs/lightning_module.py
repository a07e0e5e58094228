"""A module of Lightning with its Trainer, which starts two ranks: `python lightning_module.py`."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset


class Points(LightningDataModule):
    def setup(self, stage=None):
        x, centres = torch.randn(2304, 64), torch.randn(8, 64)
        y = torch.cdist(x, centres).argmin(1)
        self.train, self.val = TensorDataset(x[:2048], y[:2048]), TensorDataset(x[2048:], y[2048:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


if __name__ == "__main__":
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Classifier(), Points())
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['val_loss']:.3f}")
