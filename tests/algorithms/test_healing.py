"""Training that goes on when ranks are lost: who is left, what replicas are like then, and what is not counted twice."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bagua_kernels.algorithms import QAdam, from_spec
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.comm import Communicator, Membership, Quota, run_ranks
from bagua_kernels.errors import CommunicationError, MembershipError, RankLostError
from bagua_kernels.optim import SGD, muon_with_adamw
from tests.grids import grid
from tests.limits import until

RANKS, STEPS, TIMEOUT = 4, 10, 5.0
ALIKE = (
    "allreduce",
    "bytegrad",
    "qsgd",
    "onebit:min_numel=0,exact=none,warmup_steps=0",
    "topk:ratio=0.1,min_numel=0",
    "dgc",
    "powersgd:rank=2",
    "sign",
    "terngrad",
    "double_squeeze",
    "randomk",
    "natural",
    "fp8",
    "allreduce:apply_in_backward=True,bucket_bytes=1",
    "bytegrad:apply_in_backward=True,bucket_bytes=1",
    "powersgd:rank=2,apply_in_backward=True,bucket_bytes=1",
    "onebit:min_numel=0,exact=none,warmup_steps=0,only_if_faster=True",
    "qadam:freeze_step=3",
    "onebit_adam:freeze_step=3,min_numel=0",
    "auto",
)
APART = (
    "decentralized:peers=ring",
    "decentralized",
    "lowprec:peers=ring",
    "choco:peers=ring,eta=0.4",
    "d2",
    "sgp",
    "local_sgd:interval=2",
    "post_local_sgd:interval=2,first_phase=3",
    "diloco:interval=3",
    "diloco:interval=4,delay=2,codec=minmax_uint8",
    "local_sgd:interval=3,by_speed=True",
    "diloco:interval=3,delay=1,by_speed=True",
    "diloco:interval=2,quorum=2",
    "sparse_loco:interval=3,quorum=1",
    "slow_mo:interval=2",
    "mu_loco:interval=3",
    "sparse_loco:interval=2",
    "async_model_average",
    "async_decentralized",
    "wagma",
)
# They make their optimizer themselves.
MAKERS = ("qadam", "onebit_adam")
REFUSED = {
    "auto:exactness=any": "another algorithm",
    "auto:apply_in_backward=True": "apply_in_backward",
}


class Net(torch.nn.Module):
    """Two layers, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.last = torch.nn.Linear(12, 24), torch.nn.Linear(24, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 12, generator=generator)
    return x, x[:, :3].argmax(1)


