"""The code of docs/compressed-collectives.md runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "compressed-collectives.md").read_text()


def test_example() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "compressed-collectives.md", "exec"), {})
