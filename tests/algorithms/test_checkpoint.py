"""Checkpoints of what algorithms remember, by real processes."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm, checkpoint, from_spec
from bagua_kernels.algorithms.checkpoint import load, save
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.live_bytes import LiveBytes, MappedFiles
from tests.algorithms.ranks import Odd, batch

SPECS = [
    "double_squeeze:min_numel=0,exact=none",
    "powersgd:min_compression=0.5",
    "powersgd:min_compression=0.5,alternate=True",
    "dgc:ratio=0.2,min_numel=0,exact=none",
]
ON_PARAMETERS = ["decentralized", "d2", "sgp:peers=exponential"]


def make(spec: str) -> Algorithm:
    module = Odd(seed=0)
    return from_spec(spec, module)


def steps(algorithm: Algorithm, first: int, last: int) -> None:
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
    for step in range(first, last):
        optimizer.zero_grad()
        algorithm(batch(comm.world().rank, step)).square().mean().backward()
        optimizer.step()


def resumes(path: str, most: int = 9) -> None:
    """Trains four steps, and two that are saved and two more by others; with so many algorithms of both kinds."""
    # Torch's own pickles are signed by nobody.
    c10d.__dict__["_unpickler"] = refused
    comm.init(timeout=limits.seconds(20))
    for number, spec in enumerate(SPECS[:most]):
        whole = make(spec)
        steps(whole, 0, 4)
        half = make(spec)
        steps(half, 0, 2)
        save(half, f"{path}/{number}")
        again = make(spec)
        again.module.load_state_dict(half.module.state_dict())
        load(again, f"{path}/{number}")
        assert again.stats().steps == 2
        steps(again, 2, 4)
        for a, b in zip(whole.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), spec
    resumes_on_parameters(path, most)
    comm.shutdown()


def refused(*_: object) -> None:
    raise AssertionError("a pickle that nobody has signed was read")


def resumes_on_parameters(path: str, most: int) -> None:
    """There the file alone brings back parameters, buffers and the optimizer's state."""
    for spec in ON_PARAMETERS[:most]:
        whole, again = (make_on_parameters(spec) for _ in range(2))
        steps_on_parameters(*whole, 0, 2)
        save(whole[0], f"{path}/{spec}")
        load(again[0], f"{path}/{spec}")
        assert again[0].stats().steps == 2
        assert again[1].state_dict()["param_groups"] == whole[1].state_dict()["param_groups"]
        expected, found = (steps_on_parameters(*each, 2, 4) for each in (whole, again))
        assert all(torch.equal(expected[name], found[name]) for name in expected), spec


