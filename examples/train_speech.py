"""Trains a small network to recognise the language of spoken prompts, whose lengths differ, with batches of equal cost.

    python examples/train_speech.py                                one process
    torchrun --nproc-per-node 2 examples/train_speech.py           two, which have the same work in each step

What concerns this project is marked with an arrow. The prompts are in speech_data.py.
"""

import argparse
import contextlib

import speech_data
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from bagua_kernels import comm
from bagua_kernels.algorithms import GradientAlgorithm, ModelAlgorithm, from_spec
from bagua_kernels.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler


class Net(nn.Module):
    """A GRU over the frames of prompts, and the mean of its states before their ends."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.inputs = nn.Linear(2 * speech_data.BANDS, width)
        self.recurrent, self.out = nn.GRU(width, width, batch_first=True), nn.Linear(width, len(speech_data.LANGUAGES))

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pairs = frames[:, : frames.shape[1] // 2 * 2].reshape(len(frames), -1, 2 * speech_data.BANDS)
        states, _ = self.recurrent(F.relu(self.inputs(pairs)))
        within = torch.arange(states.shape[1], device=frames.device) < lengths[:, None] // 2
        logits: torch.Tensor = self.out((states * within[..., None]).sum(1) / (lengths[:, None] // 2))
        return logits


def padded(prompts: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, ...]:
    """Fills prompts up to the longest; returns their frames, their lengths and their languages."""
    frames = nn.utils.rnn.pad_sequence([each for each, _ in prompts], batch_first=True)
    return frames, torch.tensor([len(each) for each, _ in prompts]), torch.tensor([label for _, label in prompts])


def main() -> None:
    """Reads the command line, trains, and prints the accuracy on prompts that were held back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad")
    parser.add_argument("--frames", type=int, default=1500, help="of a batch with its padding")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    comm.init()  # <- under torchrun, or alone
    torch.manual_seed(0)
    net = Net().to(comm.device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    model = from_spec(options.algorithm, net, optimizer)  # <- instead of DistributedDataParallel(...)
    training, testing = (list(zip(part.features, part.labels.tolist(), strict=True)) for part in speech_data.load())
    sampler = LoadBalancingDistributedSampler(training, complexity=lambda prompt: len(prompt[0]))  # <- costs
    batches = LoadBalancingDistributedBatchSampler(sampler, max_cost=options.frames)  # <- of different sizes
    loader = DataLoader(training, batch_sampler=batches, collate_fn=padded)  # type: ignore[arg-type, var-annotated]
    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        for batch in loader:
            frames, lengths, labels = (part.to(comm.device()) for part in batch)
            if isinstance(model, GradientAlgorithm):
                model.weigh(len(labels))  # <- the mean is one over prompts, whichever rank has how many
            optimizer.zero_grad()
            F.cross_entropy(model(frames, lengths), labels).backward()
            optimizer.step()
    frames, lengths, labels = (part.to(comm.device()) for part in padded(testing))
    # Of an algorithm on parameters each rank has its own: their mean is evaluated.
    with model.averaged() if isinstance(model, ModelAlgorithm) else contextlib.nullcontext(), torch.no_grad():
        right = (net(frames, lengths).argmax(1) == labels).float().mean().item()
    if comm.rank() == 0:
        print(f"accuracy {right:.2%} of {len(testing)} prompts, after {model.stats().steps} steps")
    model.close()
    comm.shutdown()  # <-


if __name__ == "__main__":
    main()
