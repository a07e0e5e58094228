"""Options that are no sensible numbers are refused in one sentence, wherever they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels import algorithms, compression, optim
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.policy.guard import Guard
from bagua_kernels.algorithms.policy.schedule import schedule
from bagua_kernels.algorithms.wrapping.recorded import synonyms_of
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import codec as codecs
from bagua_kernels.options import FloatOrInf, checked, hints_of

NAN, INF = float("nan"), float("inf")
# Of which infinity is a value: no limit, or never.
UNLIMITED = {"limit", "t0", "bound", "threshold", "max_cost"}


def numeric(init: Any) -> dict[str, str]:
    """The numeric arguments of a constructor: "int" or "float" by name."""
    found = {}
    for name in inspect.signature(init).parameters:
        text = str(hints_of(init).get(name)).removeprefix("<class '").removesuffix("'>")
        plain = {
            part.strip() for part in text.replace("typing.Annotated[float, 'may be infinite']", "float").split("|")
        }
        if plain <= {"int", "float", "None", "torch.Tensor"} and plain & {"int", "float"}:
            found[name] = "float" if "float" in plain else "int"
    return found


def refused(call: Callable[[], object], name: str) -> bool:
    try:
        call()
    except (ValueError, TypeError) as error:
        return "\n" not in str(error)
    return False


def makers() -> Iterator[tuple[str, Callable[..., object], dict[str, str]]]:
    for name in codecs.names():
        make = codecs._codecs[name]
        if inspect.isclass(make):
            yield name, make, numeric(make.__init__)
    for kind in (compression.PowerSGD, Guard, Penalty, optim.Extras):
        yield kind.__name__, kind, numeric(kind.__init__)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Muon",
                 "Lion", "LAMB", "LARS"):  # fmt: skip
        kind = getattr(optim, name)

        def make(kind: Any = kind, **options: Any) -> object:
            return kind([torch.nn.Parameter(torch.zeros(2, 2))], **options)

        yield name, make, numeric(inspect.unwrap(kind.__init__))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [NAN, INF, -INF, True, "x", 2.5j], ids=repr)
def test_codecs_and_optimizers(value: Any) -> None:
    accepted = [
        f"{owner}({name}={value!r})"
        for owner, make, options in makers()
        for name in options
        if not (value == INF and name in UNLIMITED)
        if not refused(lambda make=make, name=name: make(**{name: value}), name)  # type: ignore[misc]
    ]
    assert not accepted


@pytest.mark.filterwarnings("ignore")
def test_whole_numbers_of_codecs() -> None:
    for owner, make, options in makers():
        for name in (name for name, kind in options.items() if kind == "int"):
            assert refused(lambda make=make, name=name: make(**{name: 2.5}), name), (owner, name)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [NAN, INF, -INF, 2.5, True, "x"], ids=repr)
def test_algorithms(value: Any) -> None:
    """All ranks get the same sentence, before any message."""

    def rank(communicator: Communicator) -> list[str]:
        accepted = []
        for kind in Algorithm.registered.values():
            options: dict[str, str] = {}
            for each in kind.__mro__:
                if "__init__" in vars(each) and issubclass(each, Algorithm):
                    options = {**numeric(inspect.unwrap(each.__init__)), **options}
            for name, expected in options.items():
                if name in synonyms_of(kind):
                    continue  # the error has the own name
                if (value == 2.5 and expected == "float") or (value == INF and name in UNLIMITED):
                    continue
                net = torch.nn.Linear(4, 4)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                with pytest.raises((ValueError, TypeError)) as told:
                    kind(net, optimizer, communicator=communicator, **{name: value}).close()
                if name not in str(told.value):
                    accepted.append(f"{kind.__name__}({name}={value!r}): {told.value}")
        return accepted

    assert run_ranks(2, rank) == [[], []]


def test_numbers_of_others_are_numbers() -> None:
    def rank(communicator: Communicator) -> None:
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = algorithms.DiLoCo(
            net,
            optimizer,
            interval=np.int64(4),
            outer_lr=np.float32(0.5),
            outer_momentum=torch.tensor(0.5),
            communicator=communicator,
        )
        model.close()

    run_ranks(1, rank)
    optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1), betas=(np.float64(0.5), 0.9), eps=0)


def test_annotations_decide() -> None:
    @checked
    def call(
        a: int = 1, b: float | None = None, c: FloatOrInf = 1.0, d: tuple[int, int] = (1, 1), e: int | str = 1
    ) -> None:
        del a, b, c, d, e

    call(a=np.int32(3), b=None, c=INF, d=(2, 3), e="auto")
    call(a=torch.tensor(3), b=torch.tensor(2))
    for options in (
        {"a": 1.0},
        {"a": torch.tensor(1.5)},
        {"b": NAN},
        {"c": -INF},
        {"c": NAN},
        {"d": (1, 2.5)},
        {"e": False},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(options))} of .* must be"):
            call(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a of .* must be a whole number, got a='3'"):
        call(a="3")  # type: ignore[arg-type]


def test_constructors_outside_of_the_package_decide_themselves() -> None:
    class Mine(algorithms.LocalSGD):
        def __init__(self, module: Any, optimizer: Any, *, interval: Any, scale: float, **options: Any) -> None:
            super().__init__(module, optimizer, interval=2 if interval is None else interval, **options)
            self.scale = scale

    def rank(communicator: Communicator) -> None:
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        Mine(net, optimizer, interval=None, scale=INF, communicator=communicator).close()
        with pytest.raises(ValueError, match="delay of Mine must be a whole number"):
            Mine(net, optimizer, interval=None, scale=INF, delay=0.5, communicator=communicator)

    run_ranks(1, rank)


def test_steps_of_schedules() -> None:
    for steps in (2.5, True, NAN, -1):
        with pytest.raises(ValueError, match="warmup_steps"):
            schedule("sign", steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step from which"):
        schedule({True: "sign"})
