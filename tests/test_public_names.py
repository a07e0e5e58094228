"""Public names stay where they are, and names of one object stay names of one object."""

import importlib
import json
from pathlib import Path

ALIASES = Path(__file__).parent / "public_names.json"


def found(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_public_names_are_where_they_were() -> None:
    for names in json.loads(ALIASES.read_text()):
        first, *others = [found(name) for name in names]  # an AttributeError names the module
        assert all(other is first for other in others), names
