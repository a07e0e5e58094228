"""A loop of one's own with Lightning's Fabric, which starts two ranks: `python fabric_script.py`."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    x, centres = torch.randn(2048, 64), torch.randn(8, 64)
    loader = DataLoader(TensorDataset(x, torch.cdist(x, centres).argmin(1)), batch_size=16, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(loader)

    for epoch in range(2):
        for number, (inputs, labels) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": 2})


if __name__ == "__main__":
    main()
