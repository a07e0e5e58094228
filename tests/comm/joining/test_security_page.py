"""What docs/security.md says about the hello is what the code does."""

from __future__ import annotations

from pathlib import Path

from bagua_kernels import knobs
from bagua_kernels.comm.joining import gate, hello
from bagua_kernels.comm.joining.secret import Secret

PAGE = " ".join((Path(__file__).parents[3] / "docs" / "security.md").read_text().split())


def test_numbers_are_those_of_the_code() -> None:
    """Bytes and seconds before a stranger is known, their number, and the length of the secret."""
    assert f"at most {hello.OPENING} bytes of a stranger" in PAGE
    assert f"waits {gate._PATIENCE:g} s" in PAGE
    assert f"at most {gate._STRANGERS} strangers" in PAGE
    assert f"one secret of {Secret.NBYTES} bytes" in PAGE
    assert knobs.SECRET.parse("x" * 16) == "x" * 16
    assert "It needs 16 characters" in PAGE
