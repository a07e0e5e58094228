"""A table of all codecs."""

from __future__ import annotations

import inspect
from typing import Any

from bagua_kernels.command.output import show_json, show_rows
from bagua_kernels.compression.codec import Codec, Contractive, from_spec, names


def rows(elements: int) -> list[dict[str, Any]]:
    """Returns each codec with its default options.

    Args:
        elements: of the vector that is encoded.
    """
    found = []
    for name in names():
        codec = from_spec(name)
        found.append(
            {
                "name": name,
                "class": type(codec).__name__,
                "bytes_per_element": codec.payload_size(elements) / elements,
                "error": _error(codec),
                "summary": (inspect.getdoc(type(codec)) or "").partition("\n")[0],
            }
        )
    return found


def show(elements: int, as_json: bool) -> None:
    """Prints the table."""
    if as_json:
        show_json({"elements": elements, "codecs": rows(elements)})
    else:
        show_rows(f"Codecs with their default options, for {elements:,} elements", rows(elements))


def _error(codec: Codec) -> str:
    if not isinstance(codec.bias, Contractive):
        return "unbiased"
    return "none" if codec.bias.delta == 1 else "biased"
