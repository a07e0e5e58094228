"""Rebuilding of functions, and the names of cached kernels."""

from __future__ import annotations

import concurrent.futures
import logging
import types
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.compression import BlockCodec, Codec, ErrorFeedback, MinMaxUInt8, RandomK, ThresholdTopK, TopK
from bagua_kernels.jit import _numba_cpu
from bagua_kernels.jit._numba_cpu_intrinsics import packing
from bagua_kernels.jit.rule import digest, rebuilt, with_literals
from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.calls import called_rules, global_names


def half(x):
    return x * 0.5


def other_half(x):
    return x * 0.25


def calls_half(x):
    return half(x) + 1.0


def bits(x):
    return tl.cast(x, tl.int32, bitcast=True)


def test_called_rules() -> None:
    assert called_rules(calls_half) == {"half": half}
    assert called_rules(bits) == {}


def test_digest_sees_what_a_rule_calls() -> None:
    changed = rebuilt(calls_half, {"half": other_half})
    assert digest(calls_half) == digest(rebuilt(calls_half, {}))
    assert digest(calls_half) != digest(changed)
    assert digest(half) != digest(other_half)
    assert digest(calls_half, ("BLOCK", 256)) != digest(calls_half, ("BLOCK", 128))


def applied(x):
    return rule(x)  # noqa: F821 - bound when the template is compiled


def test_float32_stays_float32() -> None:
    assert with_literals(half.__code__, np.float32).co_consts[-1].dtype == np.float32
    compiled = _numba_cpu.compile_template(applied, {"rule": calls_half})
    compiled(np.float32(3))
    assert compiled.nopython_signatures[0].return_type == numba.float32
    assert compiled(np.float32(3)) == 2.5


def test_rules_are_their_own_reference() -> None:
    x = np.array([1.0, -2.5], np.float32)
    assert calls_half(x).dtype == np.float32
    assert np.array_equal(bits(x), x.view(np.int32))


def test_without_a_writable_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(file))
    monkeypatch.setattr(_numba_cpu, "_templates", {})
    with knobs.override(knobs.XDG_CACHE_HOME, str(file)), caplog.at_level(logging.WARNING):
        kernel = _numba_cpu.compile_template(applied, {"rule": half})
        assert kernel(np.float32(4)) == 2
    assert "kernels are compiled anew in each process (set NUMBA_CACHE_DIR" in caplog.text
    assert str(file) in caplog.text


def test_one_kernel_for_bindings_that_a_template_does_not_read() -> None:
    first = _numba_cpu.compile_template(applied, {"rule": half, "SIZE": 1})
    assert _numba_cpu.compile_template(applied, {"rule": half, "SIZE": 2}) is first
    assert _numba_cpu.compile_template(applied, {"rule": half}, nogil=False) is not first
    other = _numba_cpu.compile_template(applied, {"rule": other_half, "SIZE": 1})
    assert (first(np.float32(4)), other(np.float32(4))) == (2, 1)


def packs(loose, packed):
    pack(loose, packed)  # noqa: F821 - bound when the template is compiled


def test_kernels_are_told_apart_by_what_a_function_of_theirs_has_captured() -> None:
    """Two of one name and one text, which other functions have returned."""
    kernels = [_numba_cpu.compile_template(packs, {"pack": packing(2, stride)[0]}) for stride in (2, 4, 2)]
    assert kernels[0] is kernels[2]
    loose = np.arange(8, dtype=np.uint8)
    for kernel, expected in zip(kernels[:2], ([32, 49, 0, 0], [64, 81, 98, 115]), strict=True):
        packed = np.zeros(4, np.uint8)
        kernel(loose, packed)
        assert packed.tolist() == expected


def test_a_text_among_bindings_counts_in_any_case() -> None:
    first, second = (_numba_cpu.compile_template(applied, {"rule": half, "MADE_OF": text}) for text in "ab")
    assert first is not second


