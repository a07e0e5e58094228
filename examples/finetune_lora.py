"""Fine-tunes a GPT-2 by LoRA on two machines behind a slow line, through PEFT and Accelerate, and compares ways to exchange.

    python examples/finetune_lora.py                          two emulated hosts behind 100 and 10 Mbit/s (Linux, root)
    python examples/finetune_lora.py --size gpt2              of GPT-2's own shape, 124 M parameters
    torchrun --nproc-per-node 2 examples/finetune_lora.py     trains once, on machines of one's own

What concerns this project is marked with an arrow; the rest is an ordinary loop of Accelerate. The base is frozen and the same
on all machines: only digests of it are sent. Each rank computes on one core, and so does the machine alone.

The text is in corpus.py; hosts, the table and the picture are in finetune_report.py. It takes the packages accelerate, peft and
transformers.
"""

import argparse
import copy
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import corpus
import finetune_report
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from finetune_base import CONTEXT, SIZES, base_of
from peft import LoraConfig, get_peft_model

from bagua_kernels import comm
from bagua_kernels.integrations.accelerate import prepare

BATCH = 2  # windows per rank and step
VALIDATION = 128  # windows, over all ranks
INTERVAL = 10  # steps from one exchange of DiLoCo to the next
# `delay`: a mean is put in place so many steps later, and travels meanwhile. There are 15 rounds: too few for more momentum.
SPECS = {
    "bytegrad": "bytegrad",
    "diloco": f"diloco:interval={INTERVAL},codec=absmax_int8,delay=2,outer_momentum=0.5",
}
# Steps of a turn in which throughput is measured. A turn of DiLoCo has one exchange, in its middle.
TURN = {"alone": INTERVAL, "diloco": INTERVAL, "ddp": 3, "bytegrad": 6}


def model_of(size: str, weights: Path | None, seed: int) -> torch.nn.Module:
    """Returns a frozen GPT-2, the same on all machines, and adapters of a seed."""
    base = base_of(size, weights)
    torch.manual_seed(seed)
    attention = ["c_attn", "attn.c_proj"]
    adapters: torch.nn.Module = get_peft_model(
        base, LoraConfig(r=16, lora_alpha=32, target_modules=attention, fan_in_fan_out=True)
    )
    return adapters


