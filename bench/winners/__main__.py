"""Starts `measure.main`."""

import sys

from bench.winners.measure import main

sys.exit(main())
