"""The command `python -m bagua_kernels.comm.doctor`. See `programs.doctor`."""

import sys

from bagua_kernels.comm.programs.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
