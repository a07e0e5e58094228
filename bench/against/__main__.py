"""Starts `measure.main`."""

import sys

from bench.against.measure import main

sys.exit(main())
