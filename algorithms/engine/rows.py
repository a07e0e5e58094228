"""Sparse gradients of embeddings: ranks exchange the rows they touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bagua_kernels.comm import Communicator, Work
from bagua_kernels.quotient import divide_


class Rows:
    """The sparse gradient of one parameter, as a bucket of its own.

    Attributes:
        index: number in the order of exchanges.
        name: of the parameter.
        whole: an empty tensor on the parameter's device.
        gradient: this rank's, and after the exchange the mean, sparse and coalesced; None if there is none.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter, index: int) -> None:
        self.index = index
        self.name = name
        self.whole = parameter.detach().new_empty(0)
        self.gradient: torch.Tensor | None = None
        self._shape = parameter.shape

    def run(self, communicator: Communicator) -> Iterator[Work]:
        """Replaces the gradient by the mean over all ranks; yields each collective that it waits for.

        1. All-gather the numbers of rows.
        2. All-gather the rows' numbers and values, filled up to the longest.
        3. Add up the rows of one number, in the order of ranks, and divide by the number of ranks.
        """
        own = None if self.gradient is None else self.gradient.coalesce()
        width, device = self._shape[1:].numel(), self.whole.device
        # One more than the number of rows; 0 stands for no gradient at all.
        mine = torch.full((1,), 0 if own is None else 1 + own._nnz(), dtype=torch.int64, device=device)
        counts = mine.new_empty(communicator.size)
        yield communicator.all_gather(counts, mine)
        # waits: numbers of rows are the sizes of what is sent.
        told = counts.tolist()
        if max(told) == 0:
            self.gradient = None
            return
        longest = max(told) - 1
        numbers = torch.zeros(longest, dtype=torch.int64, device=device)
        values = self.whole.new_zeros(longest, width)
        if own is not None:
            numbers[: told[communicator.rank] - 1] = own.indices()[0]
            values[: told[communicator.rank] - 1] = own.values().view(-1, width)
        all_numbers = numbers.new_empty(communicator.size, longest)
        all_values = values.new_empty(communicator.size, longest, width)
        yield from [communicator.all_gather(all_numbers, numbers), communicator.all_gather(all_values, values)]
        used = [max(0, count - 1) for count in told]
        self.gradient = self._mean(all_numbers, all_values, used)

    def _mean(self, numbers: torch.Tensor, values: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        indices = torch.cat([row[:count] for row, count in zip(numbers, used, strict=True)])
        parts = torch.cat([row[:count] for row, count in zip(values, used, strict=True)])
        touched, places = torch.unique(indices, return_inverse=True)
        # In float32 and rank by rank, for the sum must not depend on how many threads a device adds with.
        total = torch.zeros(touched.numel(), parts.shape[1], dtype=torch.promote_types(parts.dtype, torch.float32),
                            device=parts.device)  # fmt: skip
        for place, part in zip(places.split(list(used)), parts.split(list(used)), strict=True):
            total[place] += part
        mean = divide_(total, len(used)).to(parts.dtype).view(-1, *self._shape[1:])
        return torch.sparse_coo_tensor(
            touched.unsqueeze(0), mean, self._shape, is_coalesced=True, check_invariants=False
        )
