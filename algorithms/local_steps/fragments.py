"""Which parameters of a model are exchanged together: every F-th block of layers."""

from __future__ import annotations

from collections.abc import Sequence


def fragments_of(names: Sequence[str], fragments: int) -> dict[str, int]:
    """Returns the fragment of each parameter, from 0 to `fragments` - 1.

    A block is the part of a name up to its first number, such as `layers.3`; block b belongs to fragment b mod F. Parameters
    before the first block belong to it, those after a block to the block. In a model without numbers each parent module is a
    block. All parameters of a module stay together.

    Args:
        names: of the parameters, in the order in which the module names them.
        fragments: how many there are.
    """
    blocks = {name: _block(name) for name in names}
    if not any(blocks.values()):
        blocks = {name: name.rpartition(".")[0] for name in names}
    places: dict[str, int] = {}
    found, last = {}, 0
    for name, block in blocks.items():
        if block is not None:
            last = places.setdefault(block, len(places))
        found[name] = last % fragments
    return found


def _block(name: str) -> str | None:
    """The name up to its first number; None if it has none."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])
