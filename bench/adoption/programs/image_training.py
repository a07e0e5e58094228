"""Image classification with a moving average of weights: `torchrun --nproc-per-node 2 image_training.py`.

In the style of the training scripts of image libraries.
"""

import argparse
import copy
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        source = model.module if hasattr(model, "module") else model
        for kept, value in zip(self.module.state_dict().values(), source.state_dict().values(), strict=True):
            if kept.dtype.is_floating_point:
                kept.lerp_(value, 1 - self.decay)
            else:
                kept.copy_(value)


class NativeScaler:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, parameters, clip_grad, need_update):
        self.scaler.scale(loss).backward()
        if need_update:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self.scaler.step(optimizer)
            self.scaler.update()


def network(classes):
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, model_ema, loss_scaler):
    model.train()
    began, last = time.time(), len(loader) - 1
    for update_idx, (inputs, target) in enumerate(loader):
        need_update = (update_idx + 1) % args.grad_accum_steps == 0
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(inputs), target) / args.grad_accum_steps
        if not need_update:
            with model.no_sync():
                loss_scaler(loss, optimizer, model.parameters(), args.clip_grad, need_update)
            continue
        loss_scaler(loss, optimizer, model.parameters(), args.clip_grad, need_update)
        optimizer.zero_grad()
        model_ema.update(model)
        if update_idx == last and args.rank == 0:
            print(f"Train: {epoch} loss {loss.item() * args.grad_accum_steps:.3f} time {time.time() - began:.1f}s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    x = torch.randn(512, 3, 16, 16)
    y = (x.mean((2, 3)) @ torch.randn(3, 4)).argmax(1)
    data = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 16, sampler=sampler)

    model = network(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    model_ema = ModelEma(model, decay=0.9)
    model = NativeDDP(model, broadcast_buffers=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(
            epoch, model, loader, optimizer, nn.CrossEntropyLoss(), args, model_ema, loss_scaler=NativeScaler()
        )
    if args.rank == 0:
        torch.save(
            {"state_dict": model.module.state_dict(), "state_dict_ema": model_ema.module.state_dict()}, "last.pt"
        )


if __name__ == "__main__":
    main()
