"""Kernels that run themselves on several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch

from bagua_kernels.jit import _numba_cpu, _numba_cpu_threads
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run, threads_for
from tests import limits
from tests.grids import grid


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def add_range(counts, pair, factor, some, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    for i in range(begin, end):
        counts[i] += pair[0] * factor + pair[1] + some


def fail_late(counts, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    for i in range(begin, end):
        counts[i] = 1
    if end == counts.size:
        raise ValueError("the last part")


def note_parts(starts, ends, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    starts[begin], ends[begin] = begin + 1, end


def takes_others(counts, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    counts[:] = 0


def compiled(template: Any) -> Any:
    return _numba_cpu.compile_template(template, {})


@grid(cover=1, pieces=[0, 1, 3, 4, 5, 1000], threads=[1, 2, 4, 9])
def test_every_piece_is_taken_once(pieces: int, threads: int) -> None:
    """With arguments of all kinds: a strided array, a tuple, a float and a truth value."""
    counts = np.zeros(2 * pieces, np.float32)[::2]
    run(compiled(add_range), (counts, (1, 2), np.float32(0.5), True), pieces, threads)
    assert (counts == 3.5).all()


@pytest.mark.parametrize(("pieces", "threads"), [(7, 3), (12, 4), (5, 5)])
def test_parts_follow_one_another_and_are_alike(pieces: int, threads: int) -> None:
    starts, ends = np.zeros(pieces, np.int64), np.zeros(pieces, np.int64)
    run(compiled(note_parts), (starts, ends), pieces, threads)
    begins, beyond = starts[starts > 0] - 1, ends[starts > 0]
    assert begins[0] == 0
    assert beyond[-1] == pieces
    assert (begins[1:] == beyond[:-1]).all()
    assert len(begins) == threads
    assert np.ptp(beyond - begins) <= 1


def test_an_error_on_another_thread_is_raised() -> None:
    counts = np.zeros(1000, np.int64)
    with pytest.raises(RuntimeError, match="failed on one of several threads"):
        run(compiled(fail_late), (counts,), 1000, 4)
    assert counts.all()
    with pytest.raises(ValueError, match="the last part"):
        run(compiled(fail_late), (counts,), 1000, 1)


def test_other_last_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="the last four parameters of a kernel must be int64"):
        compiled(takes_others)(np.zeros(3), np.float32(0), 3, 2, 0)


def test_kernels_run_from_several_threads_at_once() -> None:
    kernel, wrong = compiled(add_range), []

    def launch() -> None:
        for _ in range(50):
            counts = np.zeros(4096)
            run(kernel, (counts, (1, 2), np.float32(1), False), 4096, 4)
            wrong.append(not (counts == 3).all())

    launching = [threading.Thread(target=launch) for _ in range(4)]
    for thread in launching:
        thread.start()
    for thread in launching:
        thread.join(limits.seconds(60))
    assert len(wrong) == 200
    assert not any(wrong)


def test_launches_take_turns_where_numba_cannot_have_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "threading_layer", lambda: "workqueue")
    _numba_cpu_threads._launcher.cache_clear()
    try:
        assert _numba_cpu_threads._launcher().turn is _numba_cpu_threads._one_at_a_time
    finally:
        _numba_cpu_threads._launcher.cache_clear()


def test_one_thread_does_where_numba_has_no_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llvmlite.binding.address_of_symbol", lambda name: None)
    _numba_cpu_threads._launcher.cache_clear()
    try:
        counts = np.zeros(10)
        run(compiled(add_range), (counts, (1, 2), np.float32(1), False), 10, 4)
        assert (counts == 3).all()
        assert "run on one thread" in caplog.text
    finally:
        _numba_cpu_threads._launcher.cache_clear()


def test_number_of_threads() -> None:
    most = min(4, numba.config.NUMBA_NUM_THREADS)
    assert threads_for(10**6, 10**6) == most
    assert threads_for(10**6, 1) == 1
    assert threads_for(10**6, 0) == 1
    assert threads_for(1000, 1000) == 1
    torch.set_num_threads(1)
    assert threads_for(10**6, 10**6) == 1


def test_torch_keeps_its_threads() -> None:
    torch.set_num_threads(1)
    # Numba's threads are started once.
    _numba_cpu_threads._launcher.cache_clear()
    run(compiled(add_range), (np.zeros(4), (1, 2), np.float32(1), False), 4, 2)
    assert torch.get_num_threads() == 1
