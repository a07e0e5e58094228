"""Starts `measure.main`."""

import sys

from bench.convergence.measure import main

sys.exit(main())
