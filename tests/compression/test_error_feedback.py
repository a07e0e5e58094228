"""Error feedback: nothing is lost, whatever the codec, the layout or a checkpoint does."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.compression import (
    AbsMaxInt4,
    AbsMaxInt8,
    Cast,
    Codec,
    Contractive,
    ErrorFeedback,
    Identity,
    MinMaxUInt8,
    Piece,
    RandomK,
    Sign,
    ThresholdTopK,
    TopK,
    TwoMagnitudes,
    Unbiased,
    from_spec,
)
from tests.cases import mixed_bucket
from tests.conftest import EMULATED, Target
from tests.grids import grid, only

CODECS: list[Codec] = [
    AbsMaxInt8(),
    AbsMaxInt4(),
    MinMaxUInt8(stochastic=True),
    Sign(),
    Sign(two_means=True),
    TwoMagnitudes(),
    from_spec("qsgd:bits=4,block=128"),
    from_spec("qsgd:bits=2,norm=l2"),
    from_spec("natural"),
    from_spec("terngrad"),
    from_spec("fp8:format=e5m2"),
    Cast(),
    Identity(),
    TopK(0.1),
    ThresholdTopK(0.1),
    RandomK(0.1),
    RandomK(0.1, unbiased=True),
    TopK(0.1, values="absmax_int8"),
]
# By default without two that draw as others do.
DEFAULT = [codec for codec in CODECS if codec not in (from_spec("qsgd:bits=2,norm=l2"), from_spec("terngrad"))]
some = grid(cover=1, codec=CODECS[:4] if EMULATED else only(CODECS, *DEFAULT))


def vector(n: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)


def run(
    feedback: ErrorFeedback, key: str, n: int, steps: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of all inputs, sum of all that was sent), float64."""
    inputs = torch.zeros(n, dtype=torch.float64, device=device)
    sent = torch.zeros_like(inputs)
    for step in range(steps):
        x = vector(n, step, device)
        payload = feedback.encode(key, x, seed=step)
        inputs += x
        sent += feedback.codec.decode(payload, torch.empty(n, device=device))
    return inputs, sent


@some
def test_sent_and_residual_add_up_in_float64(target: Target, codec: Codec) -> None:
    n, steps = (300, 2) if EMULATED else (1500, 30)
    feedback = ErrorFeedback(codec, dtype=torch.float64)
    inputs, sent = run(feedback, "a", n, steps, target.device)
    residual = feedback.residual("a", inputs)
    assert (sent + residual - inputs).abs().max() <= 1e-10 * inputs.abs().max()


@some
def test_sent_and_residual_add_up_in_one_pass(target: Target, codec: Codec) -> None:
    n, steps = (300, 2) if EMULATED else (1500, 30)
    feedback = ErrorFeedback(codec)
    inputs, sent = run(feedback, "a", n, steps, target.device)
    residual = feedback.residual("a", inputs)
    assert (sent + residual - inputs).abs().max() <= 1e-5 * max(float(inputs.abs().max()), float(residual.abs().max()))


@some
def test_one_pass_is_the_sequence(target: Target, codec: Codec) -> None:
    """The fused kernel gives the bytes and the residual of adding, encoding, decoding and subtracting."""
    n = 300 if EMULATED else 5000
    feedback = ErrorFeedback(codec)
    x, residual = vector(n, 1, target.device), vector(n, 2, target.device) * 0.1
    feedback.residual("a", x).copy_(residual)
    payload = feedback.encode("a", x, seed=9)
    total = x + residual
    expected = codec.encode(total * torch.tensor(feedback.factor), seed=9)
    assert torch.equal(payload, expected)
    assert torch.equal(feedback.residual("a", x), total - codec.decode(expected, torch.empty_like(x)))


@grid(cover=1, codec=[c for c in CODECS if isinstance(c.bias, Unbiased)])
def test_unbiased_codecs_are_scaled_or_refused(codec: Codec) -> None:
    assert isinstance(codec.bias, Unbiased)
    assert ErrorFeedback(codec).factor == 1 / (1 + codec.bias.omega)
    with pytest.raises(ValueError, match="needs a contraction"):
        ErrorFeedback(codec, scale_unbiased=False)


@pytest.mark.slow
def test_scaling_is_what_keeps_it_from_diverging() -> None:
    """QSGD of 2 bits and the Euclidean norm: bounded with the factor, beyond all bounds without."""
    codec = from_spec("qsgd:bits=2,norm=l2,block=512")
    scaled, unscaled = ErrorFeedback(codec), ErrorFeedback(codec)
    unscaled.factor = 1.0
    for step in range(60):
        x = vector(2048, step, torch.device("cpu"))
        scaled.encode("a", x, seed=step)
        unscaled.encode("a", x, seed=step)
    assert float(scaled.norm()) < 100 * float(x.norm())
    assert not float(unscaled.norm()) < 1e6 * float(x.norm())


