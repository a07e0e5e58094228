"""Starts `lab.main`."""

import sys

from bench.netlab.lab import main

sys.exit(main())