class Training:
    """One model in training.

    Attributes:
        way: how ranks exchange: `alone` for not at all, `ddp`, or a key of `SPECS`.
        start_bytes: that this rank has sent until training began.
        losses: of this rank, for each step.
    """

    def __init__(
        self, accelerator: Accelerator, way: str, model: torch.nn.Module, text: corpus.Corpus, steps: int, seed: int
    ) -> None:
        model = copy.deepcopy(model)
        optimizer: Any = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        before = finetune_report.bytes_sent()
        if way == "ddp":
            model, optimizer = accelerator.prepare(model, optimizer)
        elif way != "alone":
            model, optimizer = prepare(accelerator, model, optimizer, SPECS[way])  # <- instead of accelerator.prepare
        accelerator.wait_for_everyone()
        self.start_bytes = finetune_report.bytes_sent() - before
        self.way, self.losses = way, list[float]()
        self.accelerator, self.model, self.optimizer, self.schedule, self.text = (
            accelerator, model, optimizer, schedule, text,
        )  # fmt: skip
        self.x, self.y = corpus.windows(text.training, CONTEXT)
        # Windows of all ranks and steps: equal for all ways.
        shape = steps, accelerator.num_processes, BATCH
        order = torch.randint(len(self.x), shape, generator=torch.Generator().manual_seed(seed))
        self.order = order[:, accelerator.process_index]

    def step(self) -> None:
        """Takes a step."""
        windows = self.order[len(self.losses)]
        loss = self.loss(self.x[windows], self.y[windows])
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of some windows, in nats per character."""
        return F.cross_entropy(self.model(input_ids=x).logits.flatten(0, 1), y.flatten())

    def validation_loss(self) -> float:
        """Returns the loss on held back text of the mean of all ranks' models; each rank looks at its part."""
        x, y = (
            part[:: max(1, len(part) // VALIDATION)][:VALIDATION]
            for part in corpus.windows(self.text.validation, CONTEXT)
        )
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if self.way in SPECS:
            self.model.synchronize()  # <- all ranks have the mean from here on: this ends training
        with torch.no_grad():
            mean = self.accelerator.reduce(self.loss(x[rank::ranks], y[rank::ranks]), "mean")
        return float(mean)


def finetune(options: argparse.Namespace, accelerator: Accelerator, text: corpus.Corpus) -> dict[str, Any]:
    """Trains with each way from several seeds, and returns losses."""
    found: dict[str, Any] = {}
    for seed in range(1, options.seeds + 1):
        model = model_of(options.size, options.base, seed)
        for way in options.ways:
            training = Training(accelerator, way, model, text, options.steps, seed)
            for step in range(options.steps):
                training.step()
                if accelerator.is_main_process and (step + 1) % 20 == 0:
                    recent = sum(training.losses[-20:]) / 20
                    print(f"{way}, seed {seed}, step {step + 1}: loss {recent:.3f}", flush=True)
            losses = training.losses
            found.setdefault(way, []).append({"loss": losses, "validation_loss": training.validation_loss()})
    return found


def measure(options: argparse.Namespace, accelerator: Accelerator, text: corpus.Corpus) -> dict[str, Any]:
    """Measures steps of all ways, in turns, for the machine may be busy with other work; returns seconds and bytes per step."""
    model = model_of(options.size, options.base, 1)
    # Kernels compile, and memory is allocated, in steps that are not measured.
    first = {"alone": 3, "ddp": 2, "bytegrad": 3, "diloco": INTERVAL + INTERVAL // 2}
    trainings = {}
    start_seconds = {}
    for way, steps in first.items():
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        trainings[way] = Training(accelerator, way, model, text, steps + options.turns * TURN[way] + 1, 1)
        start_seconds[way] = time.perf_counter() - began
        for _ in range(steps):
            trainings[way].step()
    turns = []
    for turn in range(options.turns):
        measured = {}
        # What the machine does beside this grows or shrinks slowly: each other turn is in the opposite order.
        for way, training in list(trainings.items())[:: 1 if turn % 2 == 0 else -1]:
            accelerator.wait_for_everyone()
            before, began = finetune_report.bytes_sent(), time.perf_counter()
            for _ in range(TURN[way]):
                training.step()
            seconds = time.perf_counter() - began
            accelerator.wait_for_everyone()
            sent = finetune_report.bytes_sent() - before
            measured[way] = {"seconds": seconds / TURN[way], "bytes": sent / TURN[way]}
        turns.append(measured)
        if accelerator.is_main_process:
            print(f"turn {turn + 1} of {options.turns} is measured", flush=True)
    trainings["diloco"].model.wait()  # <- the last exchange may be under way
    own = {
        "turns": turns,
        "start_bytes": {way: each.start_bytes for way, each in trainings.items()},
        "start_seconds": start_seconds,
        "trained_bytes": sum(4 * p.numel() for p in model.parameters() if p.requires_grad),
        "base_bytes": sum(4 * p.numel() for p in model.parameters() if not p.requires_grad),
    }
    return {"ranks": comm.world().all_gather_object(own)}


def train(options: argparse.Namespace) -> None:
    """Trains on this rank; the first one writes what was measured."""
    cores = sorted(os.sched_getaffinity(0))
    accelerator = Accelerator(cpu=True)
    # One core per rank, as the machine alone has it.
    os.sched_setaffinity(0, {cores[accelerator.process_index % len(cores)]})
    torch.set_num_threads(1)
    comm.init()  # <- several models, one after the other, have one world; a loop with one model leaves this out
    text = corpus.load(options.data) if options.data else corpus.manual()
    found = (measure if options.part == "steps" else finetune)(options, accelerator, text)
    if accelerator.is_main_process:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"finetune_{options.name}.json").write_text(json.dumps(found))
    accelerator.end_training()
    comm.shutdown()  # <-


def main() -> None:
    """Reads the command line; starts the ranks, or trains as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--base", type=Path, help="weights by finetune_base.py; else they are made here, or random")
    parser.add_argument("--base-steps", type=int, help="in which the base is trained here; 200, or 0 with --size gpt2")
    parser.add_argument("--rates", type=float, nargs="*", default=[100.0, 10.0], help="Mbit/s of each host's line")
    parser.add_argument("--ways", nargs="+", default=["ddp", "diloco", "alone"], help="whose losses are compared")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of each training whose loss is compared")
    parser.add_argument("--turns", type=int, default=6, help="in which steps are measured")
    parser.add_argument("--data", type=Path, help="text file to read instead of Python's manual")
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--part", choices=("losses", "steps"), default="losses", help="what ranks do")
    parser.add_argument("--name", default="losses", help="of the file that the first rank writes")
    options = parser.parse_args()
    options.output = options.output.resolve()
    options.base = options.base and options.base.resolve()
    if options.base_steps is None:
        # GPT-2's own shape takes too long here.
        options.base_steps = 0 if options.size == "gpt2" else 200
    if min(options.steps, options.seeds, options.turns) < 1:
        parser.error("steps, seeds and turns must be 1 or more")
    if "RANK" in os.environ:
        # PyTorch's and Transformers' own deprecations.
        warnings.simplefilter("ignore", FutureWarning)
        train(options)
    else:
        finetune_report.run(options)


if __name__ == "__main__":
    main()
