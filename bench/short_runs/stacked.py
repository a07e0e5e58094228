"""Many copies of a small transformer, each with parameters of its own, that are trained by one call of each operation.

A rank of a simulated job is one copy, and so are ranks of all ways that are compared: a study of hundreds of small jobs takes a
tenth of the time that threads would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bagua_kernels.optim.orthogonal import orthogonal

WIDTH, LAYERS, HEADS, CONTEXT, SYMBOLS = 64, 2, 4, 32, 128
# Of Newton and Schulz's iteration, as Muon's author has them.
_QUINTIC = (3.4445, -4.775, 2.0315)


def _shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of one copy's parameters; matrices are (inputs, outputs)."""
    found: dict[str, tuple[int, ...]] = {"characters": (SYMBOLS, WIDTH), "places": (CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        found |= {
            f"{layer}.norm": (2, WIDTH),
            f"{layer}.attention": (WIDTH, 3 * WIDTH),
            f"{layer}.attention_bias": (3 * WIDTH,),
            f"{layer}.out": (WIDTH, WIDTH),
            f"{layer}.out_bias": (WIDTH,),
            f"{layer}.second_norm": (2, WIDTH),
            f"{layer}.up": (WIDTH, 4 * WIDTH),
            f"{layer}.up_bias": (4 * WIDTH,),
            f"{layer}.down": (4 * WIDTH, WIDTH),
            f"{layer}.down_bias": (WIDTH,),
        }
    return found | {"norm": (2, WIDTH), "head": (WIDTH, SYMBOLS)}


SHAPES = _shapes()
MATRICES = [name for name in SHAPES if name.split(".")[-1] in ("attention", "out", "up", "down")]
PARAMETERS = sum(math.prod(shape) for shape in SHAPES.values())

State = dict[str, torch.Tensor]


def fresh(seed: int) -> State:
    """The parameters of one copy, as they begin."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in SHAPES.items():
        if name.endswith("norm"):
            state[name] = torch.stack([torch.ones(WIDTH), torch.zeros(WIDTH)])
        elif name.endswith("bias"):
            state[name] = torch.zeros(shape)
        else:
            deviation = 0.02 if name in ("characters", "places") else shape[0] ** -0.5
            state[name] = torch.randn(shape, generator=generator) * deviation
    return state


class Copies:
    """So many copies of the transformer.

    Attributes:
        count: how many they are.
        parameters: by name, shape (count, *of one copy), float32; their gradients are zero after `zero_grad`.
    """

    def __init__(self, state: State, count: int) -> None:
        """Begins with `count` copies of a state."""
        self.count = count
        sizes = {name: math.prod(shape) * count for name, shape in SHAPES.items()}
        # One vector for all: an optimizer takes one pass, and matrices, which Muon trains, are its second part.
        self.order = [name for name in SHAPES if name not in MATRICES] + MATRICES
        self.split = sum(sizes[name] for name in self.order if name not in MATRICES)
        self.flat, self.gradient = torch.empty(sum(sizes.values())), torch.zeros(sum(sizes.values()))
        self.parameters: State = {}
        first = 0
        for name in self.order:
            part = slice(first, first + sizes[name])
            view = self.flat[part].view(count, *SHAPES[name])
            view.copy_(state[name])
            leaf = view.detach().requires_grad_()
            leaf.grad = self.gradient[part].view_as(view)
            self.parameters[name] = leaf
            first = part.stop

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean losses of each copy, shape (count,), in nats.

        Args:
            x: numbers of characters, shape (count, batch, length).
            y: those that follow, of the same shape.
        """
        p, (count, batch, length) = self.parameters, x.shape
        rows = x + torch.arange(count).view(count, 1, 1) * SYMBOLS
        hidden = F.embedding(rows, p["characters"].view(-1, WIDTH)) + p["places"][:, :length].unsqueeze(1)
        hidden = hidden.reshape(count, batch * length, WIDTH)
        for layer in range(LAYERS):
            parts = self._linear(self._norm(hidden, f"{layer}.norm"), f"{layer}.attention")
            q, k, v = parts.view(count * batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + self._linear(seen.transpose(1, 2).reshape(hidden.shape), f"{layer}.out")
            wide = F.gelu(self._linear(self._norm(hidden, f"{layer}.second_norm"), f"{layer}.up"))
            hidden = hidden + self._linear(wide, f"{layer}.down")
        logits = torch.bmm(self._norm(hidden, "norm"), p["head"])
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(count, -1).mean(dim=1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.baddbmm(self.parameters[f"{name}_bias"].unsqueeze(1), x, self.parameters[name])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        p = self.parameters[name]
        return F.layer_norm(x, (WIDTH,)) * p[:, :1] + p[:, 1:]

    def zero_grad(self) -> None:
        """Sets all gradients to zero."""
        self.gradient.zero_()

    def state(self, copy: int) -> State:
        """The parameters of one copy."""
        return {name: p[copy].detach().clone() for name, p in self.parameters.items()}


class AdamW:
    """One pass of PyTorch's AdamW over all copies."""

    def __init__(self, copies: Copies, rate: float, *, end: int | None = None) -> None:
        """Trains the first `end` elements, by default all."""
        parameter = torch.nn.Parameter(copies.flat[:end])
        parameter.grad = copies.gradient[:end]
        self._inner = torch.optim.AdamW([parameter], lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self._rate = rate

    def step(self, factor: float) -> None:
        """Steps with `factor` times the learning rate."""
        self._inner.param_groups[0]["lr"] = self._rate * factor
        self._inner.step()


class Muon:
    """Muon for the matrices, and AdamW for everything else, as `bagua_kernels.optim.muon_with_adamw` has them."""

    def __init__(self, copies: Copies, rate: float, muon_rate: float, momentum: float = 0.95) -> None:
        """Begins without momentum."""
        self._others = AdamW(copies, rate, end=copies.split)
        self._matrices = [copies.parameters[name] for name in MATRICES]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        self._rate, self._momentum = muon_rate, momentum

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Steps with `factor` times both learning rates."""
        self._others.step(factor)
        for p, momentum in zip(self._matrices, self._momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 1 - self._momentum)
            direction = orthogonal(p.grad.lerp(momentum, self._momentum), _QUINTIC, 5, 1e-7)
            rows, columns = p.shape[2], p.shape[1]
            p.add_(direction, alpha=-self._rate * factor * max(1.0, rows / columns) ** 0.5)


Optimizer = AdamW | Muon
OPTIMIZERS: dict[str, Callable[[Copies], Optimizer]] = {
    "adamw": lambda copies: AdamW(copies, 3e-3),
    "muon": lambda copies: Muon(copies, 3e-3, 2.4e-2),
}
