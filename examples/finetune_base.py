"""Trains the base that `finetune_lora.py` adapts: a small GPT-2, on the text of corpus.py, by one process with all cores.

    python examples/finetune_base.py --output base.pt

It stands for a published model. It takes the package transformers.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from rich.progress import track
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64  # characters of a window
BATCH = 16  # windows of a step
SIZES = {
    "tiny": {"vocab_size": corpus.SYMBOLS, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "small": {"vocab_size": corpus.SYMBOLS, "n_positions": CONTEXT, "n_embd": 448, "n_layer": 4, "n_head": 7},
    "gpt2": {},  # the configuration's defaults
}


def base_of(size: str, weights: Path | None = None) -> torch.nn.Module:
    """Returns a GPT-2 with the weights of a file, or random ones of seed 0: the same on all machines.

    Args:
        size: a key of `SIZES`.
        weights: a file that this program wrote for the same size.
    """
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    base: torch.nn.Module = GPT2LMHeadModel(
        GPT2Config(**SIZES[size], **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    )
    if weights is not None:
        base.load_state_dict(torch.load(weights))
    return base


def main() -> None:
    """Trains, and writes the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True, help="file of weights to write")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("steps must be 1 or more")
    base = base_of(options.size)
    x, y = corpus.windows(corpus.load().training, CONTEXT)
    optimizer = torch.optim.AdamW(base.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=options.steps)
    order = torch.randint(len(x), (options.steps, BATCH), generator=torch.Generator().manual_seed(0))
    for windows in track(order, "the base"):
        loss = F.cross_entropy(base(input_ids=x[windows]).logits.flatten(0, 1), y[windows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"the base's loss after {options.steps} steps: {loss.item():.3f} nats per character", flush=True)
    torch.save(base.state_dict(), options.output)


if __name__ == "__main__":
    main()
