"""Ranks that do not belong together, or of which one refuses what it was given: all of them learn of it at once."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import bagua_kernels
from bagua_kernels import comm
from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.incarnation import REFUSED, agree
from bagua_kernels.comm.joining.installed import Installed, check_installed
from bagua_kernels.comm.joining.launch import Refusal
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError, MismatchError
from tests import limits

LIMIT = limits.seconds(60)


def starts(environments: Mapping[str, Mapping[str, str]], made_by_torch: bool) -> None:
    """One rank, with an environment of its own."""
    own = dict(environments.get(os.environ["RANK"], {}))
    bagua_kernels.__version__ = own.pop("version", bagua_kernels.__version__)
    os.environ.update(own)
    if made_by_torch:
        dist.init_process_group("gloo")
    try:
        comm.init(timeout=LIMIT)
    except (CommunicationError, ValueError) as error:
        told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
        print("RAISED", json.dumps(told), flush=True)
    else:
        comm.shutdown()


def raised(environments: Mapping[str, Mapping[str, str]], made_by_torch: bool = False, size: int = 2) -> list[Any]:
    """Returns what each rank has raised."""
    with Processes(starts, size, args=[environments, made_by_torch]) as processes:
        results = processes.wait(LIMIT)
    return [json.loads(one.stdout.split("RAISED ", 1)[1].splitlines()[0]) for one in results]


@pytest.mark.processes
@pytest.mark.parametrize("made_by_torch", [False, True])
def test_two_versions_do_not_train_together(made_by_torch: bool) -> None:
    """Each rank names what the others have."""
    for told in raised({"1": {"version": "9.9"}}, made_by_torch):
        assert told["kind"] == "MismatchError", told
        assert f"rank 0 has bagua_kernels {bagua_kernels.__version__}" in told["text"], told
        assert "rank 1 has bagua_kernels 9.9" in told["text"], told


@pytest.mark.processes
@pytest.mark.parametrize("size", ["1", "3"])
def test_a_rank_with_another_world_size_is_named(size: str) -> None:
    """A smaller one, in which there is no such rank, or a larger one."""
    first, second = raised({"1": {"WORLD_SIZE": size}})
    if size == "3":
        assert "rank 0 has WORLD_SIZE=2; rank 1 has WORLD_SIZE=3" in first["text"] == second["text"]
    else:
        assert first["ranks"] == [1]
        assert "rank 1 cannot start" in first["text"]
        assert second["kind"] == "ValueError"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank", "wrong"),
    [
        ("1", {"LOCAL_RANK": "-1"}),
        pytest.param("0", {"LOCAL_RANK": "-1"}, marks=pytest.mark.slow),
        pytest.param("1", {"BAGUA_KERNELS_HEARTBEAT": "x"}, marks=pytest.mark.slow),
    ],
)
def test_others_learn_that_a_rank_refuses_its_environment(rank: str, wrong: dict[str, str]) -> None:
    """Also where that rank would have held the store."""
    told = raised({rank: wrong})
    own, other = told[int(rank)], told[1 - int(rank)]
    assert own["kind"] == "ValueError"
    assert other["ranks"] == [int(rank)]
    assert own["text"] in other["text"]


def together(call: Callable[[int], None], ranks: int) -> None:
    """Calls a function on several threads."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            call(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not errors, errors


def test_a_refusal_of_an_earlier_start_is_forgotten() -> None:
    """By the rank itself, when it comes again over a store that a launcher has kept."""
    store = HashStore()
    store.set(REFUSED, json.dumps(["number", "1", "no such thing"]))

    def rank(number: int) -> None:
        with BoundedStore(store, time.monotonic() + LIMIT) as bounded:
            agree(bounded, number, 2, LIMIT)

    together(rank, 2)


def test_versions_are_named_by_those_that_differ() -> None:
    """From most, or all if there is no majority."""
    this, other = Installed("1", 1), Installed("1", 2)
    check_installed({0: this, 1: this})
    for found, expected in (({0: other, 1: this, 2: this}, (0,)), ({0: other, 1: this}, (0, 1))):
        with pytest.raises(MismatchError, match="wire format 2") as caught:
            check_installed(found)
        assert caught.value.ranks == expected
    assert Installed.parse(this.told()) == this
    for told in (None, [], {"version": 3, "wire_format": 1}):
        assert Installed.parse(told) not in (this, other)


def test_where_a_refusal_is_told() -> None:
    """Only where the environment leads to a store that others use."""
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert Refusal.read(whole) == Refusal("1", 1, "localhost", 29500, False)
    assert Refusal.read({**whole, "WORLD_SIZE": "x"}) is not None
    assert Refusal.read({**whole, "WORLD_SIZE": "1"}) is not None
    assert Refusal.read({**whole, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for name, value in (("MASTER_PORT", "70000"), ("MASTER_ADDR", "a:b"), ("RANK", "")):
        assert Refusal.read({**whole, name: value}) is None
