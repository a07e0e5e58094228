"""`bench.speed`: groups that are measured alone, and the sparse step that PyTorch operations take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import speed
from bench.workloads.outer import BETA, CODEC, eager_step


def test_groups_alone_do_not_replace_a_file_of_others(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    speed.check_groups(["a"], ["a", "b"], output)
    output.write_text(json.dumps({"rows": [{"group": "a"}, {"group": "b"}]}))
    speed.check_groups(["a", "b"], ["a", "b"], output)
    with pytest.raises(ValueError, match=r"out\.json has other groups, such as b"):
        speed.check_groups(["a"], ["a", "b"], output)
    with pytest.raises(ValueError, match="there is no group c; known are a, b"):
        speed.check_groups(["a", "c"], ["a", "b"], None)


def test_eager_step_leaves_what_ours_does() -> None:
    """But for magnitudes that are rounded to neighbours, and values that lie between both magnitudes."""
    generator = torch.Generator().manual_seed(0)
    start, x, before = torch.randn(3, 5 * CODEC.chunk, generator=generator)
    ours, theirs = before.clone(), before.clone()
    CODEC.encode_outer(start, x, ours, BETA)
    index, codes, low, high = eager_step(start, x, theirs, BETA, CODEC.k, CODEC.chunk)
    assert index.shape == codes.shape == (5, CODEC.k)
    assert (high > low).all()
    near = torch.isclose(ours, theirs, rtol=1e-2, atol=5e-2)
    assert near.float().mean() > 0.9999
    changed = ours != BETA * before + (start - x)
    assert torch.equal(changed, theirs != BETA * before + (start - x))
    assert changed.sum() == index.numel()
