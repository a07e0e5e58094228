"""Which matrices PowerSGD's compiled passes run over, and where these are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bagua_kernels.launchers.low_rank import COLUMNS, GIVEN, IN_REGISTERS, OP, RANK, ROWS, TOTAL
from bagua_kernels.launchers.multitensor import TensorUpdate

_CPU = torch.device("cpu")
_NO_KEYS, _NO_SUMS = np.zeros((0, 2), np.uint32), np.zeros((0, 0))

_TASK = 1 << 15  # elements that a thread takes at a time
_WIDTH = 1 << 12  # columns of a right factor that a thread sums at a time, at most


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
Memory = Sequence[torch.Tensor]


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

    def __init__(self, stacks: Sequence[Memory]) -> None:
        """Stores the lengths of stacks, and loads the compiler, so that no step has to."""
        OP.backend(_CPU)
        counts = [len(s[0]) for s in stacks]
        ends = np.cumsum(counts)
        self._spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self._stack_of = np.repeat(np.arange(len(stacks)), counts)
        owners = [(s, i) for s in stacks for i in range(len(s[0]))]
        self._lengths = np.array([[*s[0].shape[1:], s[2].shape[2]] for s, _ in owners], np.int64)
        self._offsets = np.array([[4 * i * part[0].numel() for part in s] for s, i in owners], np.int64)
        self._tasks: dict[tuple[int, ...], Any] = {}
        ranks = {rank if rank in IN_REGISTERS else 0 for rank in self._lengths[:, RANK].tolist()}
        self.flavours = tuple(sorted(ranks, reverse=True))

    @property
    def kernels(self) -> Any:
        """What is run."""
        return OP.backend(_CPU).kernels(self.flavours)

    def table(self, stacks: Sequence[Memory]) -> Any:
        """The table without tensors that are given. Made anew each time, since a state may be copied, and swaps memory."""
        starts = np.array([[part.data_ptr() for part in s] for s in stacks], np.int64)
        table = np.empty((len(self._offsets), GIVEN + 1), np.int64)
        table[:, :TOTAL] = self._lengths
        table[:, TOTAL:GIVEN] = self._offsets + starts[self._stack_of]
        return table

    def _run(
        self,
        kernel: Any,
        stacks: Sequence[Memory],
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
        small[places] = True
        self._launch(kernel, (table, self.tasks(places, by_columns), small), places)
        return Work(table, places, small, self.by_stack(chosen, small))

    def _launch(self, kernel: Any, arguments: tuple[Any, ...], places: Any) -> None:
        lengths = self._lengths[places]
        elements = int((lengths[:, ROWS] * lengths[:, COLUMNS]).sum())
        OP.backend(_CPU).run_all(kernel, arguments, len(arguments[1]), elements)

    def rows_of(self, chosen: Sequence[int]) -> Any:
        """The rows of the table that stacks have."""
        return np.array([row for k in chosen for row in range(self._spans[k].start, self._spans[k].stop)], np.int64)

    def by_stack(self, chosen: Sequence[int], small: Any) -> list[list[bool]]:
        """The values of rows of the table, for each stack."""
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
        self, stacks: Sequence[Memory], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """Makes M of some stacks, and P of M and Q as it was kept; returns which of their M are below 2^127 in magnitude."""
        return self._run(self.kernels.project, stacks, chosen, _dense(gradients, chosen), self.kernels.choose).by_stack

    def project_onto(
        self, stacks: Sequence[Memory], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """As `project`, of Q as it is."""
        return self._run(self.kernels.project, stacks, chosen, _dense(gradients, chosen), self.kernels.turn).by_stack

    def gather(self, stacks: Sequence[Memory]) -> None:
        """Makes Q = M^T P of all stacks."""
        self._run(self.kernels.gather, stacks, range(len(stacks)), [], by_columns=True)

    def project_and_gather(
        self, stacks: Sequence[Memory], chosen: Sequence[int], gradients: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[bool]]:
        """As `project`, but makes Q of M and P."""
        dense = _dense(gradients, chosen)
        return self._run(self.kernels.project_and_gather, stacks, chosen, dense, by_columns=True).by_stack

    def approximate(
        self, stacks: Sequence[Memory], chosen: Sequence[int], out: Sequence[Sequence[torch.Tensor]], kept: int
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

    def update(
        self, stacks: Sequence[Memory], chosen: Sequence[int], updates: Sequence[Sequence[TensorUpdate]], kept: int
    ) -> list[list[bool]]:
        """Updates tensors by P Q^T of all stacks, and then keeps what the next step needs of some.

        Args:
            stacks: all of them.
            chosen: numbers of those to keep from.
            updates: for each stack those of its matrices.
            kept: see `approximate`.

        Returns:
            As `approximate`, of the stacks that are chosen.
        """
        flat = [update for of_stack in updates for update in of_stack]
        table, small = self.table(stacks), np.ones(len(flat), np.bool_)
        tensors = np.array([update.tensor for update in flat], np.int64)
        self.kernels.turn(table, np.arange(len(flat)))
        for alike in {id(update.table): update for update in flat}.values():
            rows = np.array([row for row, update in enumerate(flat) if update.table is alike.table], np.int64)
            theirs = (alike.table.addresses, alike.rows, tensors, _NO_KEYS, _NO_SUMS)
            kernel = OP.backend(_CPU).update_kernel(alike.variant, self.flavours)
            self._launch(kernel, (table, self.tasks(rows), small, *theirs), rows)
        self.kernels.keep(table, self.rows_of(chosen), small, kept)
        return self.by_stack(chosen, small)
