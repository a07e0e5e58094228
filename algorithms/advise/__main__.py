"""Starts the adviser."""

import sys

from bagua_kernels.algorithms.advise.command import main

sys.exit(main())
