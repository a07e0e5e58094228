"""What docs/codecs.md says: its table is that of the registry, and its code runs, the codec of its own on every backend."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bagua_kernels.compression import Codec, Contractive, codec, from_spec
from tests.conftest import EMULATED, Target
from tests.grids import folded

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
USING, OWN = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.count("|") == 9
][2:]
N = 300 if EMULATED else 5003
BLOCK = 64


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The page's codec in a file of its own; its name leaves the registry afterwards."""
    file = tmp_path_factory.mktemp("page") / "root_int4.py"
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("root_int4_of_the_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_codecs", dict(codec._codecs))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def pad16(size: int) -> int:
    return -(-size // 16) * 16


def blocks_of(x: F32) -> F32:
    rows = np.zeros((-(-x.size // BLOCK), BLOCK), dtype=np.float32)
    rows.reshape(-1)[: x.size] = x
    return rows


def encoded(x: F32) -> U8:
    """The payload of values that are 0 or neither tiny nor huge; float32, operation by operation."""
    rows = blocks_of(x)
    scales = np.abs(rows).max(1, keepdims=True)
    finite = np.isfinite(scales)
    with np.errstate(all="ignore"):
        per_unit = np.where(scales > 0, np.float32(7) / scales, np.float32(0))
        steps = np.rint(np.sqrt(np.abs(rows) * per_unit * np.float32(7)))
    codes = np.where(finite, np.where(rows < 0, -1, 1) * np.clip(np.nan_to_num(steps), 0, 7), 0).astype(np.int64) & 15
    half = BLOCK // 2
    packed = (codes[:, :half] | codes[:, half:] << 4).astype(np.uint8).tobytes()
    words = np.where(finite, scales.view(np.uint32), np.uint32(0x7FC00000)).tobytes()
    return np.frombuffer(
        words.ljust(pad16(len(words)), b"\0") + packed.ljust(pad16(len(packed)), b"\0"), dtype=np.uint8
    )


def decoded(payload: U8, n: int) -> F32:
    count = -(-n // BLOCK)
    scales = payload[: 4 * count].view(np.float32)[:, None]
    packed = payload[pad16(4 * count) :][: count * BLOCK // 2].reshape(count, -1).astype(np.int32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)
    signed = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    # The next float32 above 1/7: the nearest, times 7, is 1 too.
    part = signed * np.float32(1 / 7)
    return (part * np.abs(part) * scales).reshape(-1)[:n]


def vector(n: int, seed: int) -> F32:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(n) * np.exp(generator.standard_normal(n)) * 1e-2).astype(np.float32)


def same(a: torch.Tensor, b: F32) -> bool:
    """Equal in every bit but those of a NaN."""
    left = a.cpu().numpy()
    nan = np.isnan(left) & np.isnan(b)
    return np.array_equal(np.where(nan, 0, left).view(np.uint32), np.where(nan, 0, b).view(np.uint32))


def test_own_codec_is_found_by_its_spec(page: ModuleType) -> None:
    own = from_spec(f"root_int4:block={BLOCK}")
    assert own == page.RootInt4(BLOCK)
    assert isinstance(own, Codec)
    assert not own.stochastic
    for block in (2**i for i in range(5, 13)):
        assert 0 < page.RootInt4(block).bias.delta < 1
    with pytest.raises(ValueError, match="power of two"):
        from_spec("root_int4:block=100")


@pytest.mark.parametrize("spec", ["root_int4", "absmax_int4"])
def test_bounds_that_the_text_compares(page: ModuleType, spec: str) -> None:
    bias = from_spec(spec).bias
    assert isinstance(bias, Contractive)
    assert f"{1 - bias.delta:.3g}" in PAGE.split("The bound is derived as follows")[1].split("###")[0]


def test_own_codec_has_the_bytes_of_the_oracle(target: Target, page: ModuleType) -> None:
    own = from_spec(f"root_int4:block={BLOCK}")
    x = vector(N, 1)
    x[:3] = 0.0, -0.0, 1e-12
    # A block of zeros, one of equal values, and one with a NaN of either sign.
    x[BLOCK : 2 * BLOCK] = 0
    x[2 * BLOCK : 3 * BLOCK] = -0.3
    x[3 * BLOCK + 1 : 3 * BLOCK + 3] = np.nan, -np.nan
    payload = own.encode(torch.from_numpy(x).to(target.device))
    assert np.array_equal(payload.cpu().numpy(), encoded(x))
    out = own.decode(payload, torch.empty(N, device=target.device))
    assert same(out, decoded(encoded(x), N))
    assert same(out[2 * BLOCK : 3 * BLOCK], x[2 * BLOCK : 3 * BLOCK])
    assert out[3 * BLOCK : 4 * BLOCK].isnan().all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_own_codec_makes_a_block_with_an_infinity_nan(target: Target, page: ModuleType, bad: float) -> None:
    x = vector(2 * BLOCK, 2)
    x[5] = bad
    payload = from_spec(f"root_int4:block={BLOCK}").encode(torch.from_numpy(x).to(target.device))
    assert np.array_equal(payload.cpu().numpy(), encoded(x))


def test_own_codec_stays_within_its_bound(target: Target, page: ModuleType) -> None:
    own = from_spec(f"root_int4:block={BLOCK}")
    inputs = {
        "heavy": vector(N, 3),
        "one": np.eye(1, N, 7, dtype=np.float32)[0],
        "tiny": vector(N, 4) * np.float32(1e-36),
    }
    for q in range(1, 8):
        # All but the greatest just beyond half-way between two roots.
        inputs[f"worst_{q}"] = np.full(BLOCK, (q - 0.4999) ** 2 / 49, dtype=np.float32)
        inputs[f"worst_{q}"][9] = -1
    ratios = {}
    for name, x in inputs.items():
        payload = own.encode(torch.from_numpy(x).to(target.device))
        error = own.decode(payload, torch.empty(x.size, device=target.device)).cpu().double().numpy() - x
        ratios[name] = float((error**2).sum() / (x.astype(np.float64) ** 2).sum())
    bound = 1 - own.bias.delta
    assert max(ratios.values()) <= bound * 1.001
    # It is no looser than it has to be.
    assert max(ratios.values()) >= bound * 0.99


def test_own_codec_reduces(target: Target, page: ModuleType) -> None:
    own = from_spec(f"root_int4:block={BLOCK}")
    ranks, scale = 3, np.float32(1 / 3)
    plain = [encoded(vector(N, rank)) for rank in range(ranks)]
    total = np.zeros(N, dtype=np.float32)
    for payload in plain:
        total += decoded(payload, N)
    payloads = torch.from_numpy(np.stack(plain)).to(target.device)
    assert same(own.decode_sum(payloads, torch.empty(N, device=target.device), float(scale)), total * scale)
    reduced = own.reduce(payloads, N, scale=float(scale))
    assert np.array_equal(reduced.cpu().numpy(), encoded(total * scale))


def test_own_codec_feeds_its_error_back(target: Target, page: ModuleType) -> None:
    own = from_spec(f"root_int4:block={BLOCK}")
    x, before = vector(N, 5), vector(N, 6)
    residual = torch.from_numpy(before.copy()).to(target.device)
    payload = own.encode_feedback(torch.from_numpy(x).to(target.device), residual)
    assert np.array_equal(payload.cpu().numpy(), encoded(x + before))
    assert same(residual, x + before - decoded(encoded(x + before), N))


def test_code_of_the_section_on_using_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(USING, "docs/codecs.md", "exec"), names)
    used = from_spec("qsgd:bits=4,block=128")
    assert names["codec"] == used
    total = sum(used.decode(payload, torch.empty(1000)) for payload in names["payloads"])
    assert torch.equal(names["mean"], total * 0.5)
    # The momentum buffer was 0, and is the gradient after one step.
    assert torch.equal(names["m"], names["mean"])
    sent = used.decode(names["payload"], torch.empty(1000))
    assert torch.equal(names["residual"], names["gradients"][0] - sent)
    assert torch.equal(names["own"], used.decode(names["message"], torch.empty(1000)))
    for replica, payload in zip(names["replicas"], names["payloads"], strict=True):
        assert torch.equal(replica, used.decode(payload, torch.empty(1000)))
    first, second = names["replicas"]
    assert torch.equal(names["total"], first * 0.75 + second * 0.25)


def test_table_has_every_codec_and_no_other() -> None:
    registered = {name for name, make in codec._codecs.items() if make.__module__.startswith("bagua_kernels.")}
    assert {row[1].partition(":")[0] for row in ROWS} == registered


@folded(row={row[1]: row for row in ROWS})
def test_table_says_what_the_codec_says(row: list[str]) -> None:
    name, spec, bits, size, bias, error, linear, when = row
    found = from_spec(spec)
    assert type(found).__name__ == name
    assert size == f"{found.payload_size(10**6) / 10**6:.3f}"
    kept = found.bias
    assert bias == type(kept).__name__.lower()
    assert error == f"{1 - kept.delta if isinstance(kept, Contractive) else kept.omega:.3g}"
    assert linear == ("yes" if found.linear else "no")
    rule = getattr(found, "rule", None)
    if rule is not None:
        assert bits == str(rule.bits)
    else:
        assert float(bits) == pytest.approx(8 * found.payload_size(10**6) / 10**6, abs=0.01)
    assert when


def test_specs_in_the_text_are_known() -> None:
    for spec in re.findall(r"`((?:topk|qsgd|minmax_uint\d|absmax_int\d):[^`]*)`", PAGE):
        assert isinstance(from_spec(spec), Codec)
