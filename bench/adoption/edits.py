"""What their users change in the programs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
MOST_LINES = 3
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Edit:
    """A program, and its lines with an algorithm in place of DDP.

    Attributes:
        title: what it is.
        changes: lines, and what stands in their place.
        launcher: arguments of Python before the program's name.
        restarts: how often all ranks are started anew.
    """

    title: str
    changes: tuple[tuple[str, str], ...]
    launcher: tuple[str, ...] = RANKS
    restarts: int = 0

    def edited(self, text: str) -> str:
        """Returns the program with its changed lines.

        Raises:
            ValueError: a line is not there once.
        """
        for old, new in self.changes:
            if text.count(f"{old}\n") != 1:
                raise ValueError(f"expected the line {old!r} once in the program, found it {text.count(old)} times")
            text = text.replace(f"{old}\n", f"{new}\n")
        return text


SPEC = "bytegrad:block=256"
EDITS = {
    "plain_loop": Edit(
        "plain loop",
        (
            (
                "from torch.nn.parallel import DistributedDataParallel as DDP",
                "from bagua_kernels.algorithms import ByteGrad",
            ),
            ("    model = DDP(net)", "    model = ByteGrad(net)"),
        ),
    ),
    "char_gpt": Edit(
        "small GPT in one file",
        (
            (
                "from torch.nn.parallel import DistributedDataParallel as DDP",
                "from bagua_kernels.algorithms import ByteGrad",
            ),
            ("    model = DDP(model)", "    model = ByteGrad(model)"),
        ),
    ),
    "lightning_module": Edit(
        "Lightning",
        (
            (
                "from torch.utils.data import DataLoader, TensorDataset",
                "from torch.utils.data import DataLoader, TensorDataset\n\n"
                "from bagua_kernels.integrations.lightning import BaguaStrategy",
            ),
            ('        strategy="ddp",', f'        strategy=BaguaStrategy("{SPEC}"),'),
        ),
        launcher=(),
    ),
    "fabric_script": Edit(
        "Fabric",
        (
            (
                "from torch.utils.data import DataLoader, TensorDataset",
                "from torch.utils.data import DataLoader, TensorDataset\n\n"
                "from bagua_kernels.integrations.fabric import BaguaStrategy",
            ),
            (
                '    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")',
                f'    fabric = Fabric(accelerator="cpu", devices=2, strategy=BaguaStrategy("{SPEC}"))',
            ),
        ),
        launcher=(),
    ),
    "accelerate_script": Edit(
        "Accelerate",
        (
            (
                "from torch.utils.data import DataLoader, TensorDataset",
                "from torch.utils.data import DataLoader, TensorDataset\n\n"
                "from bagua_kernels.integrations.accelerate import prepare",
            ),
            (
                "    model, optimizer = accelerator.prepare(model, optimizer)",
                f'    model, optimizer = prepare(accelerator, model, optimizer, "{SPEC}")',
            ),
        ),
    ),
    "trainer_causal_lm": Edit(
        "Trainer, causal language model",
        (
            (
                "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed",
                "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed\n\n"
                "from bagua_kernels.integrations.transformers import attach",
            ),
            ("    trainer.train()", f'    attach(trainer, "{SPEC}")\n    trainer.train()'),
        ),
    ),
    "trainer_adapters": Edit(
        "Trainer with PEFT",
        (
            (
                "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed",
                "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed\n\n"
                "from bagua_kernels.integrations.transformers import attach",
            ),
            ("    trainer.train()", f'    attach(trainer, "{SPEC}")\n    trainer.train()'),
        ),
    ),
    "image_training": Edit(
        "image classification with a moving average of weights",
        (
            (
                "from torch.nn.parallel import DistributedDataParallel as NativeDDP",
                "from bagua_kernels.algorithms import ByteGrad",
            ),
            (
                "    model = NativeDDP(model, broadcast_buffers=True)",
                "    model = ByteGrad(model, broadcast_buffers=True)",
            ),
        ),
    ),
    "ray_workers": Edit(
        "Ray Train",
        (
            (
                "from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model",
                "from ray.train.torch import TorchTrainer, prepare_data_loader",
            ),
            (
                "from torch.utils.data import DataLoader, TensorDataset",
                "from torch.utils.data import DataLoader, TensorDataset\n\nfrom bagua_kernels.algorithms import ByteGrad",
            ),
            ("    model = prepare_model(net)", "    model = ByteGrad(net)"),
        ),
        launcher=(),
    ),
    "elastic": Edit(
        "torchrun, elastic",
        (
            (
                "from torch.nn.parallel import DistributedDataParallel as DDP",
                "from bagua_kernels.algorithms import ByteGrad",
            ),
            ("        self.model = DDP(net)", "        self.model = ByteGrad(net)"),
        ),
        launcher=(*RANKS, "--max-restarts", "1"),
        restarts=1,
    ),
}


def changed_lines(before: str, after: str) -> int:
    """Returns how many lines a user touches: of each place those that go, or those that come if they are more; no empty ones."""
    count = 0
    old, new = ([line for line in text.splitlines() if line.strip()] for text in (before, after))
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            count += max(b - a, d - c)
    return count


def program(name: str) -> tuple[str, str]:
    """Returns the text of a program before and after."""
    before = (PROGRAMS / f"{name}.py").read_text()
    return before, EDITS[name].edited(before)
