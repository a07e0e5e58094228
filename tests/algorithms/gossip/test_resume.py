"""A run that is saved, and goes on in a new wrapper, has the same bits as one that was not."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import OnePeerExponential
from tests.algorithms import parts
from tests.algorithms.gossip.common import ALL, CASES, Case, Task, flat
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
RESUMED = {**ALL, "push_unequal": CASES["push_unequal"]}


def on(communicator: Communicator, model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    """Takes some steps; returns the parameters after each."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        model(batch(communicator.rank, step)).square().mean().backward()
        optimizer.step()
        model.wait()
        seen.append(flat(model.module))
    return seen


def made(case: Case, kind: str, communicator: Communicator, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    module = Odd(seed)
    optimizer = OPTIMIZERS[kind](module.parameters())
    return case.make(module, optimizer, communicator, **options), optimizer


def stored(*states: Any) -> Any:
    """What a file makes of states: only tensors and what torch loads without pickled code."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(model: Any, optimizer: Any) -> Any:
    """What a rank stores: its algorithm's state first, which brings results that are under way into the module."""
    algorithm = model.algorithm_state_dict()
    return stored(algorithm, model.module.state_dict(), optimizer.state_dict())


def restore(state: Any, model: Any, optimizer: Any) -> None:
    algorithm, module, own = state
    model.module.load_state_dict(module)
    optimizer.load_state_dict(own)
    model.load_algorithm_state_dict(algorithm)


@grid(case=RESUMED, kind=list(OPTIMIZERS), size=[2, 3, 4], cover=1)
def test_fourteen_steps_in_two_parts(case: Case, kind: str, size: int) -> None:
    def rank(communicator: Communicator) -> None:
        whole, optimizer = made(case, kind, communicator)
        expected = on(communicator, whole, optimizer, range(14))
        whole.close()
        first, optimizer = made(case, kind, communicator)
        assert all(map(torch.equal, on(communicator, first, optimizer, range(7)), expected))
        state = saved(first, optimizer)
        first.close()
        second, optimizer = made(case, kind, communicator, seed=communicator.rank + 5)
        restore(state, second, optimizer)
        assert second.stats().steps == 7
        for step, x in enumerate(on(communicator, second, optimizer, range(7, 14)), 7):
            assert torch.equal(x, expected[step]), f"step {step} after resuming differs"
        second.close()

    run_ranks(size, rank)


@grid(case=RESUMED, cover=1)
def test_saving_disturbs_nothing(case: Case) -> None:
    """A run that is saved in the middle, and goes on itself, has the same bits."""

    def rank(communicator: Communicator) -> None:
        plain, optimizer = made(case, "sgd", communicator)
        expected = on(communicator, plain, optimizer, range(6))
        plain.close()
        model, optimizer = made(case, "sgd", communicator)
        on(communicator, model, optimizer, range(3))
        before = copy.deepcopy(saved(model, optimizer))
        after = saved(model, optimizer)
        for key, value in before[1].items():
            assert torch.equal(value, after[1][key])
        assert all(map(torch.equal, on(communicator, model, optimizer, range(3, 6)), expected[3:]))
        model.close()

    run_ranks(3, rank)


@grid(case=RESUMED, interval=[1, 3], cover=1)
def test_rounds_of_topologies_that_change_go_on(case: Case, interval: int) -> None:
    """The round in a period, and the steps since the last round, are part of the state."""
    changes = case in (ALL["decentralized"], ALL["push"])

    def rank(communicator: Communicator) -> None:
        options = {"interval": interval, **({"peers": OnePeerExponential(5)} if changes else {})}
        whole, optimizer = made(case, "sgd", communicator, **options)
        expected = on(communicator, whole, optimizer, range(8))
        whole.close()
        first, optimizer = made(case, "sgd", communicator, **options)
        on(communicator, first, optimizer, range(4))
        state = saved(first, optimizer)
        first.close()
        second, optimizer = made(case, "sgd", communicator, **options)
        restore(state, second, optimizer)
        assert all(map(torch.equal, on(communicator, second, optimizer, range(4, 8)), expected[4:]))
        second.close()

    run_ranks(5, rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALL))
