"""The process of one stage: `python -m bench.gpu.stage NAME [--device cuda] [--small] [--fake] [--part NAME]`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bench.gpu import marks
from bench.gpu.child import end_with_parent
from bench.gpu.runner import LIMIT

if TYPE_CHECKING:
    import torch

# A missing module of these is a mistake, and not a machine's lack.
OURS = ("bench", "bagua_kernels", "tests")
# Modules without which a stage has nothing to do; it finds out about all others when it imports them.
NEEDS = {
    **dict.fromkeys(("smoke", "bytes", "speed", "graphs", "sanitizer"), ("torch", "triton")),
    **dict.fromkeys(("nccl", "training"), ("torch", "rich")),
    "optimizers": ("torch", "triton", "pytest", "hypothesis"),
    "numba_cuda": ("torch", "numba_cuda"),
}


@dataclass(frozen=True)
class Context:
    """What a stage is asked for.

    Attributes:
        device: "cuda", or "cpu" for a trial of the stage's own code on a machine without a GPU.
        small: True for sizes that an interpreter of kernels can handle.
        fake: True if the fake driver replaces the GPU. No kernel runs then, and no result is compared.
        part: the part of the stage that this process does; empty for the stage itself.
        limit: seconds that the stage may take.
        started: when the process started, by `time.monotonic`.
    """

    device: str = "cuda"
    small: bool = False
    fake: bool = False
    part: str = ""
    limit: float = 60.0
    started: float = 0.0

    @property
    def on_gpu(self) -> bool:
        """True if the stage runs on a GPU."""
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        """The device of tensors."""
        import torch

        return torch.device("cuda:0" if self.on_gpu else "cpu")

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.monotonic() - self.started)

    def command(self, stage: str, part: str = "") -> list[str]:
        """The command line of a part of a stage, or of a whole stage."""
        options = ["--device", self.device, *["--small"] * self.small, *["--fake"] * self.fake]
        return [sys.executable, "-m", "bench.gpu.stage", stage, *options, *(["--part", part] if part else [])]


@contextlib.contextmanager
def driver(fake: bool) -> Iterator[None]:
    """Puts the fake driver in the place of the GPU's, if that is asked for."""
    if not fake:
        yield
        return
    from bench.gpu import fake_driver

    with fake_driver.active():
        yield


def check_gpu() -> None:
    """Raises `Refused` if PyTorch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise marks.Refused(f"torch.cuda.is_available() is False with torch {torch.__version__}")


def refusal(error: BaseException) -> str:
    """Returns what the machine lacks, if that is why an error was raised; else an empty text."""
    if isinstance(error, marks.Refused):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in OURS:
        return f"no module {error.name}"
    return ""


def run(name: str, context: Context) -> int:
    """Runs a stage, or a part of one; returns the exit status."""
    try:
        for module in NEEDS.get(name, ()):
            if find_spec(module) is None:
                raise marks.Refused(f"no module {module}")
        # The facts show the versions first.
        if context.on_gpu and name != "facts":
            check_gpu()
        with driver(context.fake):
            importlib.import_module(f"bench.gpu.stages.{name}").run(context)
    except marks.Differs as error:
        marks.put(marks.FAILED, str(error))
        return 1
    except Exception as error:
        if reason := refusal(error):
            marks.put(marks.REFUSED, reason)
            return marks.REFUSED_STATUS
        traceback.print_exc()
        marks.put(marks.FAILED, f"{type(error).__name__}: {error}")
        return 1
    return 0


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--part", default="")
    options = parser.parse_args()
    if LIMIT in os.environ:
        end_with_parent()
    faulthandler.enable()
    limit = float(os.environ.get(LIMIT, "600"))
    status = run(
        options.name,
        Context(options.device, options.small, options.fake, options.part, limit, started),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and destructors of a failed stage must not keep the process.
    os._exit(status)


if __name__ == "__main__":
    main()
