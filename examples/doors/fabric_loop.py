"""A loop of Lightning's Fabric with an algorithm in place of DDP: `python fabric_loop.py --strategy bytegrad`."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from bagua_kernels.integrations.fabric import BaguaStrategy


def main() -> None:
    """Trains, and prints the loss of the mean model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="bytegrad")
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, centres = torch.randn(2048, 16), torch.randn(4, 16)
    y = torch.cdist(x, centres).argmin(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)

    fabric = Fabric(accelerator="cpu", devices=options.devices, strategy=BaguaStrategy(options.strategy))
    fabric.launch()
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(loader)

    for _ in range(4):
        for inputs, labels in loader:
            fabric.backward(F.cross_entropy(model(inputs), labels))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    with fabric.strategy.averaged(), torch.no_grad():
        loss = F.cross_entropy(net(x), y)
    fabric.print(f"loss {loss.item():.3f}")
    fabric.strategy.close()


if __name__ == "__main__":
    main()
