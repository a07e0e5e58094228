"""Late flights, by tables of embeddings as in recommendation: tables are nearly all of the bytes, and a batch uses few rows.

Days occur in the training set and in the test set, so that the table of days learns the weather of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Columns, Data
from examples import flight_data

TEST_SHARE = 0.1
# Of the tables, in the order of `flight_data.COLUMNS`.
ROWS = (4037, 104, 16, 3, 365, 19, 312)
WIDTHS = (64, 16, 8, 8, 16, 8, 16)

loss = F.binary_cross_entropy_with_logits
metric = metrics.auc


def data() -> Data:
    """The flights of the example; a tenth, drawn at random, is for testing.

    `x` has the numbers of rows, int64 of shape (flights, tables), and dense values, float32 of shape (flights, dense).

    Raises:
        FileNotFoundError: the flights are not on this machine.
    """
    return divided(flight_data.load())


def divided(flights: flight_data.Flights) -> Data:
    """Divides flights into a training and a test set."""
    order = torch.randperm(len(flights.late), generator=torch.Generator().manual_seed(0))
    tests = round(TEST_SHARE * len(order))
    x, late = Columns((flights.numbers, flights.dense)), flights.late
    test, train = order[:tests], order[tests:]
    return Data(Columns(x[train]), late[train], Columns(x[test]), late[test])


class Tables(nn.Module):
    """A table for each column, whose rows are the inputs of a perceptron beside the dense values.

    Returns logits of being late, shape (batch,).
    """

    def __init__(self, rows: Sequence[int], widths: Sequence[int], hidden: int, sparse: bool) -> None:
        """Makes the layers.

        Args:
            rows: of each table.
            widths: of each table.
            hidden: width of the perceptron.
            sparse: True if the gradient of the first table, which is the largest, is sparse.
        """
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(count, width, sparse=sparse and not place)
            for place, (count, width) in enumerate(zip(rows, widths, strict=True))
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.perceptron = nn.Sequential(
            nn.Linear(sum(widths) + flight_data.DENSE, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, numbers: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found = [table(numbers[:, place]) for place, table in enumerate(self.tables)]
        logits: torch.Tensor = self.perceptron(torch.cat([*found, dense], dim=1)).squeeze(1)
        return logits


def network(rows: Sequence[int] = ROWS, hidden: int = 64, sparse: bool = True) -> nn.Module:
    """Makes `Tables`; by default 0.28 M parameters, 95 % in the tables and 91 % in the table of aircraft."""
    return Tables(rows, WIDTHS, hidden, sparse)