@grid(cover=1, codec=[c for c in CODECS if isinstance(c.bias, Contractive)])
def test_residuals_stay_bounded(codec: Codec) -> None:
    feedback = ErrorFeedback(codec)
    norms = []
    for step in range(120):
        feedback.encode("a", vector(2048, step, torch.device("cpu")), seed=step)
        norms.append(float(feedback.norm()))
    assert max(norms[60:]) <= 1.5 * max(norms[:60]) + 1e-6


def test_a_bad_step_does_not_spoil_the_residual(target: Target) -> None:
    for codec in (AbsMaxInt8(), Sign(), Identity(), Cast("float16")):
        feedback = ErrorFeedback(codec)
        x = vector(600, 1, target.device)
        feedback.encode("a", x)
        before = feedback.residual("a", x).clone()
        bad = x.clone()
        bad[5] = float("nan")
        payload = feedback.encode("a", bad)
        assert codec.decode(payload, torch.empty_like(x))[5].isnan()
        after = feedback.residual("a", x)
        assert after.isfinite().all()
        assert after[5] == before[5]


def test_residuals_survive_a_checkpoint_and_a_new_layout() -> None:
    codec = AbsMaxInt4()
    flat, places = mixed_bucket(codec.block)
    names = [f"layer{i}" for i in range(len(places))]
    pieces = [Piece(name, p.start, p.stop - p.start) for name, p in zip(names, places, strict=True)]
    feedback = ErrorFeedback(codec)
    feedback.lay_out({"bucket0": pieces})
    feedback.encode("bucket0", flat)
    kept = {p.name: feedback.residual("bucket0", flat)[p.start : p.start + p.numel].clone() for p in pieces}

    # In the other order, in two vectors.
    halves: dict[str, list[Piece]] = {"b0": [], "b1": []}
    ends = {"b0": 0, "b1": 0}
    for i, piece in enumerate(reversed(pieces)):
        key = f"b{i % 2}"
        halves[key].append(Piece(piece.name, ends[key], piece.numel))
        ends[key] += -(-piece.numel // codec.block) * codec.block

    resumed = ErrorFeedback(codec)
    resumed.lay_out(halves)
    resumed.load_state_dict(feedback.state_dict())
    feedback.lay_out(halves)
    for one in (feedback, resumed):
        assert one.state_dict()["residuals"].keys() == kept.keys()
        for key, moved in halves.items():
            residual = one.residual(key, torch.empty(ends[key]))
            for piece in moved:
                assert torch.equal(residual[piece.start : piece.start + piece.numel], kept[piece.name])
    x = vector(ends["b0"], 3, torch.device("cpu"))
    assert torch.equal(feedback.encode("b0", x), resumed.encode("b0", x))


def test_wrong_layouts() -> None:
    feedback = ErrorFeedback(AbsMaxInt8())
    with pytest.raises(ValueError, match="overlaps another"):
        feedback.lay_out({"a": [Piece("x", 0, 10), Piece("y", 5, 10)]})
    with pytest.raises(ValueError, match="occurs twice"):
        feedback.lay_out({"a": [Piece("x", 0, 10)], "b": [Piece("x", 0, 10)]})
    feedback.encode("a", torch.ones(10))
    with pytest.raises(ValueError, match="call lay_out when vectors change"):
        feedback.encode("a", torch.ones(11))
    feedback.load_state_dict({"residuals": {"a": torch.ones(10), "b": torch.ones(12)}})
    feedback.lay_out({"v": [Piece("a", 0, 10), Piece("b", 10, 11)]})
    for _ in range(2):
        # An error changes nothing: it comes again, and nothing is lost.
        with pytest.raises(ValueError, match="does not fit"):
            feedback.encode("v", torch.ones(32))
        assert feedback.state_dict()["residuals"].keys() == {"a", "b"}
    feedback.lay_out({"v": [Piece("a", 0, 10), Piece("b", 10, 12)]})
    with pytest.raises(ValueError, match="does not fit"):
        feedback.encode("v", torch.ones(21))
    with pytest.raises(ValueError, match="has the name of a piece"):
        feedback.encode("a", torch.ones(10))
    assert torch.equal(feedback.residual("v", torch.ones(32))[:22], torch.ones(22))
    with pytest.raises(ValueError, match="from outside"):
        ErrorFeedback(from_spec("terngrad:shared=true"))
    with pytest.raises(ValueError, match="must be float32 or float64"):
        ErrorFeedback(AbsMaxInt8(), dtype=torch.float16)


@grid(cover=1, codec=only(CODECS, MinMaxUInt8(stochastic=True), Sign(), *CODECS[11:16]))
def test_parameters_leave_no_graph_behind(codec: Codec) -> None:
    """Tensors that require gradients are vectors as any others."""
    feedback = ErrorFeedback(codec)
    parameter = torch.nn.Parameter(torch.ones(300))
    for step in range(2):
        payload = feedback.encode("a", parameter, seed=step)
    assert not feedback.residual("a", parameter).requires_grad
    codec.decode(payload, parameter)
    assert parameter.is_leaf
    codec.decode_sum(payload[None], parameter)
    codec.encode(parameter)
