"""Ray Train with an algorithm in a plain loop; checkpoints of all ranks, and workers that are started again."""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device

from bagua_kernels import checkpoint, comm
from bagua_kernels.algorithms import from_spec


def train(config: dict[str, Any]) -> None:
    """One worker: Ray has made torch's default group, which `comm.init` joins."""
    comm.init(device=get_device())
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(comm.device())
    x, centres = torch.randn(2048, 16), torch.randn(4, 16)
    y = torch.cdist(x, centres).argmin(1)
    model = from_spec(config["algorithm"], net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    first = 0
    try:
        if (latest := ray.train.get_checkpoint()) is not None:
            with latest.as_directory() as folder:
                first = checkpoint.load(folder, model, model.optimizer)["epoch"]
        for epoch in range(first, 4):
            for rows in torch.randperm(len(x))[comm.rank() :: comm.size()].split(32):
                loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                model.optimizer.step()
                model.optimizer.zero_grad()
            if epoch == 1 and config["fails"] and first == 0 and comm.rank() == 1:
                raise RuntimeError("this worker is lost once")
            # All workers write into one folder, of which Ray makes one checkpoint.
            folder = f"{config['folder']}/epoch-{epoch}"
            checkpoint.save(folder, model, model.optimizer, epoch=epoch + 1)
            ray.train.report({"loss": loss.item()}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        model.synchronize()
        model.close()
    finally:
        comm.shutdown()  # the process may be used again


def main(algorithm: str = "bytegrad", fails: bool = True) -> None:
    """Trains with two workers of which one fails once, and prints the loss."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    config = {"algorithm": algorithm, "folder": tempfile.mkdtemp(), "fails": fails}
    run = ray.train.RunConfig(storage_path=tempfile.mkdtemp(), failure_config=ray.train.FailureConfig(max_failures=1))
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(f"loss {(result.metrics or {})['loss']:.3f}")


if __name__ == "__main__":
    main()
