"""The command line that gives a job faults: `python -m bagua_kernels.comm.chaos -- torchrun …`. See `programs.chaos.command`."""

from __future__ import annotations

import os
import sys

from bagua_kernels.comm.programs.chaos.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
