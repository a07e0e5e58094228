"""Compiles kernels ahead of time, for images and first starts: `python -m bagua_kernels.warmup bytegrad sign:block=128`.

Compiled kernels are kept in the folder that NUMBA_CACHE_DIR names, and in the user's cache without that variable. A process finds
them there if it runs the same sources and versions on the same kind of processor. See docs/kernel-cache.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, from_spec, names
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.compressed import CompressedAllReduce
from bagua_kernels.algorithms.local_steps.mu_loco import MuLoCo
from bagua_kernels.algorithms.policy.optimizer_fit import OptimizerFitWarning
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.jit import compiling, op
from bagua_kernels.suggestions import did_you_mean

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_INPUTS, _HIDDEN, _OUTPUTS = 300, 600, 10
_RANKS = 2
_RANKS_ON_A_RING = 4  # of which each has two neighbours, as in longer rings: kernels depend on their number
_STEPS = 3
_PATIENCE = 600.0  # seconds: one rank waits while the other compiles


def warm_up(
    spec: str, *, optimizers: Sequence[str] = ("SGD", "AdamW"), dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> float:
    """Compiles what training with an algorithm needs on this machine's CPU, unless it is on disk already.

    Args:
        spec: an algorithm and its options, as for `from_spec`.
        optimizers: names in `bagua_kernels.optim`, for `optimizer.step()` and for `apply_in_backward=True`. An algorithm
            that brings an optimizer of its own uses that one, and `mu_loco` uses Muon with AdamW.
        dtypes: of the parameters.

    Returns:
        Seconds of compilation, or of waiting for another process that compiles the same kernels.

    Raises:
        ValueError: the algorithm, one of its options or an optimizer is unknown.
    """
    _check(spec, optimizers)
    on_parameters = issubclass(Algorithm.named(spec)[0], ModelAlgorithm)
    ranks = _RANKS_ON_A_RING if on_parameters else _RANKS
    before = compiling.seconds()
    for dtype in dtypes:
        for optimizer in optimizers:
            run_ranks(ranks, _train, spec, optimizer, dtype, timeout=_PATIENCE)
    return compiling.seconds() - before


def _check(spec: str, optimizers: Sequence[str]) -> None:
    known = [name for name in sorted(optim.__all__) if _is_optimizer(getattr(optim, name))]
    unknown = sorted(set(optimizers) - set(known))
    if unknown:
        raise ValueError(
            f"there is no {', '.join(unknown)} among bagua_kernels.optim's optimizers; known are {', '.join(known)}"
            f"{did_you_mean(unknown[0], known)}"
        )
    Algorithm.named(spec)


def _is_optimizer(kind: object) -> bool:
    # A chain is made of optimizers, not of parameters.
    return (
        isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and not issubclass(kind, optim.ChainedOptimizer)
    )


def _train(communicator: Communicator, spec: str, optimizer: str, dtype: torch.dtype) -> None:
    kind, _ = Algorithm.named(spec)
    if issubclass(kind, MomentumAllReduce):
        _steps(communicator, spec, None, dtype, freeze_step=1)
        return
    short = {"warmup_steps": 0} if issubclass(kind, CompressedAllReduce) else {}
    _steps(communicator, spec, optimizer, dtype, **short)
    if not issubclass(kind, ModelAlgorithm):
        _steps(communicator, spec, optimizer, dtype, apply_in_backward=True, **short)


def _steps(communicator: Communicator, spec: str, optimizer: str | None, dtype: torch.dtype, **options: Any) -> None:
    layers = torch.nn.Linear(_INPUTS, _HIDDEN, dtype=dtype), torch.nn.Linear(_HIDDEN, _OUTPUTS, dtype=dtype)
    module = torch.nn.Sequential(*layers)
    kind, arguments = Algorithm.named(spec)
    given = set(arguments)
    options = {name: value for name, value in options.items() if name not in given}
    if optimizer is None:
        algorithm = from_spec(spec, module, communicator=communicator, **options)
        takes_steps: torch.optim.Optimizer = algorithm.optimizer  # type: ignore[assignment]
    elif issubclass(kind, MuLoCo):
        takes_steps = optim.muon_with_adamw(module)
        algorithm = from_spec(spec, module, takes_steps, communicator=communicator, **options)
    else:
        takes_steps = getattr(optim, optimizer)(module.parameters(), lr=1e-3)
        algorithm = from_spec(spec, module, takes_steps, communicator=communicator, **options)
    for _ in range(_STEPS):
        algorithm(torch.ones(4, _INPUTS, dtype=dtype)).square().mean().backward()
        takes_steps.step()
        takes_steps.zero_grad()
    algorithm.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 1 if some algorithm could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua_kernels.warmup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", nargs="*", help=f"algorithms, with their options; by default {', '.join(names())}")
    parser.add_argument(
        "--optimizers", nargs="+", default=["SGD", "AdamW"], metavar="NAME", help="of bagua_kernels.optim (SGD AdamW)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=_DTYPES, help="of parameters (float32)")
    options = parser.parse_args(arguments)
    specs = options.spec or _default_specs()
    console = Console(stderr=True)
    try:
        for spec in specs:
            _check(spec, options.optimizers)
        if not op.compiles_for_cpu():
            console.print("nothing is compiled: kernels for the CPU run on the NumPy backend, as plain Python")
            return 0
    except ValueError as error:
        parser.error(str(error))
    total, failed = 0.0, []
    dtypes = [_DTYPES[name] for name in options.dtypes]
    with warnings.catch_warnings(), Progress(console=console) as progress:
        # Nothing is trained here.
        warnings.simplefilter("ignore", OptimizerFitWarning)
        task = progress.add_task("compiling", total=len(specs))
        for spec in specs:
            progress.update(task, description=spec)
            before = compiling.seconds()
            try:
                warm_up(spec, optimizers=options.optimizers, dtypes=dtypes)
            # What one algorithm refuses, such as an optimizer or a dtype, must not keep the others from disk.
            except (ValueError, TypeError, RuntimeError) as error:
                failed.append(spec)
                progress.console.print(Text(f"{spec} cannot be run: {str(error).splitlines()[0]}"))
            spent = compiling.seconds() - before
            total += spent
            progress.console.print(Text(f"{spec}: {spent:.1f} s of compilation"))
            progress.advance(task)
    if len(failed) < len(specs):
        console.print(f"{total:.1f} s of compilation in all; the next start finds the kernels on disk")
    if failed:
        console.print(
            Text(f"without all kernels of {', '.join(failed)}: see above; give other --optimizers or --dtypes")
        )
    return int(bool(failed))


def _default_specs() -> list[str]:
    """The algorithms that are compiled for if none is named: all that this version of PyTorch has an optimizer for."""
    without_muon = not hasattr(optim, "muon_with_adamw")
    return [name for name in names() if not (without_muon and issubclass(Algorithm.registered[name], MuLoCo))]


if __name__ == "__main__":
    sys.exit(main())