def parts_of(spec: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    if spec.startswith("mu_loco"):
        return net, muon_with_adamw(net, lr=0.02)
    if "apply_in_backward" in spec:
        return net, SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, torch.optim.SGD(net.parameters(), lr=0.2)


def wrapped(spec: str, members: Membership, net: Net, optimizer: torch.optim.Optimizer, **options: Any) -> Algorithm:
    """Wraps a model for healing; its `optimizer` is that which is given, or where the algorithm makes one, another.

    What ranks should have alike is compared in every other step, so that nothing else has to notice that it differs.
    """
    if not Algorithm.named(spec)[0].refuses_verification and "quorum" not in spec:
        options.setdefault("verify_every", 2)
    return from_spec(
        spec, net, *given(spec, optimizer), communicator=members.communicator, on_failure="heal", **options
    )


def given(spec: str, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return [] if spec.startswith(MAKERS) else [optimizer]


def step_of(algorithm: Algorithm, optimizer: torch.optim.Optimizer, name: int, step: int) -> float:
    x, y = batch(name, step)
    optimizer.zero_grad()
    loss = F.cross_entropy(algorithm(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def vector(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1).clone() for each in net.parameters()])


def trains(
    communicator: Communicator, spec: str, ends: dict[int, int], look: Callable[..., None] | None = None
) -> dict[str, Any] | None:
    """Trains; some ranks end before a step, without a word."""
    name = communicator.rank
    members = Membership(communicator)
    net, optimizer = parts_of(spec)
    algorithm = wrapped(spec, members, net, optimizer)
    losses = []
    for step in range(STEPS):
        if ends.get(name) == step:
            return None
        if look is not None:
            look(algorithm, name, step)
        losses.append(step_of(algorithm, algorithm.optimizer or optimizer, name, step))
    own = vector(net)
    algorithm.synchronize()
    found = {"own": own, "mean": vector(net), "ranks": members.ranks, "epoch": members.epoch, "losses": losses}
    algorithm.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def survivors(spec: str, ends: dict[int, int], **options: Any) -> list[dict[str, Any]]:
    found = run_ranks(RANKS, trains, spec, ends, *options.values(), timeout=TIMEOUT)
    return [each for each in found if each is not None]


@grid(spec=[*ALIKE, *APART], victim=[0, 2], cover=1)
def test_others_go_on(spec: str, victim: int) -> None:
    """They agree on who is left. Replicas that have the same gradients stay the same, bit for bit."""
    found = survivors(spec, {victim: 4})
    assert len(found) == RANKS - 1
    left = tuple(rank for rank in range(RANKS) if rank != victim)
    for each in found:
        assert (each["ranks"], each["epoch"]) == (left, 2)
        assert torch.equal(each["mean"], found[0]["mean"])
        assert each["mean"].isfinite().all()
        if spec in ALIKE:
            assert torch.equal(each["own"], found[0]["own"])
    if not spec.startswith(("terngrad", "randomk", *MAKERS)):
        begin, end = (sum(each["losses"][at] for each in found) for at in (0, -1))
        assert end < begin


@grid(
    spec=["bytegrad", "onebit:min_numel=0,exact=none,warmup_steps=0", "diloco:interval=3", "choco:peers=ring,eta=0.4"],
    ends=[{1: 3, 3: 3}, {0: 2, 1: 6}, {0: 3, 1: 3, 2: 5}],
)
def test_several_losses(spec: str, ends: dict[int, int]) -> None:
    """Two at once, one after the other, and all but one."""
    found = survivors(spec, ends)
    assert [each["ranks"] for each in found] == [tuple(r for r in range(RANKS) if r not in ends)] * len(found)
    assert all(torch.equal(each["mean"], found[0]["mean"]) for each in found)


def test_means_are_those_of_the_ranks_that_are_left() -> None:
    """Against plain arithmetic: the interrupted step counts once, with the gradients of those who are left."""
    victim, at = 1, 4
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(STEPS):
        ranks = [rank for rank in range(RANKS) if step < at or rank != victim]
        optimizer.zero_grad()
        for rank in ranks:
            x, y = batch(rank, step)
            (F.cross_entropy(net(x.double()), y) / len(ranks)).backward()
        optimizer.step()
    for each in survivors("allreduce", {victim: at}):
        torch.testing.assert_close(each["own"].double(), vector(net), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        "onebit:min_numel=0,exact=none,warmup_steps=0,owner_feedback=False",
        "topk:ratio=0.1,min_numel=0",
        "powersgd:rank=2",
        "onebit_adam:freeze_step=2,min_numel=0,owner_feedback=False",
    ],
)
def test_residuals_count_once(spec: str) -> None:
    """The same bits as ranks that begin where the interrupted step began, with what each remembered then."""
    at, victim = 4, 2
    states: dict[int, Any] = {}

    def begins(communicator: Communicator) -> None:
        net, optimizer = parts_of(spec)
        algorithm = from_spec(spec, net, *given(spec, optimizer), communicator=communicator)
        optimizer = algorithm.optimizer
        # As with healing, which never lays buckets out again.
        if algorithm._engine is not None:
            algorithm._engine.order_is_known = True
        for step in range(at):
            step_of(algorithm, optimizer, communicator.rank, step)
        found = net.state_dict(), optimizer.state_dict(), algorithm.algorithm_state_dict()
        states[communicator.rank] = copy.deepcopy(found)
        algorithm.close()

    def goes_on(communicator: Communicator) -> torch.Tensor:
        name = [rank for rank in range(RANKS) if rank != victim][communicator.rank]
        net, optimizer = parts_of(spec)
        net.load_state_dict(states[name][0])
        algorithm = from_spec(spec, net, *given(spec, optimizer), communicator=communicator)
        optimizer = algorithm.optimizer
        optimizer.load_state_dict(states[name][1])
        algorithm.load_algorithm_state_dict(states[name][2])
        assert algorithm._engine is not None
        algorithm._engine.order_is_known = True
        for step in range(at, STEPS):
            step_of(algorithm, optimizer, name, step)
        algorithm.close()
        return vector(net)

    run_ranks(RANKS, begins, timeout=TIMEOUT)
    expected = run_ranks(RANKS - 1, goes_on, timeout=TIMEOUT)
    found = survivors(spec, {victim: at})
    assert all(torch.equal(each["own"], other) for each, other in zip(found, expected, strict=True))


def test_ranks_that_are_left_freeze_after_the_same_step() -> None:
    """Rank 0, whose answer all take, ends when they ask it if the second moment is stable."""

    def program(communicator: Communicator) -> tuple[list[bool], torch.Tensor] | None:
        members = Membership(communicator)
        net = Net()
        algorithm = QAdam(
            net, freeze_step="auto", betas=(0.9, 0.5), communicator=members.communicator, on_failure="heal"
        )
        frozen = []
        if communicator.rank == 0:

            def ends(_: bool) -> bool:
                raise EOFError

            algorithm.optimizer.agree = ends
        for step in range(2 * STEPS):
            try:
                step_of(algorithm, algorithm.optimizer, communicator.rank, step)
            except EOFError:
                return None
            frozen.append(algorithm.optimizer.frozen)
        own = vector(net)
        algorithm.close()
        members.prepare_close()
        members.close()
        return frozen, own

    found = [each for each in run_ranks(RANKS, program, timeout=TIMEOUT) if each is not None]
    assert len(found) == RANKS - 1
    assert not found[0][0][0]
    assert found[0][0][-1]
    for frozen, own in found:
        assert frozen == found[0][0]
        assert torch.equal(own, found[0][1])


def lose_the_barrier(communicator: Any, after: Callable[[], object] = lambda: None) -> None:
    """Lets a rank not learn that all have come to barriers of a communicator."""
    barrier = communicator.barrier

    class Lost:
        def wait(self) -> None:
            barrier().wait()
            after()
            raise RankLostError("its connection broke", [0])

    communicator.barrier = Lost


def test_a_pass_that_others_have_ended_is_not_repeated() -> None:
    """One rank loses the barrier behind a pass, which all others came through: it goes on with the means that it has."""
    after = threading.Event()

    def look(algorithm: Algorithm, name: int, step: int) -> None:
        if (name, step) == (1, 3):
            lose_the_barrier(algorithm._engine.communicators[0], after.set)  # type: ignore[attr-defined]

    found = survivors("onebit:min_numel=0,exact=none,warmup_steps=0", {}, look=look)
    assert after.is_set()
    assert [each["ranks"] for each in found] == [tuple(range(RANKS))] * RANKS
    assert [each["epoch"] for each in found] == [2] * RANKS
    plain = survivors("onebit:min_numel=0,exact=none,warmup_steps=0", {})
    for each, other in zip(found, plain, strict=True):
        assert torch.equal(each["own"], found[0]["own"])
        # Owners' residuals have gone through the change of epochs, so that nothing is lost.
        assert torch.equal(each["own"], other["own"])


class Extra(Net):
    """Has a parameter that only rank 0 uses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.extra, self.is_used = torch.nn.Parameter(torch.zeros(3)), rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra if self.is_used else super().forward(x)


def lose_the_end(engine: Any) -> None:
    """Lets a rank not learn that all have come to the end of a pass."""
    wait = engine._wait

    def lost() -> None:
        wait()
        engine._wait = wait
        engine.communicators[0].barrier_on_host()
        raise RankLostError("its connection broke", [2])

    engine._wait = lost


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_gradient_of_one_rank_counts_after_most_are_lost(in_backward: bool) -> None:
    """Rank 1 does not learn that the others have come to the end of a pass, after which most of them end."""
    ranks, at = 8, 3

    def program(communicator: Communicator) -> torch.Tensor | None:
        members = Membership(communicator)
        net = Extra(communicator.rank)
        optimizer = SGD(net.parameters(), lr=0.2)
        options: dict[str, Any] = {"on_failure": "heal", "apply_in_backward": in_backward}
        algorithm = from_spec("allreduce", net, optimizer, communicator=members.communicator, **options)
        engine = algorithm._engine  # type: ignore[attr-defined]
        for step in range(at + 3):
            if step == at + 1 and communicator.rank > 1:
                return None
            if (communicator.rank, step) == (1, at):
                lose_the_end(engine)
            step_of(algorithm, optimizer, communicator.rank, step)
        assert members.ranks == (0, 1)
        found = vector(net)
        algorithm.close()
        members.prepare_close()
        members.close()
        return found

    first, second, *_ = run_ranks(ranks, program, timeout=TIMEOUT)
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.parametrize("spec", ["diloco:interval=3", "slow_mo:interval=2"])
def test_the_first_round_is_in_place_on_some_ranks_only(spec: str) -> None:
    """The others have no outer momentum yet, and take it over."""
    lost = threading.Event()

    def look(algorithm: Algorithm, name: int, step: int) -> None:
        rounds = algorithm.rounds  # type: ignore[attr-defined]
        if (name, step) != (1, 0):
            return
        take_result = rounds._take_result

        def take(part: Any, task: Any) -> None:
            if lost.is_set():
                take_result(part, task)
                return
            task.done.wait()
            until(lambda: len(placed) == RANKS - 1, lambda: f"others have the round in place, not only {placed}")
            lost.set()
            raise RankLostError("its connection broke", [0])

        rounds._take_result = take

    placed: set[int] = set()

    def watch(algorithm: Algorithm, name: int, step: int) -> None:
        look(algorithm, name, step)
        if name != 1 and algorithm.rounds.finished:  # type: ignore[attr-defined]
            placed.add(name)

    found = survivors(spec, {}, look=watch)
    assert lost.is_set()
    assert [each["epoch"] for each in found] == [2] * RANKS
    assert all(torch.equal(each["mean"], found[0]["mean"]) for each in found)


@pytest.mark.parametrize("spec", ["decentralized:peers=ring", "diloco:interval=3", "async_model_average"])
def test_a_call_that_one_rank_loses_is_repeated_by_none_or_all(spec: str) -> None:
    """Others must not be at another call meanwhile."""
    lost = threading.Event()

    def look(algorithm: Algorithm, name: int, step: int) -> None:
        if (name, step) != (1, STEPS - 1):
            return
        call = algorithm._synchronize  # type: ignore[attr-defined]

        def synchronize() -> None:
            call()
            if not lost.is_set():
                lost.set()
                raise RankLostError("its connection broke", [0])

        algorithm._synchronize = synchronize  # type: ignore[attr-defined]

    found = survivors(spec, {}, look=look)
    assert lost.is_set()
    assert all(torch.equal(each["mean"], found[0]["mean"]) for each in found)


def test_an_error_of_the_program_ends_all() -> None:
    """It is no loss: the others raise, and name the rank."""
    texts: list[str] = []

    def program(communicator: Communicator) -> None:
        members = Membership(communicator)
        net, optimizer = parts_of("bytegrad")
        algorithm = from_spec("bytegrad", net, optimizer, communicator=members.communicator, on_failure="heal")
        try:
            for step in range(STEPS):
                if (communicator.rank, step) == (1, 4):
                    members.close("ValueError: no such file")
                    return
                step_of(algorithm, optimizer, communicator.rank, step)
        except RuntimeError as error:
            texts.append(str(error))

    run_ranks(3, program, timeout=TIMEOUT)
    assert len(texts) == 2
    assert all("rank 1 has ended with an error, which ends the job: ValueError: no such file" in each for each in texts)


def leaves(communicator: Communicator, spec: str, at: int) -> dict[str, Any]:
    """Trains; rank 0 gets a notice before a step."""
    members = Membership(communicator)
    net, optimizer = parts_of(spec)
    algorithm = wrapped(spec, members, net, optimizer)
    changes: list[tuple[int, ...]] = []
    found: dict[str, Any] = {"changes": changes}

    def keep(each: Membership) -> None:
        changes.append(each.ranks)
        found.setdefault("owed", owed(algorithm))

    members.on_change(keep)
    for step in range(STEPS):
        if step == at:
            algorithm.wait()
            found["before"] = owed(algorithm)
        if (communicator.rank, step) == (0, at):
            members.notice.give("its machine is needed elsewhere")
        try:
            step_of(algorithm, algorithm.optimizer or optimizer, communicator.rank, step)
        except SystemExit as error:
            return {**found, "status": error.code, "steps": step}
    own = vector(net)
    algorithm.synchronize()
    found |= {"own": own, "mean": vector(net)}
    algorithm.close()
    members.prepare_close()
    members.communicator.barrier().wait()
    members.close()
    return found


def owed(algorithm: Algorithm) -> torch.Tensor:
    """What this rank has not sent yet, of all parameters, in float64."""
    if (loop := getattr(algorithm, "_loop", None)) is not None:
        exchanges = [each.exchange for each in loop.outer] if hasattr(loop, "outer") else []
    else:
        exchanges = algorithm._engine.buckets.exchanges  # type: ignore[attr-defined]
    named: dict[str, torch.Tensor] = {}
    for exchange in exchanges:
        state = exchange.own_state()
        for key in ("worker", "residual"):
            named |= state.get(key, {})
    return torch.cat([torch.zeros(1), *(named[name].reshape(-1) for name in sorted(named))]).double()


@grid(
    spec=[
        "bytegrad",
        "onebit:min_numel=0,exact=none,warmup_steps=0,owner_feedback=False",
        "topk:ratio=0.1,min_numel=0",
        "powersgd:rank=2",
        "dgc",
        "sparse_loco:interval=3",
        "diloco:interval=3,delay=2,codec=minmax_uint8",
        "decentralized:peers=ring",
        "sgp",
        "wagma",
    ],
    at=[4, 6],
    cover=1,
)
def test_a_rank_leaves_with_notice(spec: str, at: int) -> None:
    """After its round, by itself and with the status 0. What it has not sent yet, another one sends."""
    goes = 6 if "interval" in spec else at
    gone, *left = run_ranks(3, leaves, spec, at, timeout=TIMEOUT)
    assert (gone["status"], gone["steps"]) == (0, goes)
    assert gone["changes"] == [(0, 1, 2)]
    for each in left:
        assert each["changes"] == [(0, 1, 2), (1, 2)]
        assert torch.equal(each["mean"], left[0]["mean"])
    if spec.startswith(("bytegrad", "onebit", "topk", "powersgd", "dgc")):
        assert torch.equal(left[0]["own"], left[1]["own"])
    if goes == at:
        everything = [gone, *left]
        before = sum(each["before"] for each in everything)
        after = sum(each["owed"] for each in everything)
        assert float(gone["owed"].abs().max()) == 0
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_a_program_without_algorithms_leaves() -> None:
    def program(communicator: Communicator) -> tuple[int, ...]:
        members = Membership(communicator)
        if communicator.rank == 0:
            members.leave("its machine is needed elsewhere")
            return ()
        try:
            members.communicator.barrier().wait()
        except CommunicationError as error:
            members.change(error)
        members.prepare_close()
        members.communicator.barrier().wait()
        members.close()
        return members.ranks

    assert run_ranks(3, program, timeout=TIMEOUT) == [(), (1, 2), (1, 2)]


@pytest.mark.parametrize(("spec", "reason"), REFUSED.items())
def test_what_cannot_heal_is_refused(spec: str, reason: str) -> None:
    def program(communicator: Communicator) -> None:
        net, optimizer = parts_of(spec)
        members = Membership(communicator)
        with pytest.raises(ValueError, match=reason):
            wrapped(spec, members, net, optimizer)
        members.prepare_close()
        members.close()

    run_ranks(2, program, timeout=TIMEOUT)


def test_healing_needs_members() -> None:
    def program(communicator: Communicator) -> None:
        net, optimizer = parts_of("allreduce")
        with pytest.raises(ValueError, match=r"comm.init\(elastic=True\)"):
            from_spec("allreduce", net, optimizer, communicator=communicator, on_failure="heal")
        with pytest.raises(ValueError, match="'raise' or 'heal', got 'ignore'"):
            from_spec("allreduce", net, optimizer, communicator=communicator, on_failure="ignore")

    run_ranks(2, program)


def test_too_few_ranks_end_with_one_sentence() -> None:
    def program(communicator: Communicator) -> str:
        members = Membership(communicator, Quota(minimum=3))
        net, optimizer = parts_of("allreduce")
        algorithm = from_spec("allreduce", net, optimizer, communicator=members.communicator, on_failure="heal")
        try:
            for step in range(STEPS):
                if (communicator.rank, step) == (1, 4):
                    return ""
                step_of(algorithm, optimizer, communicator.rank, step)
        except MembershipError as error:
            return str(error)
        return "went on"

    texts = run_ranks(3, program, timeout=TIMEOUT)
    assert [
        "2 of 3 ranks are left, and at least 3 have to be; start it again from a checkpoint" in each for each in texts
    ] == [True, False, True]
