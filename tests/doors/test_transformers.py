"""The Trainer of Transformers with an attached algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doors.jobs import SPECS, digest, job, left_behind, needs, report

pytestmark = [needs("transformers", "accelerate"), pytest.mark.processes]
STEPS, MIDDLE = 12, 6


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each token is the one before plus a constant."""

    def __init__(self, count: int, labels: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        starts, strides = torch.randint(0, 24, (2, count, 1), generator=generator)
        self.tokens = (starts + (1 + strides % 3) * torch.arange(12)) % 24
        self.classes = strides.flatten() % 3 if labels else None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[at]
        return {"input_ids": tokens, "labels": tokens if self.classes is None else self.classes[at]}


def model_of(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    if name == "bert":
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=24, num_labels=3, attention_probs_dropout_prob=0, hidden_dropout_prob=0, **small
            )
        )
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
    quiet = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=24, **sizes, **quiet))


def trainer_of(folder: str, kind: str, model: str = "gpt2", **more: Any) -> Any:
    import transformers

    from bagua_kernels.integrations.transformers import attach

    net = model_of(model)
    given = {
        "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 0.02, "save_strategy": "steps", "save_steps": MIDDLE, "eval_strategy": "steps", "eval_steps": MIDDLE,
        "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "seed": 1, "save_total_limit": 3,
    }  # fmt: skip
    labels = model == "bert"
    trainer = transformers.Trainer(
        model=net,
        args=transformers.TrainingArguments(folder, **{**given, **more}),
        train_dataset=Texts(256, labels),
        eval_dataset=Texts(32, labels),
    )
    if kind != "ddp":
        spec, hook = SPECS[kind]
        attach(trainer, spec, hook=hook)
    return trainer


def trains(folder: str, kind: str, model: str, more: dict[str, Any]) -> None:
    trainer = trainer_of(folder, kind, model, **more)
    seen: list[str] = []
    loop = trainer.evaluation_loop

    def looked(*arguments: Any, **named: Any) -> Any:
        seen.append(digest(trainer.model))
        return loop(*arguments, **named)

    trainer.evaluation_loop = looked
    result = trainer.train()
    saved = ""
    if trainer.is_world_process_zero():
        from safetensors.torch import load_file

        other = model_of(model)
        other.load_state_dict(load_file(Path(folder) / f"checkpoint-{MIDDLE}" / "model.safetensors"), strict=False)
        saved = digest(other)
    loss = trainer.evaluate()["eval_loss"]
    report(
        [
            digest(trainer.model),
            seen,
            saved,
            loss,
            result.global_step,
            left_behind(),
            trainer.model_wrapped is trainer.model,
        ]
    )


def resumes(folder: str, kind: str) -> None:
    trainer = trainer_of(folder, kind)
    trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{MIDDLE}"))
    report([digest(trainer.model), trainer.state.global_step])


@pytest.mark.parametrize("kind", ["ddp", *SPECS])
def test_training_and_resuming(kind: str, tmp_path: Path) -> None:
    """Equal bits; evaluation and what is saved within training have the mean model; a checkpoint goes on (T23, T24, T27)."""
    folder = str(tmp_path / kind)
    first, second = [found[0] for found in job(trains, 2, folder, kind, "gpt2", {})]
    assert first[0] == second[0]
    assert first[1] == second[1], "evaluation sees the same model on all ranks"
    assert first[2] == first[1][0]
    # Untrained it is log 24 = 3.18; three outer steps at 0.7 go less far than the others.
    assert first[3] < (2.4 if kind == "diloco" else 2.2)
    assert first[4] == STEPS
    if kind != "ddp":
        assert first[6]
        assert first[5] == second[5] == []
        assert [found[0] for found in job(resumes, 2, folder, kind)] == [[first[0], STEPS]] * 2


