"""Compiles kernels ahead of time, for images and first starts: `python -m bagua_kernels.warmup bytegrad sign:block=128`.

What has been compiled is kept in the folder that NUMBA_CACHE_DIR names, else beside the package's sources or, where these
cannot be written, in the user's cache. A process finds it there if it runs the same versions on the same kind of processor.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import Progress

from bagua_kernels.algorithms import names
from bagua_kernels.algorithms.warmup import warm_up

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bagua_kernels.warmup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", nargs="*", help=f"algorithms, with their options; by default {', '.join(names())}")
    parser.add_argument(
        "--optimizers", nargs="+", default=["SGD", "AdamW"], metavar="NAME", help="of bagua_kernels.optim (SGD AdamW)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=_DTYPES, help="of parameters (float32)")
    options = parser.parse_args()
    dtypes = [_DTYPES[name] for name in options.dtypes]
    console = Console(stderr=True)
    total = 0.0
    with Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len(options.spec or names()))
        for spec in options.spec or names():
            progress.update(task, description=spec)
            try:
                seconds = warm_up(spec, optimizers=options.optimizers, dtypes=dtypes)
            except ValueError as error:
                parser.error(str(error))
            total += seconds
            progress.console.print(f"{spec}: {seconds:.1f} s of compilation")
            progress.advance(task)
    console.print(f"{total:.1f} s of compilation in all; the next start finds the kernels on disk")


if __name__ == "__main__":
    main()
