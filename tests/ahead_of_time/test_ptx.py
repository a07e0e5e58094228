"""The reader of PTX sees what it must, and nothing else."""

from __future__ import annotations

from tests.ahead_of_time.ptx import count, opcodes, violations, widths
from tests.grids import grid

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
    assert widths(CLEAN, "ld.global") == {128: 1}
    assert widths(CLEAN, "st.global") == {8: 1}
    assert {"ld.shared.f32", "mul.rn.f32", "bra", "ret", ".target"} <= set(opcodes(CLEAN))


@grid(
    cover=1,
    line=[
        "fma.rn.f32 %f1, %f2, %f3, %f4;",
        "mul.f32 %f1, %f2, %f3;",
        "add.f32 %f1, %f2, %f3;",
        "@%p1 add.f64 %fd1, %fd2, %fd3;",
        "cvt.f64.f32 %fd1, %f1;",
        "div.full.f32 %f1, %f2, %f3;",
        "sqrt.approx.ftz.f32 %f1, %f2;",
        "add.rn.bf16 %rs1, %rs2, %rs3;",
        "mul.f32x2 %rd1, %rd2, %rd3;",
        "st.local.b32 [%rd1], %r1;",
        ".local .align 4 .b8 __local_depot0[16];",
        "mov.b32 %r1, %r2; fma.rn.f32 %f1, %f2, %f3, %f4;",
    ],
)
def test_violation_is_seen(line: str) -> None:
    assert violations(CLEAN.replace("\tret;", f"\t{line}\n\tret;"), sums_are_marked=True)
    assert violations(CLEAN.replace("\tret;", "\tadd.f32 %f1, %f2, %f3;\n\tret;"), sums_are_marked=False) == []


def test_fused_products_are_counted() -> None:
    line = "\tfma.rn.f32 %f1, %f2, %f3, %f4;\n\tfma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;\n\tret;"
    text = CLEAN.replace("\tret;", line)
    assert count(text, "fma") == 3
    assert count(text, "fma", "f64") == 0
    assert violations(text, sums_are_marked=True, fused=3) == []
    for wrong in (0, 2, 4):
        assert violations(text, sums_are_marked=True, fused=wrong) == [f"fma: 3 instead of {wrong}"]


def test_sums_in_float64_are_allowed_where_there_are_sums() -> None:
    text = CLEAN.replace("\tret;", "\tcvt.f64.f32 %fd1, %f1;\n\tadd.rn.f64 %fd1, %fd1, %fd2;\n\tret;")
    assert violations(text, sums_are_marked=True, summing=True) == []
    assert len(violations(text, sums_are_marked=True)) == 2
    product = CLEAN.replace("\tret;", "\tmul.rn.f64 %fd1, %fd2, %fd3;\n\tret;")
    assert violations(product, sums_are_marked=True, summing=True)
