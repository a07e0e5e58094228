"""Every environment variable that the package reads, typed, with its default and its meaning.

A variable is read when its knob is used, so that a launcher or a test may set it after import. `override` sets knobs
from Python for the length of a `with` block, above the environment.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

LEAST_TIMEOUT = 0.001  # seconds: torch counts them in milliseconds, and takes 0 for no limit or none left
LONGEST_TIMEOUT = 1e6  # seconds: some calls of the system take milliseconds of 31 bits
MOST_SOCKETS = 64  # between two ranks
_SHORTEST_BEAT = 0.01  # seconds: faster ones would do little but beat
_LONGEST_BEAT = 600.0  # seconds


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable.

    Attributes:
        variable: its name.
        default: the value where the variable is unset or empty.
        parse: turns its text into a value; raises `ValueError` for a text that makes no sense.
        doc: one sentence for the documentation.
        private: True if no error may show the value.
    """

    variable: str
    default: T
    parse: Callable[[str], T]
    doc: str
    private: bool = False

    def get(self) -> T:
        """Returns the value in force: that of `override`, else the environment's, else the default."""
        if self.variable in _overrides:
            return cast(T, _overrides[self.variable])
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            shown = f" (of {len(text)} characters)" if self.private else f"={text!r}"
            raise ValueError(f"{self.variable}{shown} cannot be used: {error}. {self.doc}") from None


_overrides: dict[str, object] = {}


@contextlib.contextmanager
def override(knob: Knob[T], value: T) -> Iterator[None]:
    """Sets a knob for the length of a `with` block (for all threads)."""
    missing = object()
    before = _overrides.get(knob.variable, missing)
    _overrides[knob.variable] = value
    try:
        yield
    finally:
        if before is missing:
            del _overrides[knob.variable]
        else:
            _overrides[knob.variable] = before


def _backend(text: str) -> str:
    names = ("auto", "triton", "numba_cuda", "numba_cpu", "numpy")
    if text not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    return text


def _binding(text: str) -> str:
    if text not in ("torch", "cupy"):
        raise ValueError("expected torch or cupy")
    return text


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 1 or 0")


def _launcher(text: str) -> str:
    names = ("auto", "torchrun", "slurm", "mpi", "jsrun", "horovod", "submitit", "alone")
    if text not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    return text


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ValueError("expected a whole number >= 0")
    return value


def _sockets(text: str) -> int:
    value = _count(text)
    if value > MOST_SOCKETS:
        raise ValueError(f"expected at most {MOST_SOCKETS}, for each of them is a descriptor for every other rank")
    return value


def _seconds(text: str) -> float:
    return _between(text, LEAST_TIMEOUT, LONGEST_TIMEOUT)


def _heartbeat(text: str) -> float:
    return _between(text, _SHORTEST_BEAT, _LONGEST_BEAT)


def _between(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"expected a number of seconds from {least:g} to {most:.7g}")
    return value


def _secret(text: str) -> str:
    if len(text) < 16:
        raise ValueError(
            "expected at least 16 characters; python -c 'import secrets; print(secrets.token_hex())' makes 64"
        )
    return text


