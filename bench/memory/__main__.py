"""Starts `measure.main`."""

import sys

from bench.memory.measure import main

sys.exit(main())
