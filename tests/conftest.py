"""Tiers of tests, backends as a parameter, poisoned memory, kernels on one thread, and a folder for compiled kernels."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Numba reads it when it is imported. Processes that tests start inherit it.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".kernel_cache"))

import pytest
import torch
from hypothesis import HealthCheck, settings

from bagua_kernels import knobs
from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.testing.fork_server import servers
from bagua_kernels.jit import op
from tests import grids, parts

EMULATED = knobs.TRITON_INTERPRET.get() or knobs.CUDA_SIMULATOR.get()

# The `target` fixture stays as it is from one example to the next, which is what is wanted.
# Nor is the time looked at that examples take: the first one may compile a kernel.
PROFILE = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("native", PROFILE, max_examples=10)
settings.register_profile("everything", PROFILE, max_examples=100)
settings.register_profile("emulated", PROFILE, max_examples=3)
settings.load_profile("emulated" if EMULATED else "native")
if knobs.CUDA_SIMULATOR.get() and importlib.util.find_spec("numba_cuda"):
    from tests import simulator

    simulator.install()

DOCS = Path(__file__).with_name("docs")

# What a test uses that starts processes; it gets the marker `processes`.
STARTERS = {"run_processes", "Processes", "process_command", "subprocess", "Popen", "Lab", "on_hosts"}

# Ranks that are threads may be compiling kernels, on a machine that has other things to do.
run_ranks.__kwdefaults__["timeout"] = 100.0
# Seconds that a test marked as slow may take, on a machine with other work.
SLOWEST = 900


@dataclass(frozen=True)
class Target:
    """A backend and where it runs here."""

    backend: str
    device: torch.device

    @property
    def emulated(self) -> bool:
        return EMULATED


def targets() -> list[Target]:
    """Every backend that can run here; in an emulated run, the emulated one only, since the others ran before."""
    devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
    found = [Target(name, device) for device in devices for name in op.available(device)]
    if knobs.TRITON_INTERPRET.get():
        return [t for t in found if t.backend == "triton" and t.device.type == "cpu"]
    if knobs.CUDA_SIMULATOR.get():
        return [t for t in found if t.backend == "numba_cuda" and t.device.type == "cpu"]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        found = targets()
        metafunc.parametrize("target", found, ids=[f"{t.backend}-{t.device.type}" for t in found], indirect=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="full products of parameters, and tests marked as slow")
    parser.addoption("--part", metavar="K/N", default="0/1", help="part K of N of the items, from 0 on")


def pytest_configure(config: pytest.Config) -> None:
    # Compiled kernels are millions of objects, and looking at all of them took a tenth of the run. Looking at young ones after
    # each 700, as Python does, takes a twentieth of each compilation.
    gc.set_threshold(20_000, 10, 1000)
    grids.EVERYTHING = config.getoption("--all")
    parts.parse(config.getoption("--part"))
    if grids.EVERYTHING and not EMULATED:
        settings.load_profile("everything")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the items of the tier: by default a sample of those that are not slow; in an emulated run, of those about kernels."""
    starting = functools.cache(lambda function: starts_processes(function, set()))
    for item in items:
        if starting(getattr(item, "function", None)):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOWEST))
    kept = list(items)
    if EMULATED:
        # Everything else has been tested without.
        kept = [item for item in items if "target" in getattr(item, "fixturenames", ())]
    # Who names tests, or has a GPU, wants them all. Otherwise all pairs that a grid covers are tested, and all pages. Where an
    # interpreter takes seconds for each, pages are left to `make test-rest`.
    named = bool(config.option.keyword) or any("::" in argument for argument in config.args)
    if not named and (EMULATED or not torch.cuda.is_available()):
        pages = {item for item in kept if DOCS in item.path.parents}
        whole = set() if EMULATED else pages.union(item for item in kept if item.get_closest_marker("pair"))
        rest = [item for item in kept if not left_out(item) and item not in pages and item not in whole]
        sample = whole.union(sample_of(rest))
        for item in kept:
            if item not in sample:
                item.add_marker(pytest.mark.beyond)
    if not config.getoption("--all"):
        kept = [item for item in kept if not left_out(item)]
    part = parts.parse(config.getoption("--part"))
    kept = [item for item in kept if parts.contains(part, item.nodeid)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    # What takes longest comes first, or one worker would end with it while the others have nothing left. Processes come when
    # kernels are compiled: of several one would compile while the others wait.
    marked = pytest.Item.get_closest_marker
    items[:] = sorted(kept, key=lambda item: (not marked(item, "slow"), bool(marked(item, "processes"))))


def left_out(item: pytest.Item) -> bool:
    """True if the item is in no default run."""
    return any(mark.name in ("slow", "beyond") for mark in item.iter_markers())


def starts_processes(function: Any, seen: set[Any]) -> bool:
    """True if a function names what starts processes, or names a function of its file that does.

    Args:
        function: it; other objects are none.
        seen: the code of functions that have been looked at, which grows.
    """
    function = inspect.unwrap(function) if callable(function) else None
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    parts, names = [code], set()
    for part in parts:
        parts.extend(constant for constant in part.co_consts if isinstance(constant, type(code)))
        names.update(part.co_names)
    others = [function.__globals__.get(name) for name in sorted(names)]
    return not names.isdisjoint(STARTERS) or any(
        starts_processes(other, seen) for other in others if getattr(other, "__module__", None) == function.__module__
    )


def sample_of(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns items that have every test function, and, but in emulated runs, each value of each parameter of a file."""
    # In an order that depends on nothing but names, so that functions do not all get the first value. With --all there are
    # other numbers in them.
    items = sorted(items, key=lambda item: hashlib.sha256(re.sub(r"_?\d+", "", item.nodeid).encode()).digest())
    parts: list[set[tuple[str, ...]]] = []
    for item in items:
        # In the interpreter and the simulator an element takes a millisecond: there every function is enough.
        values = item.callspec.params.items() if hasattr(item, "callspec") and not EMULATED else ()
        function, file = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        parts.append({(function,), *((file, name, repr(value)) for name, value in values)})
    return [items[place] for place in grids.sample(parts)]


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Runs the test with one backend forced."""
    with knobs.override(knobs.BACKEND, request.param.backend):
        yield request.param


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Garbage collections look only at what the test makes. Compiled kernels are millions of objects, which take seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fork_servers(request: pytest.FixtureRequest) -> None:
    """Starts what processes are forked from before a test counts this process's descriptors."""
    if request.node.get_closest_marker("processes"):
        servers()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN or 255, so that an element that a kernel forgets to write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # The public function imports `torch._inductor`, which takes each worker two seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
