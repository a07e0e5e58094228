"""Tiers of tests, backends as a parameter, NumPy for tests of logic, and poisoned memory."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from bagua_kernels import knobs
from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.testing.fork_server import servers
from bagua_kernels.jit import op
from tests import deadline, grids, kernels, limits

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

FOLDER = Path(__file__).parent
# The folders of tests whose subject is not a kernel.
LOGIC = ("algorithms", "bench", "comm", "docs", "examples")

# What a test uses that starts processes; it gets the marker `processes`.
STARTERS = {"run_processes", "Processes", "process_command", "subprocess", "Popen", "Lab", "on_hosts"}

# Limits that only end a hang. Ranks that are threads may be compiling kernels.
run_ranks.__kwdefaults__["timeout"] = limits.seconds(100)
limits.scale_defaults()
# Seconds that a test marked as slow may take.
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
    grids.generate(metafunc)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="full products of parameters, and tests marked as slow")
    parser.addoption("--record-kernels", action="store_true", help="write tests/kernels.txt; see tests/kernels.py")
    deadline.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    # Compiled kernels are millions of objects, and looking at all of them took a tenth of the run. Looking at young ones after
    # each 700, as Python does, takes a twentieth of each compilation.
    gc.set_threshold(20_000, 10, 1000)
    # Who names tests, or has a GPU, wants all of their items.
    on_gpu = torch.cuda.is_available() and not EMULATED
    grids.EVERYTHING = config.getoption("--all") or names_tests(config) or on_gpu
    grids.TARGETS.update({f"{target.backend}-{target.device.type}": target for target in targets()})
    # Where it is not all that there is.
    grids.REFERENCES.update(name for name in grids.TARGETS if name == "numpy-cpu" and len(grids.TARGETS) > 1)
    deadline.configure(config)
    if config.getoption("--record-kernels"):
        config.pluginmanager.register(kernels.Recorder())
    if config.getoption("--all") and not EMULATED:
        settings.load_profile("everything")


def names_tests(config: pytest.Config) -> bool:
    """True if the command line has a name of a test, or `-k`."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the items of the tier: by default those that are not slow; in an emulated run, those about kernels."""
    starting = functools.cache(lambda function: starts_processes(function, set()))
    for item in items:
        if starting(getattr(item, "function", None)):
            item.add_marker(pytest.mark.processes)
        limits.scale_item(item, SLOWEST)
    kept = list(items)
    if EMULATED:
        # Everything else has been tested without.
        kept = [item for item in items if "target" in getattr(item, "fixturenames", ())]
    if not config.getoption("--all"):
        kept = [item for item in kept if not item.get_closest_marker("slow")]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    # What takes longest comes first, or one worker would end with it while the others have nothing left. Processes come when
    # kernels are compiled: of several one would compile while the others wait.
    marked = pytest.Item.get_closest_marker
    items[:] = sorted(kept, key=lambda item: (not marked(item, "slow"), bool(marked(item, "processes"))))
    kernels.order(config, items)
    deadline.order(config, items)


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs a test of logic on the NumPy backend, with all processes that it starts; see `runs_compiled`."""
    if runs_compiled(item):
        return (yield)
    with mock.patch.dict(os.environ, {knobs.BACKEND.variable: "numpy"}):
        return (yield)


def runs_compiled(item: pytest.Item) -> bool:
    """True if an item runs on the compiled kernels.

    All do with `--all`. Without it, those are left that are not in a folder of `LOGIC`, and those marked `compiled`. The NumPy
    backend computes the same bits, and compiles nothing, which took a third of the run.
    """
    folder = item.path.relative_to(FOLDER).parts[0] if FOLDER in item.path.parents else ""
    return (
        EMULATED
        or folder not in LOGIC
        or bool(item.config.getoption("--all"))
        or item.get_closest_marker("compiled") is not None
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny tensors, whose threads mostly wait for each other, and for ranks that are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
