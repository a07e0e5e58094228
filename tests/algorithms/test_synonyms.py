"""Names of other libraries for options: each has the effect of the own name, and the own name alone is recorded."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    ModelAlgorithm,
    MuLoCo,
    PostLocalSGD,
    PowerSGD,
    QAdam,
    ddp,
    from_spec,
)
from bagua_kernels.algorithms.wrapping.recorded import Recorded, arguments_of, synonyms_of
from bagua_kernels.comm import Communicator, LocalCommunicator, run_ranks
from tests.algorithms.ranks import train
from tests.grids import folded

# By the class and the other name: the own name and a value that is no default.
CASES: dict[tuple[type[Algorithm], str], tuple[str, Any]] = {
    (LocalSGD, "local_sgd_steps"): ("interval", 3),
    (LocalSGD, "sync_every"): ("interval", 3),
    (PostLocalSGD, "period"): ("interval", 3),
    (PostLocalSGD, "warmup_steps"): ("first_phase", 5),
    (PostLocalSGD, "start_localSGD_iter"): ("first_phase", 5),
    (DiLoCo, "sync_every"): ("interval", 3),
    (DiLoCo, "fragment_sync_delay"): ("delay", 2),
    (DiLoCo, "fragment_update_alpha"): ("blend", 0.5),
    (QAdam, "warmup_steps"): ("freeze_step", 7),
    (Decentralized, "peer_selection_mode"): ("peers", "shift_one"),
    (Decentralized, "communication_interval"): ("interval", 3),
    (LowPrecisionDecentralized, "communication_interval"): ("interval", 3),
    (AsyncModelAverage, "sync_interval_ms"): ("interval_ms", 20.0),
    (PowerSGD, "matrix_approximation_rank"): ("rank", 2),
    (PowerSGD, "start_powerSGD_iter"): ("start_step", 4),
    (PowerSGD, "min_compression_rate"): ("min_compression", 3.0),
    (PowerSGD, "random_seed"): ("seed", 9),
}
NAMES = {f"{kind.name}-{other}": (kind, other) for kind, other in CASES}
every = folded(case=list(NAMES))


def net() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def optimizer_for(kind: type[Algorithm], module: torch.nn.Module) -> torch.optim.Optimizer | None:
    return torch.optim.SGD(module.parameters(), lr=0.1) if issubclass(kind, ModelAlgorithm) else None


def recorded_options(monkeypatch: pytest.MonkeyPatch, kind: type[Algorithm], **arguments: Any) -> list[list[Any]]:
    """What the constructors of one algorithm compare between ranks."""
    made: list[Recorded] = []

    class Kept(Recorded):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with monkeypatch.context() as patched:
        patched.setattr("bagua_kernels.algorithms.wrapping.recorded.Recorded", Kept)
        module = net()
        kind(module, optimizer_for(kind, module), communicator=LocalCommunicator.alone(), **arguments).close()
    return made[0].described(frozenset({"module", "optimizer", "communicator"}))


def options_of_spec(spec: str, **arguments: Any) -> dict[str, Any]:
    """The values that the attributes of an algorithm have, as far as options can be seen there."""
    kind, _ = Algorithm.named(spec)
    module = net()
    algorithm = from_spec(
        spec, module, optimizer_for(kind, module), communicator=LocalCommunicator.alone(), **arguments
    )
    algorithm.close()
    kinds = (int, float, str, type(None))
    return {name: value for name, value in vars(algorithm).items() if isinstance(value, kinds)}


def test_every_synonym_has_a_case() -> None:
    kinds = [kind for kind in Algorithm.registered.values() if kind.__module__.startswith("bagua_kernels.")]
    declared = {(kind, other): own for kind in kinds for other, own in vars(kind).get("synonyms", {}).items()}
    assert declared == {case: own for case, (own, _) in CASES.items()}


def test_synonyms_stand_for_arguments_of_the_class() -> None:
    for (kind, other), (own, _) in CASES.items():
        assert own in arguments_of(kind)
        # An argument of this name exists where a base has it, which is refused otherwise.
        assert other not in arguments_of(kind) or kind is QAdam


@every
def test_same_object_as_by_the_own_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, other = NAMES[case]
    own, value = CASES[kind, other]
    by_own = recorded_options(monkeypatch, kind, **{own: value})
    assert recorded_options(monkeypatch, kind, **{other: value}) == by_own
    assert any(name == own and given == value for _, name, given in by_own)
    assert recorded_options(monkeypatch, kind) != by_own


@every
def test_specs_accept_synonyms(case: str) -> None:
    kind, other = NAMES[case]
    own, value = CASES[kind, other]
    assert Algorithm.named(f"{kind.name}:{other}={value}") == (kind, {own: value})
    by_own = options_of_spec(f"{kind.name}:{own}={value}")
    assert options_of_spec(f"{kind.name}:{other}={value}") == by_own
    assert options_of_spec(kind.name, **{other: value}) == by_own


@every
def test_both_names_are_refused(case: str) -> None:
    kind, other = NAMES[case]
    own, value = CASES[kind, other]
    module = net()
    optimizer = optimizer_for(kind, module)
    message = rf"{kind.__name__} got both {own} and {other}, two names of one argument"
    with pytest.raises(TypeError, match=message):
        kind(module, optimizer, **{own: value, other: value})
    with pytest.raises(ValueError, match=message):
        from_spec(f"{kind.name}:{own}={value},{other}={value}", module, optimizer)
    with pytest.raises(ValueError, match=message):
        from_spec(kind.name, module, optimizer, **{own: value, other: value})


def test_two_synonyms_of_one_name_are_refused() -> None:
    module = net()
    with pytest.raises(TypeError, match="both warmup_steps and start_localSGD_iter"):
        PostLocalSGD(module, torch.optim.SGD(module.parameters()), **{"warmup_steps": 2, "start_localSGD_iter": 2})


@pytest.mark.parametrize(("first", "second"), [("interval", "sync_every"), ("sync_every", "interval")])
def test_arguments_come_before_options_of_the_spec(first: str, second: str) -> None:
    assert options_of_spec(f"diloco:{first}=4", **{second: 6})["interval"] == 6


def test_hooks_accept_synonyms() -> None:
    made = ddp.hook("powersgd:rank=2,min_compression_rate=3", matrix_approximation_rank=1, start_powerSGD_iter=4)
    assert made._arguments == {"rank": 1, "min_compression": 3, "start_step": 4}
    with pytest.raises(ValueError, match="both rank and matrix_approximation_rank"):
        ddp.hook("powersgd", rank=1, matrix_approximation_rank=1)
    with pytest.raises(ValueError, match="both rank and matrix_approximation_rank"):
        ddp.hook("powersgd:rank=1,matrix_approximation_rank=1")


def test_values_are_checked_under_the_own_name() -> None:
    module = net()
    with pytest.raises(ValueError, match=r"interval of LocalSGD must be a whole number, got interval=2\.5"):
        LocalSGD(module, torch.optim.SGD(module.parameters()), **{"local_sgd_steps": 2.5})
    with pytest.raises(ValueError, match="interval of DiLoCo must be a whole number, got interval='many'"):
        Algorithm.named("diloco:sync_every=many")


def test_a_subclass_accepts_the_names_of_its_bases() -> None:
    assert synonyms_of(MuLoCo)["sync_every"] == "interval"
    assert synonyms_of(PostLocalSGD)["local_sgd_steps"] == "interval"


class Own(LocalSGD):
    """Has an argument by a name that its base accepts for another one, and passes the other name on."""

    synonyms = MappingProxyType({"every": "sync_every"})

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sync_every: str, **options: Any
    ) -> None:
        self.own = sync_every
        super().__init__(module, optimizer, **{"local_sgd_steps": 5, **options})


def test_an_argument_of_a_subclass_is_no_synonym() -> None:
    module = net()
    made = Own(module, torch.optim.SGD(module.parameters()), communicator=LocalCommunicator.alone(), **{"every": "day"})
    assert (made.own, made.interval) == ("day", 5)
    made.close()


def test_ranks_agree_that_use_either_name() -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        def wrap(module: torch.nn.Module, **arguments: Any) -> Algorithm:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            name = ("interval", "local_sgd_steps")[communicator.rank]
            return LocalSGD(module, optimizer, **{name: 2}, **arguments)

        _, model = train(communicator, wrap, steps=2)
        model.synchronize()
        found = [p.detach().clone() for p in model.parameters()]
        model.close()
        return found

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_difference_is_reported_under_the_own_name() -> None:
    def rank(communicator: Communicator) -> None:
        module = net()
        optimizer = torch.optim.SGD(module.parameters())
        name = ("interval", "local_sgd_steps")[communicator.rank]
        with pytest.raises(ValueError, match="interval differs between ranks: 2 on rank 0, 3 on rank 1"):
            LocalSGD(module, optimizer, communicator=communicator, **{name: 2 + communicator.rank})

    run_ranks(2, rank)
