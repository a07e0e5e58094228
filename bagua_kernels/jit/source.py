"""Makes functions from source text, for kernels whose number of arguments is known only when a rule is given."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import FunctionType
from typing import Any


def function_from_source(text: str, name: str, names: Mapping[str, Any], file: str | None = None) -> FunctionType:
    """Defines the function `name` of `text`.

    Args:
        text: source code with one `def`.
        name: the name that it defines.
        names: its globals.
        file: a real file to attribute the code to, whose time stamp then guards Numba's on-disk cache; without it the
            text itself is made known to `inspect` and tracebacks, which Triton reads the source from.
    """
    filename = file or f"<bagua_kernels {name} {hash(text) & 0xFFFFFFFFFFFF:x}>"
    if file is None:
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = dict(names)
    exec(compile(text, filename, "exec"), space)
    function = space[name]
    assert isinstance(function, FunctionType)
    return function