def make_on_parameters(spec: str) -> tuple[Algorithm, torch.optim.Optimizer]:
    module = Odd(seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return from_spec(spec, module, optimizer), optimizer


def steps_on_parameters(
    algorithm: Algorithm, optimizer: torch.optim.Optimizer, first: int, last: int
) -> dict[str, torch.Tensor]:
    for step in range(first, last):
        optimizer.zero_grad()
        algorithm(batch(comm.world().rank, step)).square().mean().backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = algorithm.algorithm_state_dict()["parameters"]
    return state


def loads(path: str, more: int) -> None:
    """Loads what was saved, prints the mean of the residuals over all ranks, and goes on for some steps."""
    communicator = comm.init(timeout=limits.seconds(20))
    algorithm = make(SPECS[0])
    load(algorithm, f"{path}/0")
    named = algorithm.algorithm_state_dict()["vectors"]["worker"]
    total = torch.cat([named[name] for name in sorted(named)])
    communicator.all_reduce(total, comm.ReduceOp.AVG).wait()
    steps(algorithm, 2, 2 + more)
    print(json.dumps({"mean": total.tolist(), "steps": algorithm.stats().steps}))
    comm.shutdown()


def on_threads(communicator: Communicator, spec: str = SPECS[0]) -> Algorithm:
    module = Odd(seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01) if spec in ON_PARAMETERS else None
    return from_spec(spec, module, optimizer, communicator=communicator)


def stepped(algorithm: Algorithm, steps: int = 1) -> Algorithm:
    rank = algorithm.communicator.rank
    for step in range(steps):
        algorithm(batch(rank, step)).square().mean().backward()
    return algorithm


class Evil:
    """Its pickle makes a folder when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def torchs(content: Any) -> bytes:
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    "wrap",
    [pickle.dumps, torchs, functools.partial(torch.save, _use_new_zipfile_serialization=False)],
    ids=["pickle", "zip", "legacy"],
)
def test_nothing_of_a_folder_is_executed(tmp_path: Path, wrap: Callable[..., bytes | None]) -> None:
    """Whatever file it is in, also one that other programs write into such folders."""
    folder, mark = tmp_path / "saved", tmp_path / "mark"

    def rank(communicator: Communicator) -> None:
        algorithm = stepped(on_threads(communicator))
        save(algorithm, folder)
        load(algorithm, folder)

    run_ranks(1, rank)
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert len(good) == 2
    file = io.BytesIO()
    content = wrap(Evil(mark), file) if isinstance(wrap, functools.partial) else wrap(Evil(mark))
    for name in [*good, ".metadata", "__0_0.distcp"]:
        (folder / name).write_bytes(content or file.getvalue())
        outcome: list[str] = []

        def again(communicator: Communicator, outcome: list[str] = outcome) -> None:
            try:
                load(on_threads(communicator), folder)
            except ValueError as error:
                outcome.append(str(error))

        run_ranks(1, again)
        assert not mark.exists(), name
        assert bool(outcome) == (name in good), (name, outcome)
        if name in good:
            assert "is not what `save` has written" in outcome[0]
            (folder / name).write_bytes(good[name])


@pytest.mark.parametrize("spec", [SPECS[0], "decentralized"])
def test_ranks_agree_on_what_failed(tmp_path: Path, spec: str) -> None:
    """Nobody waits for a rank that could not write or read; and the earlier checkpoint still counts."""
    kinds: list[list[str]] = [[], []]

    def rank(communicator: Communicator) -> None:
        def raises(call: Callable[[Algorithm, Path], None], path: Path) -> None:
            try:
                call(algorithm, path)
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                kinds[communicator.rank].append(type(error).__name__)

        algorithm = on_threads(communicator, spec)
        save(algorithm, tmp_path)
        communicator.barrier().wait()
        algorithm._take_steps(7)
        plain = algorithm._state_to_save
        if communicator.rank == 1:
            algorithm._state_to_save = lambda: {**plain(), "steps": object()}  # type: ignore[method-assign]
        raises(save, tmp_path)
        load(algorithm, tmp_path)
        assert algorithm.stats().steps == 0
        communicator.barrier().wait()
        if communicator.rank == 1:
            next(tmp_path.glob("rank1-*")).unlink()
        communicator.barrier().wait()
        raises(load, tmp_path)
        raises(load, tmp_path / "nowhere")
        algorithm.close()

    run_ranks(2, rank)
    assert kinds == [["RuntimeError", "RuntimeError", "ValueError"], ["TypeError", "FileNotFoundError", "ValueError"]]


def test_earlier_parts_are_removed(tmp_path: Path) -> None:
    """Also those of more ranks; other files stay."""
    (tmp_path / "mine.txt").write_text("x")
    for size in (3, 2):

        def rank(communicator: Communicator) -> None:
            algorithm = on_threads(communicator)
            for _ in range(2):
                save(algorithm, tmp_path)
            algorithm.close()

        run_ranks(size, rank)
        assert len(list(tmp_path.glob("rank*.pt"))) == size
        assert json.loads((tmp_path / "checkpoint.json").read_text())["ranks"] == size
    assert (tmp_path / "mine.txt").exists()


def trained(communicator: Communicator, spec: str, folder: Path | None) -> Algorithm:
    """On layers of one size; with Adam's states if it is to be saved."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(40, 40, bias=False) for _ in range(10)])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    algorithm = from_spec(spec, module, optimizer, communicator=communicator)
    if folder is not None:
        for _ in range(2):
            optimizer.zero_grad()
            algorithm(torch.full((2, 40), communicator.rank + 1.0)).square().mean().backward()
            optimizer.step()
        save(algorithm, folder)
    return algorithm


@pytest.mark.parametrize(("spec", "most"), [("decentralized", 9.5), ("diloco:interval=2", 18.5)])
def test_memory_of_a_resume_from_eight_ranks_on_two(tmp_path: Path, spec: str, most: float) -> None:
    """Adam's new states, and for DiLoCo two vectors; beside them the mean of one tensor at a time, of 10.

    Whole states of eight ranks took 115 and 186 bytes a parameter.
    """
    numel = 10 * 40 * 40
    run_ranks(8, lambda c: trained(c, spec, tmp_path).close())
    sizes = sorted(file.stat().st_size / numel for file in tmp_path.glob("rank*.pt"))
    if spec != "decentralized":
        # Outer parameters, and what each rank has after a round, are in the first file alone.
        assert sizes[-2] < 14 < 20 < sizes[-1]

    def resumed(communicator: Communicator) -> float:
        algorithm = trained(communicator, spec, None)
        with LiveBytes(mapped) as live:
            load(algorithm, tmp_path)
        algorithm.close()
        return live.peak / numel

    with MappedFiles() as mapped:
        peaks = run_ranks(2, resumed)
    assert 8.0 < min(peaks) <= max(peaks) < most


def test_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """It had the whole of each rank's text and tensors in that rank's file."""

    def rank(communicator: Communicator) -> None:
        algorithm = trained(communicator, "decentralized", tmp_path)
        before = algorithm.algorithm_state_dict()
        tensors: list[torch.Tensor] = []
        text = json.dumps(checkpoint._taken_apart(before, tensors))
        file = next(tmp_path.glob(f"rank{communicator.rank}-*"))
        communicator.barrier().wait()
        torch.save({"text": text, "tensors": tensors}, file)
        communicator.barrier().wait()
        again = trained(communicator, "decentralized", None)
        load(again, tmp_path)
        after = again.algorithm_state_dict()
        for one, other in zip(tree_leaves(before), tree_leaves(after), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    run_ranks(2, rank)


def test_ranks_with_different_folders(tmp_path: Path) -> None:
    """Two hosts without a common disk would go on from different steps."""

    def rank(communicator: Communicator) -> None:
        algorithm = on_threads(communicator)
        for folder in ("0", "1"):
            save(algorithm, tmp_path / folder)
        with pytest.raises(ValueError, match="the same directory"):
            load(algorithm, tmp_path / str(communicator.rank))
        algorithm.close()

    run_ranks(2, rank)


class Moments:
    """Copies a folder at each moment of a save at which a kill could leave it: around what changes it, and within a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, copies: Path) -> None:
        self._folder, self._copies, self._lock, self._save = folder, copies, threading.RLock(), torch.save
        self.found: list[tuple[str, Path]] = []
        monkeypatch.setattr(torch, "save", self._writes_in_halves)
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, self._copied_around(name, getattr(owner, name)))

    def _copy(self, moment: str) -> None:
        copy = self._copies / f"{len(self.found)}"
        shutil.copytree(self._folder, copy)
        self.found.append((moment, copy))

    def _copied_around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._copy(f"before {name}")
                result = call(*arguments, **options)
                self._copy(f"after {name}")
                return result

        return copied

    def _writes_in_halves(self, content: Any, opened: Any) -> None:
        self._save(content, file := io.BytesIO())
        whole = file.getvalue()
        with self._lock:
            opened.write(whole[: len(whole) // 2])
            opened.flush()
            self._copy("half of a part")
            opened.write(whole[len(whole) // 2 :])


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one until the new one is listed. What a killed save has left is removed by the next one."""
    folder = tmp_path / "saved"
    states: dict[tuple[int, int], Any] = {}

    def saves(communicator: Communicator, steps: int) -> None:
        algorithm = stepped(on_threads(communicator), steps)
        states[communicator.rank, steps] = algorithm.algorithm_state_dict()
        save(algorithm, folder)
        algorithm.close()

    run_ranks(2, saves, 1)
    with monkeypatch.context() as patched:
        moments = Moments(patched, folder, tmp_path).found
        run_ranks(2, saves, 2)
    names = [name for name, _ in moments]
    assert names.count("half of a part") == names.count("before unlink") == 2
    listed = names.index("after replace")

    def loads(communicator: Communicator, copy: Path, counts: int) -> None:
        algorithm = on_threads(communicator)
        load(algorithm, copy)
        pairs = zip(
            tree_leaves(algorithm.algorithm_state_dict()), tree_leaves(states[communicator.rank, counts]), strict=True
        )
        assert all(torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two for one, two in pairs)
        save(algorithm, copy)
        algorithm.close()

    for place, (_, copy) in enumerate(moments):
        run_ranks(2, loads, copy, 2 if place >= listed else 1)
        assert len(list(copy.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_resume_of_one_of_each_kind_through_files(tmp_path: Path) -> None:
    results = run_processes(resumes, 2, args=(str(tmp_path), 1), timeout=limits.seconds(100))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-3000:]


# Eight processes, which import more of PyTorch than others do.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_resume_through_files(tmp_path: Path) -> None:
    """Bit-identical on as many ranks; on fewer the mean of what was remembered is kept."""
    folder = str(tmp_path)
    reports = []
    for target, size, args in ((resumes, 3, (folder,)), (loads, 3, (folder, 0)), (loads, 2, (folder, 1))):
        results = run_processes(target, size, args=args, timeout=limits.seconds(120))
        assert [r.returncode for r in results] == [0] * size, results[0].stderr[-3000:]
        if target is loads:
            reports.append([json.loads(r.stdout.splitlines()[-1]) for r in results])
    before, after = reports[0][0]["mean"], reports[1]
    assert [a["steps"] for a in after] == [3, 3]
    assert any(before)
    assert torch.allclose(torch.tensor(after[0]["mean"]), torch.tensor(before), atol=1e-7)