def test_buckets_may_have_another_size(name: str) -> None:
    """Vectors are saved by the names of parameters, not by buckets."""
    case = RESUMED[name]
    exact = {"codec": "identity"} if "codec" in case.options or name == "low_precision" else {}

    def rank(communicator: Communicator) -> None:
        whole, optimizer = made(case, "sgd", communicator, **exact)
        expected = on(communicator, whole, optimizer, range(6))
        whole.close()
        first, optimizer = made(case, "sgd", communicator, **exact)
        on(communicator, first, optimizer, range(3))
        state = saved(first, optimizer)
        first.close()
        second, optimizer = made(case, "sgd", communicator, bucket_bytes=10 << 20, **exact)
        restore(state, second, optimizer)
        assert all(map(torch.equal, on(communicator, second, optimizer, range(3, 6)), expected[3:]))
        second.close()

    run_ranks(3, rank)


@grid(case=ALL, before=[3, 4], after=[2, 3], where=lambda before, after, **_: before != after, cover=1)
def test_another_number_of_ranks(case: Case, before: int, after: int) -> None:
    """Each rank is given the states of all earlier ones, and goes on; all begin alike, and train."""

    def first(communicator: Communicator) -> Any:
        model, optimizer = made(case, "sgd", communicator)
        on(communicator, model, optimizer, range(4))
        model.synchronize()
        state = saved(model, optimizer)
        model.close()
        return state

    def second(communicator: Communicator) -> tuple[torch.Tensor, float]:
        model, optimizer = made(case, "sgd", communicator)
        model.module.load_state_dict(states[0][1])
        optimizer.load_state_dict(states[0][2])
        model.load_algorithm_state_dict([state[0] for state in states])
        model.wait()
        start, apart = flat(model.module), model.consensus()
        seen = on(communicator, model, optimizer, range(4, 8))
        assert all(bool(x.isfinite().all()) for x in seen)
        assert model.stats().steps == 8
        model.close()
        return start, apart

    states = run_ranks(before, first)
    for start, apart in run_ranks(after, second):
        assert apart <= 1e-6
        assert torch.allclose(start, flat_of(states[0][1]), atol=1e-6)


def flat_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
    module = Odd()
    module.load_state_dict(state)
    return flat(module)


@grid(cover=1, case=RESUMED)
def test_states_of_other_algorithms_are_refused(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        model, _ = made(case, "sgd", communicator)
        with pytest.raises(ValueError, match=r"steps|keys|expected"):
            model.load_algorithm_state_dict({"unknown": 1})
        model.close()

    run_ranks(2, rank)


def test_tasks_repeat() -> None:
    """What tests compare with depends on nothing but rank and step."""
    assert (Task(5).b(1, 2) == Task(5).b(1, 2)).all()
    assert (Task(5).b(1, 2) != Task(5).b(2, 1)).any()


@pytest.mark.parametrize("spec", ["choco:eta=0.5", "lowprec", "d2", "diloco"])
def test_a_state_of_one_rank_alone_begins_anew_on_several(spec: str) -> None:
    """It has no vectors beside the parameters, of which zeros would be the differences to nothing."""

    def alone(communicator: Communicator) -> dict[str, Any]:
        module = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options = {"outer_lr": 1.0, "outer_momentum": 0.0} if spec == "diloco" else {}
        with from_spec(spec, module, optimizer, communicator=communicator, **options) as model:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            return model.algorithm_state_dict()

    (state,) = run_ranks(1, alone)

    def rank(communicator: Communicator) -> None:
        module = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with from_spec(spec, module, optimizer, communicator=communicator) as model:
            model.load_algorithm_state_dict(copy.deepcopy(state))
            assert torch.equal(module.weight, state["parameters"]["weight"])
            found = copy.deepcopy(parts.vectors(model))
            parts.loop(model).restart()
            expected = parts.vectors(model)
            assert found.keys() == expected.keys()
            for key, named in expected.items():
                assert all(torch.equal(found[key][name], value) for name, value in named.items()), key

    run_ranks(2, rank)
