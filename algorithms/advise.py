"""The command `python -m bagua_kernels.algorithms.advise`. See `choosing.advise`."""

import sys

from bagua_kernels.algorithms.choosing.advise.command import main

if __name__ == "__main__":
    sys.exit(main())
