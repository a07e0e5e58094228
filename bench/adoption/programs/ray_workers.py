"""Two workers of Ray Train: `python ray_workers.py`."""

import tempfile

import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_loop_per_worker(config):
    torch.manual_seed(0)
    x, centres = torch.randn(2048, 64), torch.randn(8, 64)
    loader = DataLoader(TensorDataset(x, torch.cdist(x, centres).argmin(1)), batch_size=32, shuffle=True)
    loader = prepare_data_loader(loader)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 3e-3},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    print(trainer.fit().metrics)
