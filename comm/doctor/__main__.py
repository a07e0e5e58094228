"""Starts the doctor."""

import sys

from bagua_kernels.comm.doctor.command import main

sys.exit(main())
