"""Kubeflow: a function as a training job, on this machine or on a cluster; needs `pip install kubeflow`."""

from __future__ import annotations

import os
import sys


def train() -> None:
    """One rank of the job. It is sent as text, so that all it needs is imported inside."""
    import torch

    from bagua_kernels import comm
    from bagua_kernels.algorithms import ByteGrad

    comm.init()
    model = ByteGrad(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {comm.rank()} of {comm.size()}: loss {loss.item():.4f}")
    model.close()
    comm.shutdown()


def main(nodes: int) -> None:
    """Starts the job and prints what it logs.

    Args:
        nodes: of the cluster; 1 for this machine.
    """
    from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient

    local = nodes == 1
    client = TrainerClient(backend_config=LocalProcessBackendConfig() if local else None)
    # Without variables a local process would have no PATH, and pip no configuration.
    env = dict(os.environ) if local else None
    trainer = CustomTrainer(func=train, packages_to_install=["bagua-kernels"], num_nodes=nodes, env=env)
    name = client.train(runtime="torch-distributed", trainer=trainer)
    status = client.wait_for_job_status(name, status={"Complete", "Failed"}).status
    for line in client.get_job_logs(name):
        print(line)
    if status != "Complete":
        sys.exit(f"the job {name} has failed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
