"""Ranks that are compared once in some steps: who differs, and in what; and that nobody is accused in vain."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, from_spec
from bagua_kernels.algorithms.gossip.choco import PublicRound
from bagua_kernels.algorithms.gossip.lowprec import ReplicaRound
from bagua_kernels.algorithms.wrapping.verification import difference, state_hash
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import CommunicationError, ReplicaError
from tests.algorithms import parts
from tests.grids import grid

EVERY, STEPS, BAD = 2, 9, 1
GRADIENTS = ["allreduce", "bytegrad", "qsgd:bits=4", "topk:exact=", "powersgd", "auto", "compressed:codec=absmax_int4"]
LOCAL = [
    "local_sgd:interval=2",
    "post_local_sgd:first_phase=2,interval=2",
    "slow_mo:interval=2",
    "diloco:interval=2,codec=absmax_int4",
    "diloco:interval=4,fragments=2,delay=1",
    "sparse_loco:interval=2",
    "diloco:interval=2,by_speed=true",
]
COPIES = ["lowprec", "choco:eta=0.4", "choco:codec=sign,eta=0.1"]


def trained(
    communicator: Communicator,
    spec: str,
    spoil: Callable[[Algorithm], None] | None = None,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> str:
    """Trains, and spoils something on one rank after four steps; returns the error, or nothing."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)).to(dtype)
    optimizer = optim.SGD(net.parameters(), lr=0.05)
    model = from_spec(spec, net, optimizer, communicator=communicator, verify_every=EVERY, **options)
    generator = torch.Generator().manual_seed(communicator.rank)
    with model:
        for step in range(steps):
            if step == 4 and spoil is not None and communicator.rank == BAD:
                spoil(model)
            optimizer.zero_grad()
            try:
                model(torch.randn(5, 9, generator=generator).to(dtype)).square().mean().backward()
                optimizer.step()
            except ReplicaError as error:
                return f"{error} {error.ranks}"
    return ""


def write(model: Algorithm) -> None:
    """A parameter gets another value, which nobody notices by itself."""
    with torch.no_grad():
        model.get_parameter("module.2.weight").data[1, 2] += 1e-4


@grid(spec=[*GRADIENTS, *LOCAL, *COPIES], dtype=[torch.float32, torch.bfloat16])
def test_ranks_that_agree_are_left_alone(spec: str, dtype: torch.dtype) -> None:
    assert run_ranks(3, trained, spec, None, STEPS, dtype) == [""] * 3


@pytest.mark.parametrize("spec", GRADIENTS)
def test_a_parameter_that_differs_is_named_on_all_ranks(spec: str) -> None:
    found = run_ranks(3, trained, spec, write)
    assert len({*found}) == 1
    assert "after step 4" in found[0]
    assert "'2.weight' differs on ranks [1]" in found[0]
    assert found[0].endswith(f"({BAD},)")


@pytest.mark.parametrize("spec", LOCAL[2:5])
def test_outer_parameters_that_differ_are_named_on_all_ranks(spec: str) -> None:
    def spoil(model: Algorithm) -> None:
        model.wait()  # type: ignore[operator]
        for each in parts.outer_rounds(model).outer:
            for name, span in zip(each.bucket.names, each.bucket.own, strict=True):
                each.start[span] += 1e-4 * (name == "2.weight")

    found = run_ranks(3, trained, spec, spoil, 16)
    assert len({*found}) == 1
    assert "outer parameters" in found[0]
    assert "'2.weight' differs on ranks [1]" in found[0]
    assert found[0].endswith(f"({BAD},)")


@pytest.mark.parametrize("spec", COPIES)
def test_a_copy_that_differs_from_its_original_is_named_on_all_ranks(spec: str) -> None:
    def spoil(model: Algorithm) -> None:
        model.wait()  # type: ignore[operator]
        for each in parts.loop(model).all:  # type: ignore[attr-defined]
            spans = dict(zip(each.bucket.names, each.bucket.own, strict=True))
            if "0.weight" in spans and isinstance(each, ReplicaRound):
                each.rows[0, spans["0.weight"]] *= 1.001
            elif "0.weight" in spans:
                assert isinstance(each, PublicRound)
                each.gap[spans["0.weight"]] += 0.01

    found = run_ranks(3, trained, spec, spoil)
    assert len({*found}) == 1
    assert "on rank 1 '0.weight'" in found[0]


@pytest.mark.parametrize(
    "spec",
    [
        "decentralized",
        "d2:peers=chain",
        "sgp",
        "async_model_average",
        "async_decentralized",
        "wagma",
        "diloco:quorum=1",
    ],
)
def test_ranks_with_nothing_in_common_are_refused(spec: str) -> None:
    def refused(communicator: Communicator) -> str:
        with pytest.raises(ValueError, match=r"leave out verify_every=2, and see consensus\(\)") as caught:
            trained(communicator, spec)
        return str(caught.value)

    run_ranks(2, refused)


def test_a_number_below_one_is_refused() -> None:
    def refused(communicator: Communicator) -> None:
        net = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="verify_every must be at least 1 step, or None, got 0"):
            from_spec("allreduce", net, communicator=communicator, verify_every=0)

    run_ranks(1, refused)


def test_micro_batches_count_once() -> None:
    def accumulated(communicator: Communicator) -> None:
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with from_spec("bytegrad:verify_every=1", net, optimizer, communicator=communicator) as model:
            for _ in range(3):
                optimizer.zero_grad()
                with model.no_sync():
                    model(torch.randn(3, 4)).sum().backward()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()

    run_ranks(2, accumulated)


def test_ranks_with_fewer_batches_are_not_waited_for() -> None:
    def joined(communicator: Communicator) -> None:
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with from_spec("allreduce:verify_every=1", net, optimizer, communicator=communicator) as model, model.join():
            for _ in range(2 + 3 * communicator.rank):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()

    run_ranks(3, joined)


@grid(dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8], size=[0, 1, 2, 3, 5, 8, 1001])
def test_hash_sees_each_bit_and_no_place(dtype: torch.dtype, size: int) -> None:
    whole = torch.randn(size + 3, generator=torch.Generator().manual_seed(size)).mul(50).to(dtype)
    # The start of memory is aligned, and other places are not.
    found = {state_hash([whole[first : first + size].clone()]) for first in [0]}
    other = whole.clone()
    shifted = torch.cat([other[:1], other[:size]])[1:]
    assert found == {state_hash([shifted])}
    for place in range(0, size, 97):
        flipped = whole[:size].clone()
        flipped.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert state_hash([flipped]) not in found


def test_hash_tells_tensors_apart() -> None:
    # Of one sign: a sum cannot see all signs change where half of them are negative.
    one, two = torch.linspace(1, 2, 40), torch.linspace(3, 5, 40)
    assert state_hash([one, two]) != state_hash([two, one])
    assert state_hash([-one]) != state_hash([one])
    assert state_hash([one.view(8, 5)]) == state_hash([one])
    assert state_hash([one.view(8, 5).T]) == state_hash([one.view(8, 5).T.contiguous()])


def test_error_names_both_sides_where_none_has_most() -> None:
    error = difference(["a", "b"], [{0: 1, 1: 1}, {0: 1, 1: 2}], "parameters", 7)
    assert "'b' differs between ranks [1] and the others" in str(error)
    assert error.ranks == (1,)
    assert not isinstance(error, CommunicationError)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.ranks) == (str(error), error.ranks)