BACKEND: Knob[str] = Knob(
    "BAGUA_KERNELS_BACKEND",
    "auto",
    _backend,
    "Kernel backend: triton, numba_cuda, numba_cpu or numpy; auto takes Triton for CUDA tensors and Numba for CPU tensors.",
)
TIMEOUT: Knob[float] = Knob(
    "BAGUA_KERNELS_TIMEOUT", 300.0, _seconds, "Seconds without progress after which a collective raises an error."
)
HEARTBEAT: Knob[float] = Knob(
    "BAGUA_KERNELS_HEARTBEAT",
    0.5,
    _heartbeat,
    "Seconds between two heartbeats of a rank; a rank silent for six of them counts as lost once a collective fails.",
)
LISTEN: Knob[str] = Knob(
    "BAGUA_KERNELS_LISTEN",
    "",
    str,
    "Where each rank of an elastic job lets processes join: a port, or host:port; the ranks of a host take the next free ones.",
)
JOIN: Knob[str] = Knob(
    "BAGUA_KERNELS_JOIN",
    "",
    str,
    "Addresses of members of an elastic job, host:port with commas between them, which `init` joins instead of a launcher's job.",
)
LAUNCHER: Knob[str] = Knob(
    "BAGUA_KERNELS_LAUNCHER",
    "auto",
    _launcher,
    "Whose variables `init` reads: torchrun (RANK and WORLD_SIZE), slurm, mpi, jsrun, horovod or submitit; auto finds out, "
    "alone makes one rank.",
)
NCCL: Knob[str] = Knob(
    "BAGUA_KERNELS_NCCL",
    "torch",
    _binding,
    "What `init` drives NCCL through on GPUs: torch, or cupy for a stream of its own, errors that name ranks, and graphs.",
)
SOCKETS: Knob[int] = Knob(
    "BAGUA_KERNELS_SOCKETS",
    1,
    _sockets,
    "Sockets that `init` opens between two ranks on CPUs; `tune` measures how many are used; 0 leaves all to Gloo.",
)
TUNING: Knob[str] = Knob(
    "BAGUA_KERNELS_TUNING",
    "",
    str,
    "What `bagua_kernels.comm.tune` has measured, as JSON: which way each collective takes at which size.",
)
WATCH: Knob[bool] = Knob(
    "BAGUA_KERNELS_WATCH",
    True,
    _flag,
    "1 lets optimizers find moved tensors by reading PyTorch's objects in memory; 0 asks PyTorch for each of them.",
)
CACHE_MB: Knob[int] = Knob(
    "BAGUA_KERNELS_CACHE_MB",
    1000,
    _count,
    "Megabytes of compiled kernels that a folder keeps; those that were not used for longest are removed first.",
)
SECRET: Knob[str] = Knob(
    "BAGUA_KERNELS_SECRET",
    "",
    _secret,
    "A secret of the job, the same on all ranks, for where torch's store is not trusted with one; see docs/security.md.",
    private=True,
)
FAULTS: Knob[str] = Knob(
    "BAGUA_KERNELS_FAULTS",
    "",
    str,
    "Faults that ranks are given on purpose, such as kill:rank=2,step=100;stop:rank=1,after=60; see docs/elastic.md.",
)
FAULTS_FOLDER: Knob[str] = Knob(
    "BAGUA_KERNELS_FAULTS_FOLDER",
    "",
    str,
    "A folder in which each process notes its steps, and the faults that it is given.",
)

TRITON_INTERPRET: Knob[bool] = Knob(
    "TRITON_INTERPRET",
    False,
    _flag,
    "Triton's own switch, read when triton is imported: 1 runs its kernels in Python, on CPU tensors too.",
)
CUDA_SIMULATOR: Knob[bool] = Knob(
    "NUMBA_ENABLE_CUDASIM",
    False,
    _flag,
    "Numba's own switch, read when numba is imported: 1 runs CUDA kernels in Python, on CPU tensors.",
)
NUMBA_DISABLE_JIT: Knob[bool] = Knob(
    "NUMBA_DISABLE_JIT",
    False,
    _flag,
    "Numba's own switch: 1 leaves its functions to Python, so that kernels for the CPU are those of the NumPy backend.",
)

XDG_CACHE_HOME: Knob[str] = Knob(
    "XDG_CACHE_HOME", "", str, "The folder of the user's caches, which keeps compiled kernels; ~/.cache by default."
)
RESTARTS: Knob[int] = Knob(
    "TORCHELASTIC_RESTART_COUNT", 0, _count, "torchrun's own: how often it has started the ranks again."
)
SLURM_RESTARTS: Knob[int] = Knob(
    "SLURM_RESTART_COUNT", 0, _count, "Slurm's own: how often it has started the job again."
)
MASTER_ADDR: Knob[str] = Knob(
    "MASTER_ADDR", "", str, "torchrun's variable: the host of rank 0, which is also where the heartbeat store is."
)
GLOO_SOCKET_IFNAME: Knob[str] = Knob(
    "GLOO_SOCKET_IFNAME",
    "",
    str,
    "Gloo's variable: the network interface that ranks on CPUs use (the first one of a list).",
)
NODE: Knob[str] = Knob(
    "BAGUA_KERNELS_NODE",
    "",
    str,
    "Any name of the node on which a process runs, in place of what torchrun and the host have; set it on all ranks or on none.",
)
RANK: Knob[int | None] = Knob(
    "RANK", None, _count, "torchrun's variable: the number of a process; of all only rank 0 announces that it compiles."
)
GROUP_RANK: Knob[int | None] = Knob(
    "GROUP_RANK", None, _count, "torchrun's variable: the number of the node on which a process runs."
)
NODE_RANK: Knob[int | None] = Knob(
    "NODE_RANK", None, _count, "Other launchers' variable for the same as GROUP_RANK, which counts where both are."
)
LOCAL_WORLD_SIZE: Knob[int | None] = Knob(
    "LOCAL_WORLD_SIZE", None, _count, "torchrun's variable: how many processes it has started on the node."
)

# In the order in which they are defined above.
ALL: tuple[Knob[Any], ...] = tuple(value for value in globals().copy().values() if isinstance(value, Knob))
