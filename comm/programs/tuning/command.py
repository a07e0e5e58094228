"""The user's command line: where torchrun's words end and the script begins."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from bagua_kernels.comm.programs.tuning import probe as tune_probe


class CommandError(ValueError):
    """The launcher cannot run the command with another script."""


@dataclass(frozen=True)
class Command:
    """A command line of torchrun, taken apart.

    Attributes:
        launcher: the words that start torchrun.
        options: its arguments, up to the user's script.
        kind: what follows: a "script", "module", "command" (--no-python) or "path" (--run-path).
        nodes: the number of hosts.
        rendezvous: --rdzv-id.
        unsuitable: why there is nothing to measure, or an empty text.
        logs: True if torchrun has to keep logs.
    """

    launcher: tuple[str, ...]
    options: tuple[str, ...]
    kind: str
    nodes: int
    rendezvous: str
    unsuitable: str = ""
    logs: bool = False

    def probing(self, number: int, order: str, folder: Path) -> list[str]:
        """Returns the command that runs the probe with the same processes on the same hosts."""
        # Hosts meet under a new name each time: one that lags behind does not join the job after its own.
        options = [*self.options, "--rdzv-id", f"{self.rendezvous}-tune{number}", "--max-restarts", "0"]
        options += ["--redirects", "0", "--tee", "0", *(["--log-dir", str(folder)] if self.logs else [])]
        start = {
            "script": ["--module", tune_probe.__name__],
            "module": [tune_probe.__name__],
            "command": [sys.executable, "-m", tune_probe.__name__],
            "path": [str(Path(tune_probe.__file__))],
        }
        return [*self.launcher, *options, *start[self.kind], order]


def parse(words: Sequence[str]) -> Command:
    """Takes a command of torchrun apart.

    Raises:
        CommandError: it is not such a command; the message contains the remedy.
    """
    count, legacy = _launcher(words)
    rest = list(words[count:])
    parser = get_args_parser()
    if legacy:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    problem = io.StringIO()
    try:
        with contextlib.redirect_stderr(problem), contextlib.redirect_stdout(io.StringIO()):
            given = parser.parse_args(rest)
        least, _, most = str(given.nnodes).partition(":")
        nodes = int(most or least)
    except (SystemExit, ValueError) as error:
        said = (problem.getvalue() or str(error)).strip().splitlines()[-1:]
        raise CommandError(f"torchrun does not take these arguments: {' '.join(said)} [{shlex.join(rest)}]") from None
    place = len(rest) - len(given.training_script_args) - 1
    while rest[place] != given.training_script:  # argparse drops "--" before and after it
        place -= 1
    kinds = {"path": given.run_path, "command": given.no_python, "module": given.module, "script": True}
    unsuitable = ""
    if nodes != int(least):
        unsuitable = f"--nnodes {given.nnodes} lets the number of hosts change: give one number to have it tuned"
    elif nodes == 1 and str(given.nproc_per_node) == "1":
        unsuitable = "the job has one process, which sends nothing"
    return Command(
        launcher=tuple(words[:count]),
        options=tuple(rest[: place - (place > 0 and rest[place - 1] == "--")]),
        kind=next(kind for kind, given_so in kinds.items() if given_so),
        nodes=nodes,
        rendezvous=str(given.rdzv_id),
        unsuitable=unsuitable,
        logs=bool(given.log_dir),
    )


def _launcher(words: Sequence[str]) -> tuple[int, bool]:
    """Returns how many words start torchrun, and whether it is the older torch.distributed.launch."""
    if words and Path(words[0]).name == "torchrun":
        return 1, False
    if words and Path(words[0]).name.startswith(("python", "pypy")):
        number = 1
        while number < len(words) and words[number].startswith("-") and words[number] != "-m":
            number += 2 if words[number] in ("-X", "-W") else 1
        if words[number : number + 1] == ["-m"] and number + 1 < len(words):
            module = words[number + 1]
            if module in ("torch.distributed.run", "torch.distributed.launch"):
                return number + 2, module.endswith("launch")
        elif number < len(words) and Path(words[number]).name == "torchrun":
            return number + 1, False
    raise CommandError(
        f"expected `torchrun …` or `python -m torch.distributed.run …` after --, got {shlex.join(words) or 'nothing'}. "
        "With another launcher (mpirun, srun, a script of your own), measure once with torchrun on the same hosts: "
        "`python -m bagua_kernels.comm.tune --dry-run -- torchrun … script.py` prints lines to put before your command"
    )
