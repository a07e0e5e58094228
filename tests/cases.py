"""Named lengths and vectors, shared by tests and benchmarks."""

from __future__ import annotations

import torch

# Lengths at which kernels go wrong, and what each is for.
LENGTHS = {
    "empty": 0,
    "one": 1,
    "below_pad": 15,
    "pad": 16,
    "above_pad": 17,
    "below_block": 255,
    "block": 256,
    "above_block": 257,
    "prime": 1009,
    "task_and_tail": 64 * 256 + 3,
    "threads": 150_001,
}
# What the interpreter and the simulator, at a millisecond an element or so, have time for.
SHORT_LENGTHS = {name: n for name, n in LENGTHS.items() if n <= 1009}

# Layers of real networks, in elements: what buckets are made of.
LAYERS = {
    "resnet18_conv1": 64 * 3 * 7 * 7,
    "resnet18_fc": 512 * 1000,
    "bert_base_attention": 768 * 768,
    "bert_base_bias": 768,
    "gpt2_mlp": 768 * 3072,
}

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def mixed_bucket(align: int, seed: int = 0) -> tuple[torch.Tensor, list[slice]]:
    """Gradients as a bucket holds them: layers of different scale, heavy-tailed, of odd sizes, each from a boundary.

    Args:
        align: elements to whose multiples layers are aligned.
        seed: of the values.

    Returns:
        The flat vector, and where each layer lies in it.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = (7_777, 101_003, 513, 12_289, 40_001, 64)
    scales = (1e-2, 1e-5, 3e-4, 1e-3, 2e-5, 5e-3)
    parts, places, end = [], [], 0
    for size, scale in zip(sizes, scales, strict=True):
        normal = torch.randn(size, generator=generator)
        chi2 = torch.randn(4, size, generator=generator).square().mean(0)
        values = normal / chi2.sqrt() * scale
        room = -(-size // align) * align
        parts.append(torch.cat([values, torch.zeros(room - size)]))
        places.append(slice(end, end + size))
        end += room
    return torch.cat(parts), places
