"""The code of docs/loading.md runs as it stands there."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "loading.md").read_text()


def test_blocks_run_one_after_the_other() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    batches, cost = names["batches"], names["cost"]
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert cost.linear > 0  # type: ignore[attr-defined]
