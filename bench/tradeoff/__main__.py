"""Starts `measure.main`."""

import sys

from bench.tradeoff.measure import main

sys.exit(main())
