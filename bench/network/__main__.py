"""Starts `measure.main`."""

import sys

from bench.network.measure import main

sys.exit(main())
