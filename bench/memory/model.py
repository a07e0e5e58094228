"""The model and the optimizers of the memory benchmark."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua_kernels.algorithms import Algorithm, from_spec
from bagua_kernels.comm import Communicator

WIDTH, BLOCKS, WORDS = 768, 12, 50_257  # of GPT-2, whose 124 M parameters the largest model has
TOKENS = 8


class Block(torch.nn.Module):
    """The parameters of a transformer's block, without attention: the memory of activations is to be small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps vectors of shape (tokens, width) to vectors of the same shape."""
        x = x + self.out(self.qkv(self.norm(x))[:, : x.shape[1]].tanh())
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


class Model(torch.nn.Module):
    """Token embeddings and blocks: one tensor holds a third of all parameters, as in a small language model."""

    def __init__(self, scale: float = 1.0) -> None:
        """Makes a model of 124 M parameters times `scale`, which divides the width by its root.

        Args:
            scale: above 0 and up to 1.
        """
        super().__init__()
        width = max(32, round(WIDTH * scale**0.5 / 32) * 32)
        self.words = torch.nn.Embedding(max(64, round(WORDS * scale**0.5)), width)
        self.places = torch.nn.Embedding(1024, width) if scale > 0.1 else torch.nn.Embedding(TOKENS, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(BLOCKS)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Returns one number for word numbers of shape (tokens,)."""
        places = torch.arange(len(words), device=words.device)
        y: torch.Tensor = self.blocks(self.words(words) + self.places(places)).square().mean()
        return y


Wrapped = tuple[torch.nn.Module, torch.optim.Optimizer]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the plain loop, whose steps need no memory of their own."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def wrap(spec: str, model: torch.nn.Module, communicator: Communicator | None = None) -> Wrapped:
    """Wraps a model; an optimizer that belongs to the algorithm takes the place of AdamW.

    Args:
        spec: "plain", "ddp", or the spec of an algorithm.
        model: to be wrapped.
        communicator: of the ranks; those of `comm.init` if None.
    """
    if spec == "plain":
        return model, adamw(model)
    if spec == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), adamw(model)
    kind, _ = Algorithm.named(spec)
    if kind.__name__ in ("QAdam", "OneBitAdam"):
        found = from_spec(spec, model, communicator=communicator)
        return found, found.optimizer  # type: ignore[return-value]
    optimizer = adamw(model)
    return from_spec(spec, model, optimizer, communicator=communicator), optimizer


Step = Callable[[int], None]


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Returns a function that takes the training step of a number."""
    module = getattr(model, "module", model)
    words = module.words.num_embeddings

    def step(number: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        model(torch.randint(words, (TOKENS,), generator=generator)).backward()
        optimizer.step()

    return step
