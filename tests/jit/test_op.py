"""The choice of a backend, and what is said when there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.errors import BackendUnavailableError
from bagua_kernels.jit import log, op
from bagua_kernels.launchers import blockwise, elementwise

CPU = torch.device("cpu")


@pytest.fixture
def choices() -> Iterator[None]:
    """Backends are chosen anew within a test, and again after it."""

    def forget() -> None:
        op._backend_module.cache_clear()
        op._found.cache_clear()
        log.forget()

    forget()
    yield
    forget()


def backend_of_minmax() -> str:
    return blockwise.OP.backend(CPU).__name__.rpartition(".")[2]


def test_the_cpu_has_numba_and_numpy() -> None:
    assert op.available(CPU)[0] == "numba_cpu"
    assert op.available(CPU)[-1] == "numpy"
    assert "numpy" not in op.available(torch.device("cuda"))
    with knobs.override(knobs.BACKEND, "auto"):
        assert op.compiles_for_cpu()


def test_numpy_serves_where_numba_is_missing(
    choices: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    with caplog.at_level(logging.WARNING), knobs.override(knobs.BACKEND, "auto"):
        assert backend_of_minmax() == elementwise.OP.backend(CPU).__name__.rpartition(".")[2] == "_numpy"
        assert not op.compiles_for_cpu()
    (slow,) = caplog.messages
    assert "many times as slow" in slow
    assert slow.endswith("because numba_cpu needs the package 'numba': pip install numba")
    with knobs.override(knobs.BACKEND, "numba_cpu"), pytest.raises(BackendUnavailableError, match="pip install numba"):
        backend_of_minmax()


def test_numpy_serves_where_numba_is_told_to_compile_nothing(
    choices: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), knobs.override(knobs.BACKEND, "auto"):
        assert backend_of_minmax() == "_numba_cpu"
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
        assert backend_of_minmax() == "_numpy"
        assert not op.compiles_for_cpu()
    assert [
        line.endswith("because numba_cpu compiles nothing where NUMBA_DISABLE_JIT=1") for line in caplog.messages
    ] == [True]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("", 1), ("1", 0)])
def test_one_rank_logs_once_that_numpy_is_slow(
    choices: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING), knobs.override(knobs.BACKEND, "numpy"):
        for launcher in (blockwise, elementwise):
            assert launcher.OP.backend(CPU).__name__ == f"{launcher.__name__}._numpy"
        assert not op.compiles_for_cpu()
    assert len(caplog.messages) == lines
    assert all(line.endswith("because BAGUA_KERNELS_BACKEND=numpy") for line in caplog.messages)


def test_ranks_that_are_threads_log_one_line(choices: None, caplog: pytest.LogCaptureFixture) -> None:
    start = threading.Barrier(8)

    def choose() -> None:
        start.wait()
        backend_of_minmax()

    with caplog.at_level(logging.WARNING), knobs.override(knobs.BACKEND, "numpy"):
        threads = [threading.Thread(target=choose) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caplog.messages) == 1


def test_an_installed_compiler_is_chosen_before_numpy(choices: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), knobs.override(knobs.BACKEND, "auto"):
        assert backend_of_minmax() == "_numba_cpu"
    assert not caplog.messages


def test_numpy_serves_no_gpu() -> None:
    refusal = op.BACKENDS[-1].refusal(torch.device("cuda"))
    assert refusal == "numpy serves cpu tensors, got one on cuda"


@pytest.mark.parametrize("backend", ["triton", "numba_cuda"])
def test_a_forced_backend_that_cannot_run_says_why(backend: str) -> None:
    with (
        knobs.override(knobs.BACKEND, backend),
        pytest.raises(BackendUnavailableError, match=rf"BAGUA_KERNELS_BACKEND={backend} asks: {backend} serves cuda"),
    ):
        MinMaxUInt8().encode(torch.zeros(4))


def test_an_unknown_device_is_named() -> None:
    unknown = pytest.raises(BackendUnavailableError, match="backends for cpu and cuda only, got meta")
    with knobs.override(knobs.BACKEND, "auto"), unknown:
        MinMaxUInt8().encode(torch.zeros(4, device="meta"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_found", lambda name: False)
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
            ("BAGUA_KERNELS_BACKEND", "cuda", "expected one of auto, triton, numba_cuda, numba_cpu, numpy"),
            ("BAGUA_KERNELS_TIMEOUT", "0", "from 0.001 to"),
            ("BAGUA_KERNELS_TIMEOUT", "soon", "expected a number of seconds"),
            ("BAGUA_KERNELS_TIMEOUT", "1e10", "to 1000000"),
            ("BAGUA_KERNELS_HEARTBEAT", "1e-9", "from 0.01 to 600"),
            ("BAGUA_KERNELS_SOCKETS", "1000000", "at most 64"),
            ("BAGUA_KERNELS_LAUNCHER", "pbs", "expected one of auto"),
            ("TRITON_INTERPRET", "maybe", "expected 1 or 0"),
        ],
    )
    def test_nonsense_is_refused(self, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
        knob = next(k for k in knobs.ALL if k.variable == variable)
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=rf"{variable}='{text}' cannot be used: .*{message}"):
            knob.get()
