"""`BAGUA_KERNELS_WATCH`: steps have the same results whether PyTorch's objects are read in memory or PyTorch is asked."""

from __future__ import annotations

import sys
import sysconfig

import pytest
import torch
from torch import nn

from bagua_kernels import knobs, optim
from bagua_kernels.optim.watch import sweep, watch
from bagua_kernels.optim.watch.sweep import FEWEST, fields

# Before the fixture of this folder makes it lower.
ON_CPU = sweep.FEWEST_ON_CPU


def trained(watched: bool) -> list[torch.Tensor]:
    """Parameters after steps between which gradients come and go, and memory is replaced."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 3, generator=generator)) for _ in range(FEWEST + 6)]
    optimizer = optim.AdamW(params, lr=0.1)
    with knobs.override(knobs.WATCH, watched):
        for step in range(6):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator)
                if step and (i + step) % 5 == 0:
                    p.grad = None
            if step == 3:
                params[7].data = params[7].data.clone()
                optimizer.state[params[8]]["exp_avg"] = optimizer.state[params[8]]["exp_avg"].clone()
            optimizer.step()
    return [p.detach() for p in params]


def test_results_do_not_depend_on_the_watch() -> None:
    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.skipif(fields() is None, reason="this Python or PyTorch has other objects, so that nothing is watched")
def test_the_knob_switches_the_watch_off() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(FEWEST)]
    for p in params:
        p.grad = torch.ones(2)
    assert watch(params, []) is not None
    with knobs.override(knobs.WATCH, False):
        assert watch(params, []) is None


@pytest.mark.skipif(fields() is None, reason="this Python or PyTorch has other objects, so that nothing is watched")
def test_few_tensors_on_a_cpu_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reading in memory gains little."""
    monkeypatch.setattr(sweep, "FEWEST_ON_CPU", ON_CPU)
    params = [nn.Parameter(torch.ones(1)) for _ in range(ON_CPU)]
    for p in params:
        p.grad = torch.ones(1)
    assert watch(params[1:], []) is None
    assert watch(params, []) is not None


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="the sweep holds CPython's lock of the interpreter",
)
def test_fields_are_found_in_this_pytorch() -> None:
    # Where they are not, a step over 2,000 tensors takes five times the processor time, and nothing else tells so.
    assert fields() is not None
