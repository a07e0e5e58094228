"""Buckets: gradients that are brought there together end where single ones do."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_kernels.bucket import Bucket
from tests.grids import grid

SHAPES = [(7, 5), (256,), (3, 4, 2), (), (0, 3), (1000,), (5, 5), (6,)]


def gradients(kind: str, dtype: torch.dtype) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    made: list[torch.Tensor | None] = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    matrix, vector = made[0], made[1]
    assert matrix is not None
    assert vector is not None
    match kind:
        case "missing":
            made[1] = made[4] = None
        case "strided":
            made[0] = matrix.t().contiguous().t()
            made[5] = torch.randn(2000, generator=generator).to(dtype)[::2]
        case "negated":
            made[1] = torch._neg_view(vector)
        case "other dtype":
            made[0], made[1] = matrix.double(), vector.double()
    return made


@grid(
    kind=["plain", "missing", "strided", "negated", "other dtype"],
    dtype=[torch.float32, torch.bfloat16],
    weight=[1.0, 0.3],
)
def test_tensors_together_end_as_one_by_one(kind: str, dtype: torch.dtype, weight: float) -> None:
    several = gradients(kind, dtype)
    exact = [len(shape) < 2 for shape in SHAPES]
    templates = [torch.empty(shape, dtype=dtype) for shape in SHAPES]
    one, other = (Bucket(templates, align=32, exact=exact, flags=3) for _ in range(2))
    for bucket in (one, other):
        bucket.whole.fill_(torch.nan)
        bucket.flags.zero_()
    for slot, tensor in enumerate(several):
        one.fill(slot, tensor)
        if weight != 1.0:
            one.views[slot].mul_(weight)
    other.fill_together(dict(enumerate(several)), weight)
    assert torch.equal(one.whole, other.whole)
    assert not one.whole.isnan().any()


def test_a_view_stays_as_it_is() -> None:
    bucket = Bucket([torch.empty(5), torch.empty(40)], align=32)
    bucket.whole.fill_(torch.nan)
    bucket.fill_together({0: torch.ones(5), 1: torch.full((40,), 2.0)})
    before = bucket.whole.clone()
    bucket.fill_together({0: bucket.views[0], 1: bucket.views[1]})
    assert torch.equal(bucket.whole, before)


class Launches(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_the_number_of_launches_does_not_grow_with_the_tensors() -> None:
    counts = []
    for number in (3, 300):
        tensors = [torch.ones(5) for _ in range(number)]
        bucket = Bucket(tensors, align=32)
        with Launches() as launches:
            bucket.fill_together(dict(enumerate(tensors)))
        counts.append([name for name in launches.names if name not in ("detach", "alias")])
    assert counts[0] == counts[1] == ["_foreach_copy_", "_foreach_zero_"]
