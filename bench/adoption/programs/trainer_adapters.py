"""LoRA adapters of PEFT in the Trainer of Transformers: `torchrun --nproc-per-node 2 trainer_adapters.py`."""

import torch
from peft import LoraConfig, get_peft_model
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
    base = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_layer=2, n_embd=64, n_head=2, n_positions=16))
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(base, config)
    args = TrainingArguments(
        "adapters",
        use_cpu=True,
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        save_steps=15,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Sequences(4096))
    trainer.train()
    model.save_pretrained("adapters/last")


if __name__ == "__main__":
    main()
