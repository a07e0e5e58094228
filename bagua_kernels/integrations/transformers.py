"""Algorithms in the Trainer of Hugging Face's Transformers.

>>> from bagua_kernels.integrations.transformers import attach
>>> trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
>>> attach(trainer, "diloco:interval=30")
>>> trainer.train()
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bagua_kernels.integrations.accelerate import BaguaKwargs, given_to_ddp
from bagua_kernels.integrations.guest import Guest
from bagua_kernels.integrations.libraries import library

_TRANSFORMERS = library("transformers")
_FOLDER = "bagua_kernels"  # in the folder of a checkpoint


def attach(trainer: Any, spec: str = "bytegrad", *, hook: bool = False, **options: Any) -> Any:
    """Has a Trainer train with an algorithm in place of DDP; call it before `train()`.

    1. `train` makes the optimizer, prepares the model for mixed precision and puts the algorithm around it. With `hook`
       DDP stays, and the algorithm's hook averages gradients in it.
    2. Evaluation, prediction and generation within training see the mean parameters of all ranks. So do checkpoints.
    3. Each checkpoint's folder gets a folder `bagua_kernels`, with what each rank remembers.
       `train(resume_from_checkpoint=...)` goes on bit for bit on as many ranks.
    4. At the end of training, parameters become equal on all ranks, and the algorithm is closed, also after an exception.

    `trainer.model` stays the bare model, and so do the names in what is saved. With PEFT the adapters alone are exchanged.

    Some models ignore `num_items_in_batch`, such as BERT. The Trainer multiplies their loss by the number of ranks, with DDP,
    too: use `TrainingArguments(average_tokens_across_devices=False)`.

    Args:
        trainer: a `transformers.Trainer`, before training.
        spec: as for `from_spec`.
        hook: True to keep DDP.
        **options: further arguments of the algorithm.

    Returns:
        The trainer.

    Raises:
        ValueError: the Trainer shards the model, uses several GPUs in one process or looks for a batch size. Also if it has an
            algorithm already, or as for the algorithm.
    """
    arguments = trainer.args
    for name, problem in (
        ("is_fsdp_enabled", "shards the model by FSDP"),
        ("is_deepspeed_enabled", "shards the model by DeepSpeed"),
    ):
        if getattr(trainer, name, False):
            raise ValueError(f"this Trainer {problem}, but ranks need whole models here: leave that out")
    if arguments.n_gpu > 1:
        raise ValueError(
            "this Trainer uses several GPUs in one process: start a process for each of them, as by torchrun"
        )
    if arguments.auto_find_batch_size:
        raise ValueError("auto_find_batch_size makes the model anew while others wait: set per_device_train_batch_size")
    if (
        isinstance(trainer.accelerator.ddp_handler, BaguaKwargs)
        or getattr(trainer.train, "__self__", trainer) is not trainer
    ):
        raise ValueError("this Trainer has an algorithm already: attach one alone")
    session = _Session(trainer, spec, hook, options)
    session.open()
    return trainer


class _Session:
    """The methods of a Trainer that have to know of the algorithm."""

    def __init__(self, trainer: Any, spec: str, hook: bool, options: dict[str, Any]) -> None:
        self._trainer, self._spec, self._options = trainer, spec, options
        self._hooks = hook
        # What does not fit is refused before training.
        self._guest = self._new_guest()
        self._train: Callable[..., Any] = trainer.train
        self._evaluate: Callable[..., Any] = trainer.evaluate
        self._predict: Callable[..., Any] = trainer.predict
        self._save: Callable[..., Any] = trainer._save_checkpoint
        self._load: Callable[..., Any] = trainer._load_optimizer_and_scheduler

    def open(self) -> None:
        trainer = self._trainer
        trainer.train, trainer.evaluate, trainer.predict = self.train, self.evaluate, self.predict
        trainer._save_checkpoint, trainer._load_optimizer_and_scheduler = self.save, self.load

    def _new_guest(self) -> Guest:
        return Guest(self._spec, hook=self._hooks, **self._options)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Trains with the algorithm, from its beginning to its end."""
        trainer = self._trainer
        if self._guest.acts:
            raise RuntimeError("train() was called within train(): wait for its end")
        self._guest = self._new_guest()
        try:
            if self._hooks:
                handler = BaguaKwargs(self._spec, self._options, **given_to_ddp(trainer.accelerator.ddp_handler))
                trainer.accelerator.ddp_handler, self._guest = handler, handler.guest
            else:
                self._wrap()
            result = self._train(*arguments, **named)
            self._guest.synchronize()
        except BaseException as error:
            self._guest.close(error)
            raise
        else:
            self._guest.close()
        finally:
            trainer.model_wrapped = trainer.model
        return result

    def _wrap(self) -> None:
        trainer = self._trainer
        accelerator = trainer.accelerator
        # First: it may move parameters, as evaluation would in the middle of training (cpu to cpu:0).
        model = accelerator.prepare_model(trainer.model, evaluation_mode=True)
        optimizer: Any = trainer.create_optimizer()
        bare = getattr(optimizer, "optimizer", optimizer)
        device: torch.device = trainer.args.device
        trainer.model_wrapped = self._guest.wrap(model, [bare], device, accelerator.scaler)

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Evaluates the mean model; generation, too."""
        with self._guest.averaged():
            return self._evaluate(*arguments, **named)

    def predict(self, *arguments: Any, **named: Any) -> Any:
        """Predicts with the mean model; generation, too."""
        with self._guest.averaged():
            return self._predict(*arguments, **named)

    def save(self, model: Any, trial: Any, *arguments: Any, **named: Any) -> None:
        """Saves the mean model in a checkpoint, and what each rank remembers."""
        trainer = self._trainer
        name = f"{_TRANSFORMERS.trainer_utils.PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        # First: older checkpoints are removed by the next call.
        self._guest.save(Path(trainer._get_output_dir(trial=trial)) / name / _FOLDER)
        with self._guest.averaged():
            self._save(model, trial, *arguments, **named)

    def load(self, checkpoint: Any) -> None:
        """Restores the optimizer, and last what each rank remembers."""
        self._load(checkpoint)
        if checkpoint is None or not self._guest.acts:
            return
        folder = Path(os.fspath(checkpoint)) / _FOLDER
        if not folder.is_dir():
            raise ValueError(
                f"{checkpoint} lacks the folder {_FOLDER}, in which ranks have what they remember: resume from a checkpoint of a "
                "Trainer with an algorithm, or load its weights and begin anew"
            )
        self._guest.load(folder)
