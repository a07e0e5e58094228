"""Starts `command.main`."""

import sys

from bench.convergence.command import main

sys.exit(main())
