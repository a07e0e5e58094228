"""`launch-check` prints what `comm.init()` would do, refuses what that refuses, and joins nobody."""

from __future__ import annotations

import os

import pytest

from bagua_kernels import comm
from tests.command.calls import call, values
from tests.grids import grid

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
# On several hosts, of which none is named.
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "17",
}
LAUNCHERS = ("BAGUA_KERNELS", "GLOO", "JSM", "LOCAL_", "LSB", "MASTER", "MPI_", "MV2", "OMPI", "PET_", "PMI", "RANK")
LAUNCHERS += ("SKYPILOT", "SLURM", "TORCHELASTIC", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started this process."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert values(capsys, "launch-check") == {"alone": True}
    assert call(capsys, "launch-check").out == "This process is alone: comm.init() would open no socket.\n"


def test_a_rank_of_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TORCHRUN)
    found = values(capsys, "launch-check")
    assert {name: found[name] for name in ("alone", "rank", "world_size", "local_rank", "asks_mpi")} == {
        "alone": False,
        "rank": 1,
        "world_size": 4,
        "local_rank": 1,
        "asks_mpi": False,
    }
    assert (found["master_addr"], found["master_port"], found["launcher"]) == ("127.0.0.1", 29500, "torchrun")
    assert (found["address"], found["interface"], found["job"]) == ("127.0.0.1", "lo", "")
    out = call(capsys, "launch-check").out
    assert out.startswith("comm.init() would join rank 1 of 4")
    # A port is no amount.
    assert "29500" in out
    assert found["store_at"] == "rank 0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert values(capsys, "launch-check")["store_at"] == "launcher"
    assert not comm.is_initialized()


def test_a_loopback_address_is_that_of_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, {**TORCHRUN, "MASTER_ADDR": "127.0.0.2"})
    assert values(capsys, "launch-check")["address"] == "127.0.0.2"


def test_mpi_is_not_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, MPI)
    monkeypatch.setattr("bagua_kernels.comm.joining.launch.address_by_mpi", lambda *_: pytest.fail("asked"))
    found = values(capsys, "launch-check")
    assert (found["rank"], found["master_addr"], found["asks_mpi"]) == (3, "", True)
    assert "jobid=17" in found["job"]
    assert "all ranks would ask MPI for it together" in call(capsys, "launch-check").out


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "the environment lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "RANK": "4"}, "expected RANK from 0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "GLOO_SOCKET_IFNAME": "nosuch0"}, "is no network interface of this host"),
        ({**TORCHRUN, "GLOO_SOCKET_IFNAME": "lo,nosuch0"}, "'nosuch0'"),
        ({"BAGUA_KERNELS_TIMEOUT": "soon"}, "BAGUA_KERNELS_TIMEOUT='soon' cannot be used"),
        ({"BAGUA_KERNELS_LAUNCHER": "nosuch"}, "BAGUA_KERNELS_LAUNCHER='nosuch' cannot be used"),
    ],
)
@grid(cover=1, option=[[], ["--json"]])
def test_what_init_refuses_is_an_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
    option: list[str],
) -> None:
    put(monkeypatch, variables)
    status, out, err = call(capsys, "launch-check", *option)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("Error: ")
    assert text in err


def test_a_warning_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"SLURM_NTASKS": "4"})
    status, out, err = call(capsys, "launch-check", "--json")
    assert (status, out) == (0, '{\n "alone": true\n}\n')
    assert err.startswith("Warning: this process is alone, though SLURM_NTASKS=4")
