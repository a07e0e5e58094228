"""What a hook is to DDP before the first pass, and what cannot be one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from bagua_kernels.algorithms import DiLoCo, QAdam, ddp


def test_what_ddp_asks_of_a_hook() -> None:
    made = ddp.hook("bytegrad:block=128")
    parameters = inspect.signature(made).parameters
    assert list(parameters) == ["state", "bucket"]
    assert all(each.annotation is inspect.Parameter.empty for each in parameters.values())
    assert inspect.signature(made).return_annotation is inspect.Signature.empty
    assert made.__name__ == made.__qualname__ == "bagua_kernels bytegrad:block=128"


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nothing", {}, "nothing"),
        ("diloco", {}, f"is a {DiLoCo.__name__}, of which there is no hook"),
        ("auto", {}, "is a AutoTune, of which there is no hook"),
        ("qadam", {}, f"is a {QAdam.__name__}, of which there is no hook"),
        ("bytegrad", {"bucket_bytes": 3}, "bucket_bytes means nothing to a hook"),
        ("bytegrad", {"apply_in_backward": True}, "apply_in_backward means nothing to a hook"),
        ("bytegrad", {"in_flight": 0}, "in_flight must be at least 1"),
        ("sign:majority_vote=true", {}, "counts one vote per rank"),
    ],
)
def test_refusals(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ddp.hook(spec, **options)
