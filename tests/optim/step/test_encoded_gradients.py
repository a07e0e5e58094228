"""A step from payloads is decoding, then a step."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import optim
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8
from tests.grids import grid

CODECS = [AbsMaxInt8(), AbsMaxInt4()]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in [(700,), (3, 40), (1,)]]


@grid(codec=CODECS, name__options=[("AdamW", {}), ("SGD", {"momentum": 0.9, "maximize": True})], cover=1)
def test_step_from_several_payloads(codec: AbsMaxInt8, name: str, options: dict[str, object]) -> None:
    mine, other = parameters(), parameters()
    direct, decoded = (getattr(optim, name)(p, lr=0.1, **options) for p in (mine, other))
    ran = []
    direct.register_step_post_hook(lambda *_: ran.append(1))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        payloads = {}
        for p, q in zip(mine[:2], other[:2], strict=True):
            ranks = [codec.encode(torch.randn(p.numel(), generator=generator)) for _ in range(3)]
            payloads[p] = torch.stack(ranks)
            q.grad = codec.decode_sum(payloads[p], torch.empty(p.numel()), 1 / 3).view_as(q)
        mine[2].grad = torch.ones(1)
        direct.step_from_encoded(codec, payloads, 1 / 3)
        decoded.step()
        assert mine[0].grad is None
        assert torch.equal(mine[2].grad, torch.ones(1))
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p, q)
        for key, value in decoded.state[q].items():
            assert torch.equal(direct.state[p][key], value)
    assert len(ran) == 3
    assert not torch.equal(mine[0], parameters()[0])
    assert torch.equal(mine[2], parameters()[2])


def test_ordinary_steps_between() -> None:
    codec, p, q = AbsMaxInt8(), torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(300))
    direct, decoded = optim.AdamW([p]), optim.AdamW([q])
    gradient = torch.linspace(-1, 1, 300)
    payload = codec.encode(gradient)[None]
    for encoded in (False, True, True, False):
        p.grad, q.grad = gradient.clone(), gradient.clone()
        if encoded:
            q.grad = codec.decode_sum(payload, torch.empty(300))
            direct.step_from_encoded(codec, {p: payload})
        else:
            direct.step()
        decoded.step()
    assert torch.equal(p, q)


def test_refusals() -> None:
    codec, p = AbsMaxInt8(), torch.nn.Parameter(torch.ones(256))
    payload = codec.encode(torch.ones(256))[None]
    with pytest.raises(RuntimeError, match="decode it before"):
        optim.LAMB([p]).step_from_encoded(codec, {p: payload})
    with pytest.raises(ValueError, match="in no group"):
        optim.AdamW([p]).step_from_encoded(codec, {torch.nn.Parameter(torch.ones(256)): payload})
    with pytest.raises(RuntimeError, match="decode it before"):
        optim.AdamW([p], extras=optim.Extras(average=0.9)).step_from_encoded(codec, {p: payload})
    with pytest.raises(ValueError, match="payload"):
        optim.AdamW([p]).step_from_encoded(codec, {p: payload[:, 1:]})
    wide = torch.nn.Parameter(torch.ones(256, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="32 bits"):
        optim.AdamW([wide]).step_from_encoded(codec, {wide: payload})
    assert p.grad is None
    assert torch.equal(p, torch.ones(256))
