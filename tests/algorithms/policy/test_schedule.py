"""Which codec is used at which step."""

from __future__ import annotations

from bagua_kernels.algorithms.policy.schedule import Encoding, schedule
from bagua_kernels.compression import from_spec
from tests.grids import grid

CODECS: Encoding = {0: "sign", 3: "absmax_int8", 9: "minmax_uint8"}


@grid(
    cover=1,
    encoding__warmup_steps__expected=[
        ("sign", 0, {0: "sign"}),
        ("sign", 4, {0: None, 4: "sign"}),
        (None, 4, {0: None, 4: None}),
        ({2: "sign"}, 0, {0: None, 2: "sign"}),
        ({0: "sign", 3: None}, 0, {0: "sign", 3: None}),
        (CODECS, 0, {0: "sign", 3: "absmax_int8", 9: "minmax_uint8"}),
        # Starts within the warm-up are postponed to its end, where the last of them counts; later ones stay.
        (CODECS, 2, {0: None, 2: "sign", 3: "absmax_int8", 9: "minmax_uint8"}),
        (CODECS, 5, {0: None, 5: "absmax_int8", 9: "minmax_uint8"}),
        (CODECS, 9, {0: None, 9: "minmax_uint8"}),
    ],
)
def test_codecs_by_step(encoding: Encoding, warmup_steps: int, expected: dict[int, str | None]) -> None:
    """Each is used from its step on, though not before the warm-up's end."""
    made = schedule(encoding, warmup_steps)
    codecs = {start: spec and from_spec(spec) for start, spec in expected.items()}
    assert dict(made.starts) == codecs
    assert made.last_start == max(codecs)
    for step in range(12):
        assert made.at(step) == codecs[max(start for start in codecs if start <= step)]
