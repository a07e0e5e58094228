"""The launcher's command line: `python -m bagua_kernels.comm.tune -- torchrun …`. See `programs.tuning.launcher`."""

from __future__ import annotations

if __name__ != "__main__":
    # An import would put this module where the package has the function of the same name.
    raise ImportError(
        f"{__name__} is a command, not a module to import: run `python -m bagua_kernels.comm.tune -- torchrun …`; "
        "`from bagua_kernels.comm import tune` gives the function, and bagua_kernels.comm.programs.tuning.launcher has the parts"
    )

import os
import sys

from bagua_kernels.comm.programs.tuning.launcher import main

sys.exit(main(sys.argv[1:], os.environ))
