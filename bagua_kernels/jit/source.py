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
        file: a real file that the code is attributed to; its time stamp then guards Numba's on-disk cache. Without it the
            text is added to `linecache`, so that `inspect`, tracebacks and Triton find the source.
    """
    filename = file or f"<bagua_kernels {name} {hash(text) & 0xFFFFFFFFFFFF:x}>"
    if file is None:
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = dict(names)
    exec(compile(text, filename, "exec"), space)
    function = space[name]
    assert isinstance(function, FunctionType)
    return function
