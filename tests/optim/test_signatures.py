"""What editors and type checkers see of the constructors."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from bagua_kernels import optim
from bagua_kernels.optim.step.fused import Fused
from tests.grids import grid

ALL = {n: k for n in optim.__all__ if isinstance(k := getattr(optim, n), type) and issubclass(k, torch.optim.Optimizer)}
# No optimizer of its own: it takes optimizers.
del ALL["ChainedOptimizer"]
OWN = {"LAMB", "LARS", "Lion"}
# Not in every version of PyTorch that is supported.
RECENT = {"decoupled_weight_decay"}


def arguments(kind: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(kind.__init__).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@grid(cover=1, name=sorted(ALL.keys() - OWN))
def test_arguments_are_those_of_torch(name: str) -> None:
    ours, theirs = arguments(ALL[name]), arguments(getattr(torch.optim, name))
    known = {argument for argument, _, _ in theirs}
    assert ours[-1] == ("extras", inspect.Parameter.KEYWORD_ONLY, None)
    assert [a for a in ours[:-1] if a[0] in known] == theirs
    assert {a[0] for a in ours[:-1]} - known <= RECENT


@grid(cover=1, name=sorted(ALL))
def test_every_argument_has_a_type(name: str) -> None:
    found = inspect.signature(ALL[name].__init__).parameters
    hints = get_type_hints(ALL[name].__init__)
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found.values())
    assert hints.keys() - {"return"} == found.keys() - {"self"}
    assert Any not in hints.values()
    assert inspect.signature(ALL[name]).parameters.keys() == found.keys() - {"self"}


@grid(cover=1, name=sorted(ALL.keys() - OWN))
def test_arguments_reach_torch(name: str) -> None:
    """Each that has another value than its default."""
    kind, theirs = ALL[name], getattr(torch.optim, name)
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for argument, _, default in arguments(kind)[1:-1]:
        value = {"lr": 0.25, "fused": False, "foreach": False, "nesterov": not default}.get(argument)
        if value is None:
            value = not default if isinstance(default, bool) else default
            if isinstance(default, float):
                value = default / 2
        given: dict[str, Any] = {argument: value, **({"momentum": 0.5} if argument == "nesterov" else {})}
        ours, expected = (k(params, **given).param_groups[0] for k in (kind, theirs))
        assert {n: ours[n] for n in ours if n != "params"} == {n: expected[n] for n in expected if n != "params"}


def test_arguments_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their defaults are not passed on; other values are refused by PyTorch."""

    class Older(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)

    class Newer(Fused, Older):
        def __init__(self, params: Any, flag: bool = False) -> None:
            super().__init__(params, lr=0.2, flag=flag)

    params = [torch.nn.Parameter(torch.ones(2))]
    assert Newer(params).param_groups[0]["lr"] == 0.2
    with pytest.raises(TypeError, match="flag"):
        Newer(params, flag=True)


@pytest.mark.slow
def test_mypy_sees_the_arguments(tmp_path: Path) -> None:
    lines = ["from bagua_kernels import optim"]
    lines += [f"reveal_type(optim.{name})" for name in sorted(ALL)]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    run = subprocess.run([sys.executable, "-m", "mypy", str(script)], capture_output=True, text=True, check=False)
    revealed = [line for line in run.stdout.splitlines() if "Revealed type" in line]
    assert len(revealed) == len(ALL), run.stdout
    assert all("lr:" in line and "*Any" not in line and "**" not in line for line in revealed), run.stdout
