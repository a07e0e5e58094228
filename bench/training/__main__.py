"""Starts `measure.main`."""

import sys

from bench.training.measure import main

sys.exit(main())
