"""What a fused step does beside the update: its checkpoints and its signatures."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from bagua_kernels import optim
from bagua_kernels.optim import AdamW, Extras
from tests.grids import grid, only
from tests.optim.step.training import DIGIT, KINDS, copied, make, parameters, params_of, through_a_file, train

IN_TORCH = [
    name for name in sorted(optim.__all__) if hasattr(torch.optim, name) and issubclass(getattr(optim, name), Optimizer)
]

OTHERS = ["Lion", "LAMB", "LARS"]


class TestCheckpoints:
    CASES: tuple[tuple[str, Extras], ...] = (
        ("adamw", Extras(precision="master", average=0.9)),
        ("sgd", Extras(precision="master")),
        ("sgd", Extras(precision="kahan", average=0.5)),
        ("adamw", Extras(precision="stochastic", average=0.5, seed=5)),
    )
    every_case = grid(cover=1, kind__extras=only(CASES, *CASES[:3]))

    @staticmethod
    def same(one: Optimizer, other: Optimizer) -> bool:
        return all(
            torch.equal(p, q)
            and set(one.state[p]) == set(other.state[q])
            and all(
                torch.equal(value, other.state[q][name]) and value.dtype == other.state[q][name].dtype
                for name, value in one.state[p].items()
            )
            for p, q in zip(params_of(one), params_of(other), strict=True)
        )

    @every_case
    def test_through_a_file(self, kind: str, extras: Extras) -> None:
        optimizer = make(kind, parameters(), extras)
        train(optimizer, range(1, 5))
        restored = make(kind, copied(params_of(optimizer)), extras, lr=1.0)
        saved = through_a_file(optimizer.state_dict())
        restored.load_state_dict(saved)
        for p, kept in zip(params_of(restored), saved["state"].values(), strict=True):
            for name in {"master", "average"} & set(kept):
                assert restored.state[p][name].dtype == torch.float32
                assert torch.equal(restored.state[p][name], kept[name])
                # What was loaded is not written to.
                assert restored.state[p][name].data_ptr() != kept[name].data_ptr()
        assert self.same(optimizer, restored)
        for each in (optimizer, restored):
            train(each, range(5, 9))
        assert self.same(optimizer, restored)

    @every_case
    @grid(cover=1, duplicate={"copy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))})
    def test_copies(self, kind: str, extras: Extras, duplicate: Any) -> None:
        optimizer = make(kind, parameters(), extras)
        train(optimizer, range(1, 5))
        other = duplicate(optimizer)
        assert self.same(optimizer, other)
        train(optimizer, range(5, 9))
        assert not self.same(optimizer, other)
        train(other, range(5, 9))
        assert self.same(optimizer, other)

    def test_double_means_stay_double(self) -> None:
        optimizer = make("sgd", parameters(torch.float64), Extras(average=0.9))
        train(optimizer, range(1, 3))
        restored = make("sgd", copied(params_of(optimizer)), Extras(average=0.9))
        restored.load_state_dict(through_a_file(optimizer.state_dict()))
        assert all(restored.state[p]["average"].dtype == torch.float64 for p in params_of(restored))
        assert self.same(optimizer, restored)

    @pytest.mark.parametrize("stepped", [False, True])
    @pytest.mark.parametrize("kind", only(["adamw", "sgd_momentum"], "adamw"))
    def test_without_extras_they_start_from_the_parameters(self, kind: str, stepped: bool) -> None:
        found, options = KINDS[kind]
        theirs = getattr(torch.optim, found.__name__)(parameters(), **options)
        train(theirs, range(1, 5))
        ours = make(kind, copied(params_of(theirs)), Extras(precision="master", average=0.5))
        if stepped:
            # Extras of a history that the checkpoint replaces.
            train(ours, range(20, 24))
            with torch.no_grad():
                for p, q in zip(params_of(ours), params_of(theirs), strict=True):
                    p.copy_(q)
        ours.load_state_dict(through_a_file(theirs.state_dict()))
        starts = [p.detach().float() for p in params_of(ours)]
        train(ours, range(5, 6))
        for p, start in zip(params_of(ours), starts, strict=True):
            state = ours.state[p]
            assert state["master"].dtype == state["average"].dtype == torch.float32
            assert 0 < (start - state["master"]).abs().max() <= DIGIT
            torch.testing.assert_close(state["average"], (start + state["master"]) / 2, rtol=0, atol=1e-6)
        if kind == "adamw":
            assert all(ours.state[p]["step"] == 5 for p in params_of(ours))

    def test_torch_loads_a_checkpoint_with_extras(self) -> None:
        ours = make("adamw", parameters(), Extras(precision="master", average=0.5))
        train(ours, range(1, 4))
        theirs = torch.optim.AdamW(copied(params_of(ours)), lr=1e-3)
        theirs.load_state_dict(through_a_file(ours.state_dict()))
        train(theirs, range(4, 6))
        assert all(theirs.state[p]["step"] == 5 for p in params_of(theirs))

    def test_a_checkpoint_from_before_the_first_step(self) -> None:
        optimizer = make("adamw", parameters(), Extras(precision="master"))
        optimizer.load_state_dict(through_a_file(make("adamw", parameters()).state_dict()))
        train(optimizer, range(1, 2))
        assert all("master" in optimizer.state[p] for p in params_of(optimizer))


class TestSignatures:
    @grid(cover=1, name=OTHERS)
    def test_own_optimizers_have_it_too(self, name: str) -> None:
        assert inspect.signature(getattr(optim, name)).parameters["extras"].kind is inspect.Parameter.KEYWORD_ONLY

    def test_a_subclass_has_that_of_its_own_constructor(self) -> None:
        class Halved(AdamW):
            def __init__(self, params: Any, rate: float) -> None:
                super().__init__(params, lr=rate / 2)

        assert list(inspect.signature(Halved).parameters) == ["params", "rate"]

    @pytest.mark.parametrize("name", only([*OTHERS, *(["Muon"] if "Muon" in IN_TORCH else [])], "LAMB"))
    def test_optimizers_of_several_passes_keep_digits_and_a_mean(self, name: str) -> None:
        p = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
        optimizer = getattr(optim, name)([p], lr=1e-3, extras=Extras(precision="master", average=0.5))
        for _ in range(2):
            p.grad = torch.arange(1.0, 25).reshape(4, 6).bfloat16()
            optimizer.step()
        state = optimizer.state[p]
        assert (state["master"] != 1).any()
        assert torch.equal(p.detach(), state["master"].bfloat16())
        # Between where it began and where it is.
        assert ((state["average"] - 1).abs() <= (state["master"] - 1).abs().max() + 1e-6).all()
