"""Objects that somebody else than a rank has sent are not read, and ranks without a common secret part at once."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_kernels import comm, knobs
from bagua_kernels.comm import Communicator, TorchCommunicator, run_ranks
from bagua_kernels.comm.joining.gathering import Gathering
from bagua_kernels.comm.joining.introduction import job_secret
from bagua_kernels.comm.joining.seal import HEADER, Seal
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.grids import grid


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def send(c: Communicator, operation: str, header: torch.Tensor, payload: torch.Tensor) -> None:
    """Sends by hand what an operation on objects, from rank 1 of two, would."""
    if operation == "broadcast":
        c.broadcast(header, 1).wait()
        c.broadcast(payload, 1).wait()
    elif operation == "scatter":
        c.broadcast(torch.stack([header, header]), 1).wait()
        c.scatter(torch.empty_like(payload), torch.cat([payload, payload]), 1).wait()
    else:
        c.all_gather(torch.empty(2 * HEADER, dtype=torch.uint8), header).wait()
        c.all_gather(torch.empty(2 * payload.numel(), dtype=torch.uint8), payload).wait()


@grid(cover=1, secret=["none", "another"], operation=["broadcast", "all_gather", "gather", "scatter"])
def test_pickle_of_a_stranger_is_not_read(operation: str, secret: str, tmp_path: Path) -> None:
    """Rank 1 stands for somebody who has taken over its connections, but does not know the secret."""
    payload = tensor(pickle.dumps(Bomb(tmp_path / "executed")))

    def fn(c: Communicator) -> None:
        if c.rank == 0:
            with pytest.raises(CommunicationError, match=r"rank 1 that is not signed with this job's secret"):
                {
                    "broadcast": lambda: c.broadcast_object(None, 1),
                    "all_gather": lambda: c.all_gather_object(None),
                    "gather": lambda: c.gather_object(None, 0),
                    "scatter": lambda: c.scatter_object(None, 1),
                }[operation]()
            return
        forged = Seal(Secret.random()).open(f"{operation}_object", c.abort)
        header = forged.header(payload, 1) if secret == "another" else tensor(bytes(HEADER))
        with pytest.raises(CommunicationError):
            send(c, operation, header, payload)

    run_ranks(2, fn)
    assert not (tmp_path / "executed").exists()


def test_other_bytes_than_those_that_were_signed(tmp_path: Path) -> None:
    """A header that is right does not let another object in."""
    honest, payload = tensor(pickle.dumps("x" * 1000)), tensor(pickle.dumps(Bomb(tmp_path / "executed")))
    payload = torch.cat([payload, torch.zeros(honest.numel() - payload.numel(), dtype=torch.uint8)])

    def fn(c: Communicator) -> None:
        if c.rank == 0:
            with pytest.raises(CommunicationError, match="other bytes than rank 1 has signed"):
                c.broadcast_object(None, 1)
            return
        c.broadcast(c._sealing("broadcast_object").header(honest, 1), 1).wait()
        c.broadcast(payload, 1).wait()

    run_ranks(2, fn)
    assert not (tmp_path / "executed").exists()


def test_signed_object_of_an_earlier_operation() -> None:
    """It is not taken for that of a later one."""

    def fn(c: Communicator) -> None:
        old = c._sealing("broadcast_object").header(tensor(pickle.dumps("old")), 1)
        if c.rank == 1:
            c.broadcast(old, 1).wait()
            return
        with pytest.raises(CommunicationError, match="not signed"):
            c.broadcast_object(None, 1)

    run_ranks(2, fn)


def test_length_of_a_stranger_takes_no_memory() -> None:
    """The length is part of what is signed."""

    def fn(c: Communicator) -> None:
        if c.rank == 1:
            c.broadcast(tensor((1 << 62).to_bytes(8, "little") + bytes(HEADER - 8)), 1).wait()
            return
        with pytest.raises(CommunicationError, match="not signed"):
            c.broadcast_object(None, 1)

    run_ranks(2, fn)


def test_object_that_cannot_be_pickled_may_be_replaced() -> None:
    """Nothing has been sent then, so the others still wait for the same operation."""

    def fn(c: Communicator) -> list[Any]:
        if c.rank == 1:
            with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
                c.all_gather_object(lambda: None)
        return c.all_gather_object(c.rank)

    assert run_ranks(2, fn) == [[0, 1], [0, 1]]


def test_secret_of_the_store_and_of_the_environment() -> None:
    """Whoever shares a store shares a secret; one that is given needs no store."""
    store = dist.HashStore()
    one = job_secret(store)
    assert job_secret(store).export() == one.export() != job_secret(dist.HashStore()).export()
    with knobs.override(knobs.SECRET, "k" * 32):
        given = job_secret(store)
        assert given.export() == job_secret(dist.HashStore()).export() != one.export()


def test_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with it can be told without telling it."""
    monkeypatch.setenv("BAGUA_KERNELS_SECRET", "hunter2")
    with pytest.raises(ValueError, match=r"BAGUA_KERNELS_SECRET \(of 7 characters\) .*at least 16") as caught:
        knobs.SECRET.get()
    assert "hunter2" not in str(caught.value)


def _other_secrets(kind: str) -> None:
    rank = int(os.environ["RANK"])
    try:
        if kind == "init":
            comm.init(timeout=limits.seconds(30))
        else:
            dist.init_process_group("gloo")
            TorchCommunicator(timeout=limits.seconds(30))
    except CommunicationError as error:
        print(json.dumps([rank, str(error)]))
    # The ranks part at once: nobody has to wait for a timeout.


# Three interpreters that import everything.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "odd"), [("init", "s" * 20), ("group", "")])
def test_ranks_with_different_secrets(kind: str, odd: str, tmp_path: Path) -> None:
    """All of them get an error that names the others and what to set."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"secret = {'r' * 20!r} if os.environ['RANK'] != '2' else {odd!r}\n"
        "os.environ['BAGUA_KERNELS_SECRET'] = secret\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.comm.test_objects import _other_secrets\n"
        f"_other_secrets({kind!r})\n"
    )
    results = run_processes(script, 3)
    told = dict(json.loads(result.stdout.strip().splitlines()[-1]) for result in results)
    assert "rank 2 do not have the same secret" in told[0]
    assert "rank 2 do not have the same secret" in told[1]
    assert "ranks 0, 1 do not have the same secret" in told[2]
    assert all("BAGUA_KERNELS_SECRET" in text for text in told.values())
    assert not any("r" * 20 in result.stderr + result.stdout for result in results)


def _bombed(folder: str) -> None:
    """Rank 1 knows all but the secret, and sends pickles in place of its introduction."""
    rank = int(os.environ["RANK"])
    path = Path(folder)
    if rank == 1:
        gather = Gathering.__call__

        def bombs(self: Gathering, data: bytes) -> list[bytes]:
            if len(data) == Secret.NBYTES:
                return gather(self, data)
            bomb = pickle.dumps(Bomb(path / "executed"))
            return gather(self, bomb.ljust(len(data))[: len(data)])

        Gathering.__call__ = bombs  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    try:
        TorchCommunicator(timeout=limits.seconds(30))
    except CommunicationError as error:
        print(error)


@pytest.mark.slow
def test_pickles_during_the_introduction(tmp_path: Path) -> None:
    """They are neither read nor executed."""
    results = run_processes(_bombed, 2, args=[str(tmp_path)])
    assert "rank 0 and rank 1 do not have the same secret" in results[0].stdout
    assert not (tmp_path / "executed").exists()
