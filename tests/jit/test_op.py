"""The choice of a backend, and what is said when there is none."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.errors import BackendUnavailableError
from bagua_kernels.jit import op

CPU = torch.device("cpu")


def test_the_cpu_has_numba() -> None:
    assert "numba_cpu" in op.available(CPU)


@pytest.mark.parametrize("backend", ["triton", "numba_cuda"])
def test_a_forced_backend_that_cannot_run_says_why(backend: str) -> None:
    with (
        knobs.override(knobs.BACKEND, backend),
        pytest.raises(BackendUnavailableError, match=rf"BAGUA_KERNELS_BACKEND={backend} asks: {backend} serves cuda"),
    ):
        MinMaxUInt8().encode(torch.zeros(4))


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(BackendUnavailableError, match="backends for cpu and cuda only, got meta"):
        MinMaxUInt8().encode(torch.zeros(4, device="meta"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "find_spec", lambda name: None)
    refusal = op.BACKENDS[1].refusal(torch.device("cuda"))
    assert refusal is not None
    assert "needs the package 'triton': pip install 'bagua-kernels[cuda13]'" in refusal


class TestKnobs:
    def test_environment_and_override(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BAGUA_KERNELS_TIMEOUT", "7.5")
        assert knobs.TIMEOUT.get() == 7.5
        with knobs.override(knobs.TIMEOUT, 2.0):
            assert knobs.TIMEOUT.get() == 2.0
        assert knobs.TIMEOUT.get() == 7.5
        monkeypatch.setenv("BAGUA_KERNELS_TIMEOUT", "")
        assert knobs.TIMEOUT.get() == knobs.TIMEOUT.default

    @pytest.mark.parametrize(
        ("variable", "text", "message"),
        [
            ("BAGUA_KERNELS_BACKEND", "cuda", "expected one of auto, triton, numba_cuda, numba_cpu"),
            ("BAGUA_KERNELS_TIMEOUT", "0", "above zero"),
            ("BAGUA_KERNELS_TIMEOUT", "soon", "could not convert"),
            ("TRITON_INTERPRET", "maybe", "expected 1 or 0"),
        ],
    )
    def test_nonsense_is_refused(self, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
        knob = next(k for k in knobs.ALL if k.variable == variable)
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=rf"{variable}='{text}' cannot be used: .*{message}"):
            knob.get()
