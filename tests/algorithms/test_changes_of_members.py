"""Members that change twice, within a call, or when a job has one rank: nothing counts twice, and all make the same calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bagua_kernels import checkpoint
from bagua_kernels.algorithms import from_spec
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.comm import Communicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError, MembershipError, RankLostError
from tests import limits
from tests.algorithms.test_healing import Net, batch, parts_of, step_of, vector, wrapped
from tests.comm.membership.over_sockets import ends, with_joiner

SECRET = Secret.from_text("known to the ranks of this test alone")
TIMEOUT = 8.0


def owners_norm(algorithm: Algorithm) -> float:
    named = algorithm.algorithm_state_dict()["vectors"]["owner"]
    return float(torch.cat([each.reshape(-1) for each in named.values()]).double().norm())


@pytest.mark.parametrize("spec", ["double_squeeze:min_numel=0", "onebit:min_numel=0,exact=none,warmup_steps=0"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_owners_residuals_count_once_when_members_change_twice(spec: str, is_loaded: bool, tmp_path: Path) -> None:
    """No exchange comes between two changes, nor between a load and a change."""

    def program(communicator: Communicator, saves: bool) -> list[float]:
        members = Membership(communicator)
        net, optimizer = parts_of(spec)
        algorithm = wrapped(spec, members, net, optimizer)
        if is_loaded and not saves:
            checkpoint.load(tmp_path, algorithm, optimizer)
        else:
            for step in range(4):
                step_of(algorithm, optimizer, communicator.rank, step)
        found = [owners_norm(algorithm)]
        if saves:
            checkpoint.save(tmp_path, algorithm, optimizer)
        for _ in range(2):
            members.change(RankLostError("its connection broke", [0]))
            found.append(owners_norm(algorithm))
        algorithm.close()
        members.prepare_close()
        members.close()
        return found

    if is_loaded:
        run_ranks(3, program, True, timeout=TIMEOUT)
    for first, *others in run_ranks(3, program, False, timeout=TIMEOUT):
        assert first > 0
        assert others == pytest.approx([first] * 2, rel=1e-6)


@pytest.mark.parametrize("spec", ["bytegrad", "onebit:min_numel=0,exact=none,warmup_steps=0"])
def test_a_checkpoint_that_loses_a_rank_while_another_one_asks(spec: str, tmp_path: Path) -> None:
    """The others repeat the call among themselves, and let it in at the next step."""
    found: dict[int, Any] = {}
    steps, at = 10, 4

    def trains(members: Membership, joiner: threading.Thread) -> None:
        net, optimizer = parts_of(spec)
        algorithm = wrapped(spec, members, net, optimizer)
        for step in range(algorithm.stats().steps, steps):
            step_of(algorithm, optimizer, members.name, step)
            if (step + 1) % at:
                continue
            if step + 1 == at and not members.has_joined:
                if members.name == 2:
                    joiner.start()
                limits.until(lambda: members.is_wanted, "a process asks")
            if step + 1 == at and members.name == 2:
                members._end("its process has ended")
                algorithm.__exit__(CommunicationError, CommunicationError(), None)
                return
            checkpoint.save(tmp_path, algorithm, optimizer)
        found[members.name] = members.ranks, vector(net)
        algorithm.close()
        ends(members)

    with_joiner(3, SECRET, trains, 30.0)
    assert {name: ranks for name, (ranks, _) in found.items()} == dict.fromkeys((0, 1, 3), (0, 1, 3))
    assert all(torch.equal(own, found[0][1]) for _, own in found.values())


class Counting(Net):
    """Has a buffer, so that forward passes synchronize it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_joins_between_two_forward_passes_of_one_backward_pass(ranks: int) -> None:
    found: dict[int, Any] = {}

    def trains(members: Membership, joiner: threading.Thread) -> None:
        net = Counting()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        algorithm = from_spec("allreduce", net, optimizer, communicator=members.communicator, on_failure="heal")
        for step in range(algorithm.stats().steps, 8):
            x, y = batch(members.name, step)
            optimizer.zero_grad()
            first = F.cross_entropy(algorithm(x), y)
            if members.name == 0 and step == 3:
                joiner.start()
                limits.until(lambda: members.is_wanted, "a process asks")
            (first + F.cross_entropy(algorithm(-x), y)).backward()
            optimizer.step()
        found[members.name] = members.ranks, vector(net)
        algorithm.close()
        ends(members)

    with_joiner(ranks, SECRET, trains, 30.0)
    assert len(found) == ranks + 1
    assert all(torch.equal(own, found[0][1]) for _, own in found.values())


def alone(program: Callable[[Membership], Any]) -> Any:
    """Runs a program as the only rank of an elastic job."""

    def member(communicator: Communicator) -> Any:
        members = Membership(communicator)
        try:
            return program(members)
        finally:
            members.prepare_close()
            members.close()

    return run_ranks(1, member, timeout=TIMEOUT)[0]


def test_one_rank_is_refused_what_could_not_go_on_with_others() -> None:
    def program(members: Membership) -> None:
        net, optimizer = parts_of("allreduce")
        with pytest.raises(TypeError, match="pass an optimizer of bagua_kernels"):
            from_spec(
                "allreduce:apply_in_backward=True", net, optimizer, communicator=members.communicator, on_failure="heal"
            )

    alone(program)


def test_one_rank_does_not_freeze() -> None:
    """Nothing would bound its updates then, where the second moment is 0."""

    def program(members: Membership) -> bool:
        net, optimizer = parts_of("qadam")
        algorithm = wrapped("qadam:freeze_step=2", members, net, optimizer)
        assert algorithm.optimizer is not None
        for step in range(5):
            step_of(algorithm, algorithm.optimizer, 0, step)
        frozen = algorithm.optimizer.param_groups[0]["frozen"]
        algorithm.close()
        return bool(frozen)

    assert alone(program) is False


def test_parameters_stay_the_ranks_own_if_this_rank_is_left_out() -> None:
    """A last checkpoint would have the mean otherwise."""

    def program(communicator: Communicator) -> bool:
        members = Membership(communicator)
        net, optimizer = parts_of("decentralized")
        algorithm = wrapped("decentralized", members, net, optimizer)
        for step in range(3):
            step_of(algorithm, optimizer, communicator.rank, step)
        algorithm.wait()
        own = vector(net)

        def lost() -> None:
            raise RankLostError("its connection broke", [0])

        def left_out(_: BaseException) -> None:
            raise MembershipError("the others have left this rank out")

        change, members.change = members.change, left_out  # type: ignore[method-assign]
        algorithm.communicator.barrier_on_host = lost  # type: ignore[method-assign]
        with pytest.raises(MembershipError), algorithm.averaged():
            pytest.fail("the block has no means")
        is_own = torch.equal(vector(net), own)
        members.change = change  # type: ignore[method-assign]
        algorithm.__exit__(EOFError, EOFError(), None)
        members.prepare_close()
        members.close()
        return is_own

    assert run_ranks(2, program, timeout=TIMEOUT) == [True, True]
