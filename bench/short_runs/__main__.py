"""Starts `study.main`."""

import sys

from bench.short_runs.study import main

sys.exit(main())
