"""The reader of PTX sees what it must, and nothing else."""

from __future__ import annotations

import pytest

from tests.ahead_of_time.ptx import opcodes, violations, widths

CLEAN = """
.version 8.4
.target sm_90a
.visible .entry f(.param .f64 f_param_0) // add.f64
{
\t.reg .f32 \t%f<65>;
\t.reg .f64 \t%fd<2>;
\t/* fma.rn.f32 */
$L__BB0_1:
\tld.shared.f32 \t%f64, [%rd319];
\tmul.rn.f32 \t%f65, %f64, %f5;
\tmad.lo.s32 \t%r1, %r2, %r3, %r4;
\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\t{ st.global.b8 [%rd1], %rs1; }
\t@!%p2 bra \t$L__BB0_1;
\tret;
}
"""


def test_clean_text() -> None:
    assert violations(CLEAN, sums_are_marked=True) == []
    assert widths(CLEAN, "ld.global") == {128}
    assert widths(CLEAN, "st.global") == {8}
    assert {"ld.shared.f32", "mul.rn.f32", "bra", "ret", ".target"} <= set(opcodes(CLEAN))


@pytest.mark.parametrize(
    "line",
    [
        "fma.rn.f32 %f1, %f2, %f3, %f4;",
        "mul.f32 %f1, %f2, %f3;",
        "add.f32 %f1, %f2, %f3;",
        "@%p1 add.f64 %fd1, %fd2, %fd3;",
        "cvt.f64.f32 %fd1, %f1;",
        "div.full.f32 %f1, %f2, %f3;",
        "sqrt.approx.ftz.f32 %f1, %f2;",
        "add.rn.bf16 %rs1, %rs2, %rs3;",
        "st.local.b32 [%rd1], %r1;",
        ".local .align 4 .b8 __local_depot0[16];",
        "mov.b32 %r1, %r2; fma.rn.f32 %f1, %f2, %f3, %f4;",
    ],
)
def test_violation_is_seen(line: str) -> None:
    assert violations(CLEAN.replace("\tret;", f"\t{line}\n\tret;"), sums_are_marked=True)
    assert violations(CLEAN.replace("\tret;", "\tadd.f32 %f1, %f2, %f3;\n\tret;"), sums_are_marked=False) == []
