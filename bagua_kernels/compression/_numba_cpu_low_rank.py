"""The passes of PowerSGD over whole matrices, and the work on its right factors, on the CPU.

As tensor operations the former are ten passes for rank 1 and more for each further column, and memory decides how long that
takes; the latter are many operations on few numbers. Here each is one compiled call for all matrices of a state, which finds
them by a table. What all ranks compute alike has the bits of `docs/powersgd.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from bagua_kernels.compression._numba_cpu_low_rank_rows import AHEAD, row_rules
from bagua_kernels.compression._numba_cpu_orthonormal import power_of_two
from bagua_kernels.jit._numba_cpu import compile_template, run_parallel
from bagua_kernels.jit._numba_cpu_intrinsics import POINTER, borrowed, keep, store_fence
from bagua_kernels.jit._numba_cpu_vectors import nothing, total_of

# What the table tells of a matrix: its lengths, and where its parts are in memory. TURNED has room for a right factor by columns.
_FIELDS = (
    *("ROWS", "COLUMNS", "RANK", "TOTAL", "BEFORE", "BEFORE_LEFT", "BEFORE_RIGHT"),
    *("LEFT", "RIGHT", "KEPT", "DRAWN", "TURNED", "KEPT_LEFT", "GIVEN"),
)
ROWS, COLUMNS, RANK, TOTAL, *_, GIVEN = range(len(_FIELDS))
# Which averaged factors a step leaves to later ones.
KEEP_NOTHING, KEEP_RIGHT, KEEP_LEFT = range(3)
_TASK = 1 << 15  # elements that a thread takes at a time
_LINE = 64  # bytes of a cache line
_IN_REGISTERS = (1, 2, 4)  # ranks that are compiled each by itself
_WIDTH = 1 << 12  # columns of a right factor that a thread sums at a time, at most


def project_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    total, before = matrix(place[TOTAL], rows, columns), matrix(place[BEFORE], rows, columns)
    gradient = matrix(place[GIVEN], rows, columns)
    left, before_left = matrix(place[LEFT], rows, rank), matrix(place[BEFORE_LEFT], rows, rank)
    right, before_right = matrix(place[TURNED], rank, columns), matrix(place[BEFORE_RIGHT], rank, columns)
    streamed = place[TOTAL] % LINE == 0 and 4 * columns % LINE == 0
    spoilt = nothing()
    for i in range(begin, end):
        spoilt = project_row(
            total[i], before[i], before_left[i], before_right, gradient[i], right, left[i], streamed, spoilt
        )
    if streamed:
        store_fence()
    return total_of(spoilt) == 0


def over_tasks(table, places, tasks, small):
    """Takes pieces of matrices through `work`.

    Args:
        table: int64, a row for each matrix.
        places: rows of the table that are meant.
        tasks: a row of the table, and from where to where along that matrix, for each piece of the work.
        small: set to whether all that `work` made is below 2^127 in magnitude, for each row of the table.
    """
    for at in range(places.size):
        small[places[at]] = True
    for task in numba.prange(tasks.shape[0]):
        place = table[tasks[task, 0]]
        if not work(place[RANK], place, tasks[task, 1], tasks[task, 2]):
            small[tasks[task, 0]] = False


def over_places(table, places):
    """Takes matrices through `work`."""
    for at in range(places.size):
        work(table[places[at]])


def choose(rank, *arguments):
    if rank == HERE:
        return here(*arguments)
    return elsewhere(rank, *arguments)


def take_any(rank, *arguments):
    return here(*arguments)


def choose_right(place):
    """Writes the right factor that is used next, by columns."""
    columns, rank = place[COLUMNS], place[RANK]
    kept, drawn = matrix(place[KEPT], columns, rank), matrix(place[DRAWN], columns, rank)
    turned = matrix(place[TURNED], rank, columns)
    for k in range(rank):
        # A column that became zero would stay zero whatever gradients come.
        zero = True
        for j in range(columns):
            zero &= kept[j, k] == 0
        for j in range(columns):
            turned[k, j] = drawn[j, k] if zero else kept[j, k]


def gather_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    total, left = matrix(place[TOTAL], rows, columns), matrix(place[LEFT], rows, rank)
    right = matrix(place[RIGHT], columns, rank)
    own = np.zeros((rank, end - begin), np.float32)
    sums = borrowed(own)
    for i in range(0, rows - 3, 4):
        gather_four(total[i : i + 4], begin, left[i : i + 4], sums)
    for i in range(rows // 4 * 4, rows):
        gather_one(total[i], begin, left[i], sums)
    for j in range(begin, end):
        for k in range(rank):
            right[j, k] = sums[k, j - begin]
    keep(own)
    return True


def project_and_gather_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    total, before = matrix(place[TOTAL], rows, columns), matrix(place[BEFORE], rows, columns)
    gradient = matrix(place[GIVEN], rows, columns)
    left, before_left = matrix(place[LEFT], rows, rank), matrix(place[BEFORE_LEFT], rows, rank)
    right, before_right = matrix(place[RIGHT], columns, rank), matrix(place[BEFORE_RIGHT], rank, columns)
    streamed = (place[TOTAL] + 4 * begin) % LINE == 0 and 4 * columns % LINE == 0 and 4 * (end - begin) % LINE == 0
    # What follows in memory is not this task's, unless it has all columns.
    reach = AHEAD if end - begin == columns else columns * max(1, AHEAD // (end - begin))
    own = np.zeros((rank, end - begin), np.float32)
    sums = borrowed(own)
    spoilt = nothing()
    for i in range(rows):
        made, old, new = total[i, begin:end], before[i, begin:end], gradient[i, begin:end]
        spoilt = renew_and_gather_row(
            made, old, before_left[i], before_right, new, left[i], sums, begin, reach, streamed, spoilt
        )
    if streamed:
        store_fence()
    for j in range(begin, end):
        for k in range(rank):
            right[j, k] = sums[k, j - begin]
    keep(own)
    return total_of(spoilt) == 0


def approximate_some(place, begin, end):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    left, right = matrix(place[LEFT], rows, rank), matrix(place[TURNED], rank, columns)
    out = matrix(place[GIVEN], rows, columns)
    # What is not read again soon need not displace what is, nor be read before it is written.
    streamed = place[GIVEN] % LINE == 0 and 4 * columns % LINE == 0
    spoilt = nothing()
    for i in range(begin, end):
        spoilt = approximate_row(left[i], right, out[i], streamed, spoilt)
    if streamed:
        store_fence()
    return total_of(spoilt) == 0


def keep_all(table, places, small, kept):
    """Keeps the factors of the matrices that are small, and of those that are finite what `kept` says for later steps."""
    for at in range(places.size):
        if small[places[at]]:
            keep_factors(table[places[at]])
        if kept != KEEP_NOTHING:
            keep_finite(table[places[at]], kept == KEEP_LEFT)


def turn_right(place):
    columns, rank = place[COLUMNS], place[RANK]
    right, turned = matrix(place[RIGHT], columns, rank), matrix(place[TURNED], rank, columns)
    for k in range(rank):
        for j in range(columns):
            turned[k, j] = right[j, k]


def keep_factors(place):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    matrix(place[BEFORE_LEFT], rows, rank)[:] = matrix(place[LEFT], rows, rank)
    matrix(place[BEFORE_RIGHT], rank, columns)[:] = matrix(place[TURNED], rank, columns)


def keep_finite(place, only_left):
    rows, columns, rank = place[ROWS], place[COLUMNS], place[RANK]
    left, right = matrix(place[LEFT], rows, rank), matrix(place[TURNED], rank, columns)
    spoilt = np.float32(0)
    for i in range(rows):
        for k in range(rank):
            spoilt += left[i, k] * np.float32(0)
    for k in range(rank):
        for j in range(columns):
            spoilt += right[k, j] * np.float32(0)
    if spoilt != 0:
        return
    if only_left:
        matrix(place[KEPT_LEFT], rows, rank)[:] = left
        return
    kept, unit = matrix(place[KEPT], columns, rank), np.empty(1, np.float32)
    for k in range(rank):
        # Only the direction of a column counts; its length, that of a gradient, could overflow the next product.
        power_of_two(right[k], unit)
        for j in range(columns):
            kept[j, k] = right[k, j] / unit[0]


def matrix(address, rows, columns):
    return numba.carray(pointer(address), (rows, columns))


class Kernels(NamedTuple):
    """The compiled passes."""

    choose: Any
    turn: Any
    project: Any
    gather: Any
    project_and_gather: Any
    approximate: Any
    keep: Any


def any_rank(flavours: Sequence[int], of_flavour: Callable[[int], Any]) -> Any:
    """Compiles a function whose first argument, a rank, chooses among those for some flavours, see `Passes`."""
    *others, last = flavours
    found = compile_template(take_any, {"here": of_flavour(last)})
    for rank in others:
        found = compile_template(choose, {"HERE": rank, "here": of_flavour(rank), "elsewhere": found})
    return found


@functools.cache
def parts() -> dict[str, Any]:
    """The names that passes use, whatever the rank."""
    fields = {name: number for number, name in enumerate(_FIELDS)}
    memory = {"borrowed": borrowed, "keep": keep, "store_fence": store_fence}
    sizes = {"LINE": _LINE, "AHEAD": AHEAD, "KEEP_NOTHING": KEEP_NOTHING, "KEEP_LEFT": KEEP_LEFT}
    names: dict[str, Any] = {"np": np, "nothing": nothing, "total_of": total_of, **sizes, **fields, **memory}
    names["matrix"] = compile_template(matrix, {"numba": numba, "pointer": POINTER[torch.float32]})
    names["power_of_two"] = compile_template(power_of_two, {"np": np})
    for rule in (choose_right, turn_right, keep_factors, keep_finite):
        names[rule.__name__] = compile_template(rule, names)
    return names


@functools.cache
def kernels(flavours: tuple[int, ...]) -> Kernels:
    """Compiles the passes for some flavours."""
    names = parts()

    def over(work: Any) -> Any:
        chosen = any_rank(flavours, lambda rank: compile_template(work, names | row_rules(rank)))
        return compile_template(over_tasks, {"numba": numba, "RANK": RANK, "work": chosen}, parallel=True)

    return Kernels(
        choose=compile_template(over_places, {"work": names["choose_right"]}),
        turn=compile_template(over_places, {"work": names["turn_right"]}),
        project=over(project_some),
        gather=over(gather_some),
        project_and_gather=over(project_and_gather_some),
        approximate=over(approximate_some),
        # Nobody is to look at a state of which half is kept.
        keep=compile_template(keep_all, names, nogil=False),
    )


def _dense(gradients: Sequence[Sequence[torch.Tensor]], chosen: Sequence[int]) -> list[torch.Tensor]:
    """The gradients of some stacks, each in one piece of memory."""
    return [gradient.contiguous() for place in chosen for gradient in gradients[place]]


def _dealt(places: Any, lengths: Any, threads: int) -> Any:
    """Tasks of columns, in an order in which threads have as much to do."""
    sizes = np.clip(-(-lengths[:, COLUMNS] // threads // 64) * 64, 64, _WIDTH)
    tasks = pieces(places, lengths[:, COLUMNS], sizes)
    # Each thread takes as many tasks that follow one another, so it is dealt some of each size.
    rows = dict(zip(places.tolist(), lengths[:, ROWS].tolist(), strict=True))
    costs = np.array([rows[place] * (end - begin) for place, begin, end in tasks.tolist()])
    dealt = np.argsort(-costs, kind="stable")
    return tasks[np.concatenate([dealt[first::threads] for first in range(threads)])]


def pieces(places: Any, lengths: Any, sizes: Any) -> Any:
    """Cuts matrices into tasks, shape (tasks, 3): which matrix, and from where to where along one of its lengths."""
    cuts = [
        (place, begin, min(begin + size, length))
        for place, length, size in zip(places, lengths, sizes, strict=True)
        for begin in range(0, length, size)
    ]
    return np.array(cuts, np.int64).reshape(-1, 3)


# The tensors that an address in the table is of, all but what is given: each of shape (matrices, length, length).
Stack = Sequence[torch.Tensor]


class Work(NamedTuple):
    """A pass that has been run: its table, the rows that were meant, and which matrices were small, by row and by stack."""

    table: Any
    places: Any
    small: Any
    by_stack: list[list[bool]]


class Passes:
    """The passes over all matrices of a state, which lie in stacks of contiguous float32 on the CPU.

    Tensors that are given are a list for each stack, of float32 on the CPU with any strides.

    Attributes:
        flavours: the ranks that there are, of those whose vectors registers can hold; 0 stands for all others, and is the last.
    """

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Notes the lengths of stacks."""
        counts = [len(s[0]) for s in stacks]
        ends = np.cumsum(counts)
        self._spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self._stack_of = np.repeat(np.arange(len(stacks)), counts)
        owners = [(s, i) for s in stacks for i in range(len(s[0]))]
        self._lengths = np.array([[*s[0].shape[1:], s[2].shape[2]] for s, _ in owners], np.int64)
        self._offsets = np.array([[4 * i * part[0].numel() for part in s] for s, i in owners], np.int64)
        self._tasks: dict[tuple[int, ...], Any] = {}
        ranks = {rank if rank in _IN_REGISTERS else 0 for rank in self._lengths[:, RANK].tolist()}
        self.flavours = tuple(sorted(ranks, reverse=True))

    @property
    def kernels(self) -> Kernels:
        """What is run."""
        return kernels(self.flavours)

    def table(self, stacks: Sequence[Stack]) -> Any:
        """The table without tensors that are given. Made anew each time, since a state may be copied, and swaps memory."""
        starts = np.array([[part.data_ptr() for part in s] for s in stacks], np.int64)
        table = np.empty((len(self._offsets), GIVEN + 1), np.int64)
        table[:, :TOTAL] = self._lengths
        table[:, TOTAL:GIVEN] = self._offsets + starts[self._stack_of]
        return table

    def _run(
        self,
        kernel: Any,
        stacks: Sequence[Stack],
        chosen: Sequence[int],
        given: Sequence[torch.Tensor],
        prepare: Any = None,
        by_columns: bool = False,
    ) -> Work:
        places = self.rows_of(chosen)
        table, small = self.table(stacks), np.zeros(len(self._offsets), np.bool_)
        if given:
            table[places, GIVEN] = [t.data_ptr() for t in given]
        if prepare is not None:
            prepare(table, places)
        run_parallel(kernel, table, places, self.tasks(places, by_columns), small)
        return Work(table, places, small, self.by_stack(chosen, small))

    def rows_of(self, chosen: Sequence[int]) -> Any:
        """The rows of the table that stacks have."""
        return np.array([row for k in chosen for row in range(self._spans[k].start, self._spans[k].stop)], np.int64)

    def by_stack(self, chosen: Sequence[int], small: Any) -> list[list[bool]]:
        return [small[self._spans[place]].tolist() for place in chosen]

    def tasks(self, places: Any, by_columns: bool = False) -> Any:
        """The tasks of matrices that a pass takes by rows, or by columns."""
        threads = torch.get_num_threads() if by_columns else 0
        key = (threads, *places.tolist())
        if key not in self._tasks:
            lengths = self._lengths[places]
            if by_columns:
                self._tasks[key] = _dealt(places, lengths, threads)
            else:
                self._tasks[key] = pieces(places, lengths[:, ROWS], np.maximum(1, _TASK // lengths[:, COLUMNS]))
        return self._tasks[key]

    def project(
        self, stacks: Sequence[Stack], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """Makes M of some stacks, and P of M and Q as it was kept; returns which of their M are below 2^127 in magnitude."""
        return self._run(self.kernels.project, stacks, chosen, _dense(gradients, chosen), self.kernels.choose).by_stack

    def project_onto(
        self, stacks: Sequence[Stack], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """As `project`, of Q as it is."""
        return self._run(self.kernels.project, stacks, chosen, _dense(gradients, chosen), self.kernels.turn).by_stack

    def gather(self, stacks: Sequence[Stack]) -> None:
        """Makes Q = M^T P of all stacks."""
        self._run(self.kernels.gather, stacks, range(len(stacks)), [], by_columns=True)

    def project_and_gather(
        self, stacks: Sequence[Stack], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """As `project`, but makes Q of M and P."""
        dense = _dense(gradients, chosen)
        return self._run(self.kernels.project_and_gather, stacks, chosen, dense, by_columns=True).by_stack

    def approximate(
        self, stacks: Sequence[Stack], chosen: Sequence[int], out: Sequence[Sequence[torch.Tensor]], kept: int
    ) -> list[list[bool]]:
        """Writes P Q^T of some stacks, and then keeps what the next step needs, `KEEP_RIGHT` or its like of the factors.

        Returns:
            Which of their P Q^T are below 2^127 in magnitude; `before_left` and `before_right` of these are the factors now.
        """
        tensors = [tensor for place in chosen for tensor in out[place]]
        dense = [t if t.is_contiguous() else t.new_empty(t.shape) for t in tensors]
        done = self._run(self.kernels.approximate, stacks, chosen, dense, self.kernels.turn)
        for tensor, values in zip(tensors, dense, strict=True):
            if values is not tensor:
                tensor.copy_(values)
        self.kernels.keep(done.table, done.places, done.small, kept)
        return done.by_stack


def suits(tensor: torch.Tensor) -> bool:
    """Whether these passes can take a tensor: float32 on the CPU, whose memory holds its numbers."""
    plain = tensor.layout == torch.strided and not (tensor.is_neg() or tensor._is_zerotensor())
    return plain and tensor.device.type == "cpu" and tensor.dtype == torch.float32
