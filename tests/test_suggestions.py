"""Names that are spelled alike."""

from __future__ import annotations

import pytest

from bagua_kernels.suggestions import did_you_mean

KNOWN = ["bytegrad", "bucket_bytes", "allreduce"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bytgrad", "; did you mean 'bytegrad'?"),
        ("ByteGrad", "; did you mean 'bytegrad'?"),
        ("bucket-bites", "; did you mean 'bucket_bytes'?"),
        ("GradientAllReduce", "; did you mean 'allreduce'?"),
        ("nothing alike", ""),
        ("", ""),
        (3, ""),
    ],
)
def test_what_is_suggested(name: object, expected: str) -> None:
    assert did_you_mean(name, KNOWN, {"GradientAllReduce": "allreduce"}) == expected
