"""Starts `measure.main`."""

import sys

from bench.track.measure import main

sys.exit(main())
