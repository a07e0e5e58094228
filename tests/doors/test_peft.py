"""Adapters alone are exchanged: the frozen base is compared, never sent, and a quantized one is not touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.doors.jobs import job, needs, report
from tests.doors.test_transformers import Texts, model_of

pytestmark = [needs("transformers", "peft", "accelerate"), pytest.mark.processes]


def adapted(base: Any) -> Any:
    import peft

    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    )


class Quantized(torch.nn.Module):
    """Stands for a layer of 4 bits: packed weights in a parameter of uint8 that needs no gradient."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.packed = torch.nn.Parameter((weight * 16).round().clamp(0, 255).to(torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed.float() / 16)


def trains(spec: str, hook: bool, folder: str) -> None:
    import transformers

    from bagua_kernels.integrations.transformers import attach

    base = model_of("gpt2")
    base.lm_head = torch.nn.Sequential(base.lm_head, Quantized(torch.rand(24, 24)))
    model = adapted(base)
    packed = base.lm_head[1].packed
    before = packed.detach().clone()
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=6, per_device_train_batch_size=4, report_to="none", disable_tqdm=True, save_strategy="no",
        learning_rate=0.05,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts(64))
    attach(trainer, spec, hook=hook)
    seen: list[Any] = []

    class Looks(transformers.TrainerCallback):
        """At the end of training, before the algorithm is closed."""

        def on_train_end(self, *_: Any, **__: Any) -> None:
            found = getattr(trainer.model_wrapped, "communicator", None)
            if found is not None:
                stats = trainer.model_wrapped.stats()
                seen.append([trainer.model_wrapped._bytes_sent, stats.bytes_sent, stats.steps])

    trainer.add_callback(Looks())
    trainer.train()
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    base_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    weights = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    report(
        [
            seen[0] if seen else None,
            trained,
            base_bytes,
            packed.dtype == torch.uint8 and torch.equal(packed, before),
            float(weights.double().sum()),
        ]
    )


@pytest.mark.parametrize("spec", ["bytegrad:block=64", "diloco:interval=3"])
def test_the_base_is_never_sent(spec: str, tmp_path: Any) -> None:
    """T29 and T30: what is sent at the start is less than the adapters, their optimizer and digests."""
    first, second = [found[0] for found in job(trains, 2, spec, False, str(tmp_path))]
    (sent, in_training, steps), trained, base = first[:3]
    assert sent - in_training < 8 * trained + 4096 < base
    assert in_training < steps * 8 * trained + 4096 < steps * base
    assert [first[3], second[3]] == [True, True], "a quantized base stays as it is"
    assert first[4] == second[4]