def test_names_that_a_comprehension_reads_are_its_functions() -> None:
    def sums(values):
        return [half(value) for value in values] + [tl.cast(0, tl.int32)]

    assert set(global_names(sums)) == {"half", "tl"}


def difference_of_product(x, y, z):
    return x * y - z


def calls_a_rule(x, y, z):
    return rule(x, y, z)  # noqa: F821 - bound when the template is compiled


def test_a_rule_is_not_compiled_with_what_its_first_caller_may_do() -> None:
    """Contracted, the difference would be what rounding took from the product, instead of zero."""
    x = np.float32(1 + 2.0**-12)
    for fastmath in ({"contract"}, False):
        kernel = _numba_cpu.compile_template(calls_a_rule, {"rule": difference_of_product}, fastmath=fastmath)
        assert kernel(x, x, x * x) == 0


def test_kernels_run_from_several_threads_at_once() -> None:
    """The training and the communication thread both launch; Numba's own thread layer would end the process."""
    codec = MinMaxUInt8()
    x = torch.randn(400_000)
    expected = codec.encode(x)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for payload in pool.map(lambda _: codec.encode(x), range(40)):
            assert torch.equal(payload, expected)


def made(codec: Codec, x: torch.Tensor) -> list[torch.Tensor]:
    """What a codec makes of a vector, in all ways."""
    payloads = torch.stack([codec.encode(x, seed=1), codec.encode(x.flip(0), seed=2)])
    sums = [codec.decode_sum(payloads, torch.empty_like(x), 0.5), codec.reduce(payloads, x.numel(), scale=0.5, seed=3)]
    feedback = ErrorFeedback(codec)
    kept = [feedback.encode("x", x, seed=seed) for seed in (4, 5)]
    if isinstance(codec, BlockCodec):
        kept.append(codec.encode_pieces([x[:70_001], x[70_001:]], seed=6))
    return [payloads, codec.decode(payloads[0], torch.empty_like(x)), *sums, *kept]


@pytest.mark.parametrize("codec", [TopK(0.01), ThresholdTopK(0.01), RandomK(0.01), MinMaxUInt8()], ids=repr)
def test_number_of_threads_does_not_matter(codec: Codec) -> None:
    """One thread takes all chunks and blocks in turn, without a parallel launch."""
    x, before, found = torch.randn(150_001), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(made(codec, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def magnitude(x):
    return tl.abs(x)


def test_the_magnitude_of_a_zero_has_no_sign() -> None:
    compiled = _numba_cpu.compile_template(applied, {"rule": magnitude})
    for x in (np.float32(0.0), np.float32(-0.0), np.float32(-2.5), np.float32(3.0), np.float32(-np.inf)):
        assert compiled(x) == magnitude(x)
        assert not np.signbit(compiled(x))
        assert not np.signbit(magnitude(x))
    assert compiled(np.int32(-7)) == 7


LEVEL = 3


def reads_a_constant(x):
    return x * LEVEL


def test_digest_sees_default_arguments_and_no_paths_or_hashes() -> None:
    def with_default(x, factor=2.0):
        return x * factor

    other = rebuilt(with_default, {})
    other.__defaults__ = (3.0,)
    assert digest(with_default) != digest(other)
    moved = types.ModuleType("numpy")
    moved.__file__ = "elsewhere"
    assert digest(np) == digest(moved)
    # The order of a set depends on the hashes of a process; of equal sets it differs by how they were made.
    first, second = {0, 8}, {8, 0}
    assert list(first) != list(second)
    assert digest(first) == digest(second) != digest({0, 7})


def test_digest_sees_the_constants_of_a_template() -> None:
    assert digest(reads_a_constant) != digest(rebuilt(reads_a_constant, {"LEVEL": 4}))


def annotated(x: int, BLOCK: float) -> None: ...


def test_a_rebuilt_function_keeps_the_annotations_by_which_triton_finds_constants() -> None:
    assert rebuilt(annotated, {"tl": tl}).__annotations__ == annotated.__annotations__
