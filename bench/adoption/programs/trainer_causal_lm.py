"""A causal language model in the Trainer of Transformers: `torchrun --nproc-per-node 2 trainer_causal_lm.py`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sequences(torch.utils.data.Dataset):
    def __init__(self, count):
        starts, strides = torch.randint(0, 24, (2, count, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + (1 + strides % 3) * torch.arange(16)) % 24

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main():
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_layer=2, n_embd=64, n_head=2, n_positions=16))
    args = TrainingArguments(
        "trainer",
        use_cpu=True,
        max_steps=30,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=15,
        save_steps=15,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(4096), eval_dataset=Sequences(64))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
