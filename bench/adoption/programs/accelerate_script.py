"""A loop of Accelerate with accumulation and a schedule: `torchrun --nproc-per-node 2 accelerate_script.py`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    x, centres = torch.randn(2304, 64), torch.randn(8, 64)
    y = torch.cdist(x, centres).argmin(1)
    train = DataLoader(TensorDataset(x[:2048], y[:2048]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(x[2048:], y[2048:]), batch_size=32)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=256)
    model, optimizer = accelerator.prepare(model, optimizer)
    train, test, schedule = accelerator.prepare(train, test, schedule)

    for epoch in range(2):
        model.train()
        for inputs, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for inputs, labels in test:
            with torch.no_grad():
                predictions = model(inputs).argmax(1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            right.append(predictions == labels)
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean():.3f}")
    accelerator.save_state("accelerate")
    accelerator.end_training()


if __name__ == "__main__":
    main()
