"""The Trainer of Transformers with an attached algorithm: `torchrun --nproc-per-node 2 transformers_trainer.py`."""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bagua_kernels.integrations.transformers import attach


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each token is the one before plus a constant."""

    def __init__(self, count: int) -> None:
        starts, strides = torch.randint(0, 24, (2, count, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + (1 + strides % 3) * torch.arange(16)) % 24

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[at], "labels": self.tokens[at]}


def main() -> None:
    """Trains, and prints the loss of evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="diloco:interval=10")
    parser.add_argument("--output", default="results/trainer")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_layer=2, n_embd=32, n_head=2, n_positions=16))
    arguments = TrainingArguments(
        options.output, use_cpu=True, max_steps=60, learning_rate=1e-2, report_to="none", save_strategy="no"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(4096), eval_dataset=Sequences(64))
    attach(trainer, options.algorithm)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()