def refuses(folder: str) -> None:
    from bagua_kernels.integrations.transformers import attach

    trainer = trainer_of(folder, "ddp")
    attach(trainer, "bytegrad")
    with pytest.raises(ValueError, match="has an algorithm already"):
        attach(trainer, "bytegrad")
    for more, text in (({"auto_find_batch_size": True}, "auto_find_batch_size"),):  # T26
        with pytest.raises(ValueError, match=text):
            attach(trainer_of(folder, "ddp", **more), "bytegrad")
    step = trainer.training_step
    trainer.training_step = lambda *_: (
        (_ for _ in ()).throw(KeyError("a sample")) if trainer.state.global_step else step(*_)
    )
    with pytest.raises(KeyError):
        trainer.train()
    report(left_behind())


def test_refusals_and_exceptions(tmp_path: Path) -> None:
    """In one sentence; and nothing is left after an exception."""
    assert job(refuses, 2, str(tmp_path)) == [[[]], [[]]]


def losses(folder: str, model: str, averages: bool) -> None:
    trainer = trainer_of(
        folder, "bytegrad", model, average_tokens_across_devices=averages, max_steps=1, save_strategy="no", eval_strategy="no",
        gradient_accumulation_steps=1, per_device_train_batch_size=8 if trainer_size() == 1 else 4, learning_rate=0.0,
    )  # fmt: skip
    norms: list[float] = []
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = lambda *given, **named: (
        norms.append(float(found := clip(*given, **named))) or found
    )
    trainer.train()
    report(norms[0])


def trainer_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_gradients_are_those_of_one_process(model: str, tmp_path: Path) -> None:
    """BERT ignores the number of tokens: with `average_tokens_across_devices` its gradient is twice as large (T25)."""
    alone = job(losses, 1, str(tmp_path), model, False)[0][0]
    two = job(losses, 2, str(tmp_path), model, False)[0][0]
    averaged = job(losses, 2, str(tmp_path), model, True)[0][0]
    assert two == pytest.approx(alone, rel=0.3)
    assert averaged == pytest.approx(alone * (2 if model == "bert" else 1), rel=0.3)


def generates(folder: str, spec: str) -> None:
    """Trains a small T5 in rounds of four steps; evaluates and predicts in the middle of one."""
    import transformers

    from bagua_kernels.integrations.transformers import attach

    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
    )  # fmt: skip
    arguments = transformers.Seq2SeqTrainingArguments(
        folder, use_cpu=True, max_steps=MIDDLE, per_device_train_batch_size=4, learning_rate=0.05, predict_with_generate=True,
        generation_max_length=10, eval_strategy="steps", eval_steps=MIDDLE - 1, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_strategy="no", seed=1,
    )  # fmt: skip
    trainer = transformers.Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=Texts(64), eval_dataset=Texts(8), compute_metrics=lambda _: {}
    )
    attach(trainer, spec)
    seen: list[Any] = []
    generate = model.generate

    def looked(*given: Any, **named: Any) -> Any:
        with torch.no_grad():
            fixed = generate(input_ids=Texts(1).tokens, max_length=10)
        seen.append([digest(trainer.model), fixed.tolist()])
        return generate(*given, **named)

    model.generate = looked
    own: list[str] = []

    class Predicts(transformers.TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            own.append(digest(trainer.model))
            if state.global_step == 2:
                trainer.predict(Texts(8))

    trainer.add_callback(Predicts())
    trainer.train()
    report([own, seen])


def test_ranks_generate_with_one_model(tmp_path: Path) -> None:
    """Ranks of unequal weights would generate unequal lengths, and their collectives would part (T28)."""
    first, second = [found[0] for found in job(generates, 2, str(tmp_path), "diloco:interval=4")]
    assert first[0][1] != second[0][1], "in the middle of a round ranks have their own"
    assert len(first[1]) >= 2
    assert first[1] == second[1]


def test_names_of_files(tmp_path: Path) -> None:
    """A checkpoint has what the Trainer saves, and one folder more."""
    folder = tmp_path / "run"
    job(trains, 2, str(folder), "diloco", "gpt2", {"save_only_model": False})
    names = {one.name for one in (folder / f"checkpoint-{MIDDLE}").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "bagua_kernels"} <= names
    assert json.loads((folder / f"checkpoint-{MIDDLE}" / "bagua_kernels" / "checkpoint.json").read_text())["ranks"] == 2
