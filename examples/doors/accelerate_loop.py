"""A loop of Accelerate with an algorithm in place of DDP: `accelerate launch accelerate_loop.py --algorithm bytegrad`."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from bagua_kernels.integrations.accelerate import averaged, prepare


def main() -> None:
    """Trains, and prints the loss of the mean model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="bytegrad")
    options = parser.parse_args()
    torch.manual_seed(0)
    x, centres = torch.randn(2048, 16), torch.randn(4, 16)
    y = torch.cdist(x, centres).argmin(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = prepare(accelerator, net, optimizer, options.algorithm)
    loader = accelerator.prepare(loader)

    for _ in range(4):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    with averaged(model), torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    accelerator.print(f"loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
