"""Tests here set gradients by hand, without a forward pass of the module."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets steps come without a forward pass, of which a training is warned."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:.* and it was not called since the last step:RuntimeWarning")
            )
