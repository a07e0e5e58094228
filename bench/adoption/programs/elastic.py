"""A loop that goes on from its snapshot: `torchrun --standalone --nproc-per-node 2 --max-restarts 1 elastic.py`.

One process ends in the middle of the second epoch, as a lost machine would. torchrun starts all anew.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, net, optimizer, loader, path):
        self.net, self.optimizer, self.loader, self.path, self.epochs_run = net, optimizer, loader, path, 0
        if os.path.exists(path):
            snapshot = torch.load(path)
            net.load_state_dict(snapshot["MODEL_STATE"])
            optimizer.load_state_dict(snapshot["OPTIMIZER"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"goes on from epoch {self.epochs_run}")
        self.model = DDP(net)

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(self.loader):
            if epoch == 1 and number == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
                os._exit(3)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if dist.get_rank() == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "OPTIMIZER": self.optimizer.state_dict()}
                torch.save({**state, "EPOCHS_RUN": epoch + 1}, self.path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, centres = torch.randn(2048, 64), torch.randn(8, 64)
    data = TensorDataset(x, torch.cdist(x, centres).argmin(1))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    Trainer(net, torch.optim.AdamW(net.parameters(), lr=3e-3), loader, "snapshot.pt").train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
