"""Tests of this folder are for emulators and for GPUs: on a CPU, other folders test the kernels that these would compile."""

from __future__ import annotations

import torch

from tests.conftest import EMULATED

collect_ignore_glob = [] if EMULATED or torch.cuda.is_available() else ["test_*.py"]
