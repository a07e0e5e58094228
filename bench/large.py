"""Vectors of more than 2^31 elements: every codec and optimizer is right at and beyond that place, or refuses by one sentence.

python -m bench.large [--elements 2148532224] [--codecs minmax_uint8 topk] [--optimizers SGD]

A codec encodes a bfloat16 vector that is zero but for two windows: one around element 2^31, or the middle of fewer elements, and
one at the end. What it decodes there is compared with what it makes of the same blocks alone. An optimizer's step is compared
with that of a window alone. One case takes up to 12 GB with the default number of elements; they run one after the other.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator

import torch

from bagua_kernels import optim
from bagua_kernels.compression import BlockCodec, Codec, codec, from_spec
from bagua_kernels.compression.minmax import MinMax

_ELEMENTS = (1 << 31) + (1 << 20)
_WINDOW = 1 << 16  # elements: whole blocks and whole chunks of every codec
# One state or none, for the memory: parameters and gradients take 8.6 GB.
_OPTIMIZERS = ("SGD", "Lion")
Found = tuple[str, str]


def windows(elements: int) -> list[slice]:
    """The parts that are compared: around 2^31, or the middle, and the end."""
    middle = min(1 << 31, elements // 2) // _WINDOW * _WINDOW
    last = (elements - _WINDOW) // _WINDOW * _WINDOW
    return [slice(middle - _WINDOW, middle + _WINDOW), slice(last, last + _WINDOW)]


def filled(elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A vector of zeros with random numbers in the windows."""
    x = torch.zeros(elements, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    for window in windows(elements):
        x[window] = torch.randn(window.stop - window.start, generator=generator).to(dtype)
    return x


def run_codec(found: Codec, elements: int) -> str:
    """Encodes and decodes; returns what was found.

    Raises:
        AssertionError: it is wrong.
    """
    x = filled(elements)
    payload = found.encode(x, seed=3)
    own = [x[window].clone() for window in windows(elements)]
    found.decode(payload, x.fill_(9.0))
    for window, before in zip(windows(elements), own, strict=True):
        decoded = x[window]
        assert decoded.isfinite().all(), f"not finite at {window}"
        if isinstance(found, BlockCodec) and not found.stochastic:
            alone = found.decode(found.encode(before, seed=3), torch.empty_like(before))
            assert torch.equal(decoded, alone), f"another result than alone at {window}"
        elif isinstance(found, MinMax):
            # Random numbers choose one of the two levels around each element.
            error = (decoded.float() - before.float()).abs().view(-1, found.block)
            assert (error <= level(before, found) * 1.05).all(), f"another level at {window}"
        else:
            # What random numbers or a choice of elements leave of them has their signs.
            assert (decoded * before >= 0).all(), f"another sign at {window}"
    gap = x[windows(elements)[0].stop : windows(elements)[1].start]
    assert not gap.numel() or float(gap.abs().amax()) == 0.0, "zeros became other numbers"
    return "right"


def level(x: torch.Tensor, found: MinMax) -> torch.Tensor:
    """Returns the distance of the levels of each block, shape (blocks, 1)."""
    blocks = x.float().view(-1, found.block)
    return (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / found.RULE.levels


def run_optimizer(name: str, elements: int) -> str:
    """Takes a step on one tensor; returns what was found.

    Raises:
        AssertionError: it is wrong.
    """
    make = getattr(optim, name)
    whole = torch.nn.Parameter(filled(elements), requires_grad=True)
    whole.grad = whole.detach().clone()
    parts = [torch.nn.Parameter(whole.detach()[window].clone()) for window in windows(elements)]
    for part in parts:
        part.grad = part.detach().clone()
    make([whole], lr=0.1).step()
    make(parts, lr=0.1).step()
    for window, part in zip(windows(elements), parts, strict=True):
        assert torch.equal(whole.detach()[window], part.detach()), f"another result than alone at {window}"
    return "right"


def cases(codecs: list[str], optimizers: list[str], elements: int) -> Iterator[Found]:
    """Yields the name of each case, and what was found: "right", or the sentence that refuses it."""
    runs = [(spec, lambda spec=spec: run_codec(from_spec(spec), elements)) for spec in codecs]
    runs += [(name, lambda name=name: run_optimizer(name, elements)) for name in optimizers]
    for name, run in runs:
        try:
            yield name, run()
        except (ValueError, TypeError) as refusal:
            yield name, f"refused: {refusal}"
        except AssertionError as error:
            yield name, f"WRONG: {error}"
        gc.collect()


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases, and returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=_ELEMENTS)
    parser.add_argument("--codecs", nargs="*", default=[name for name in codec.names() if name != "identity"])
    parser.add_argument("--optimizers", nargs="*", default=list(_OPTIMIZERS))
    options = parser.parse_args(arguments)
    wrong = False
    for name, found in cases(options.codecs, options.optimizers, options.elements):
        print(f"{name:20} {found}", flush=True)
        wrong |= found.startswith("WRONG")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
