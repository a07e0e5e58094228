"""Metrics of outputs: functions of outputs and labels, of which a larger value is better."""

from __future__ import annotations

import torch

IGNORED = -100  # label that neither a loss nor a metric counts, as in `F.cross_entropy`


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers.

    Args:
        outputs: logits, shape (examples, classes, ...).
        labels: classes, shape (examples, ...); `IGNORED` ones do not count.
    """
    right = outputs.argmax(1) == labels
    counted = labels != IGNORED
    return (right if bool(counted.all()) else right[counted]).float().mean().item()


def auc(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: the chance that a positive example has a larger output than a negative one.

    Equal outputs count as one half.

    Args:
        outputs: of each example, shape (examples,).
        labels: 0 or 1, shape (examples,).

    Raises:
        ValueError: all labels are alike.
    """
    values, places, counts = outputs.unique(return_inverse=True, return_counts=True)
    # The mean rank of equal outputs, from 1.
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()
    positive = labels > 0.5
    some, others = int(positive.sum()), int((~positive).sum())
    if not some or not others:
        raise ValueError(f"expected labels of both kinds, got {some} positive and {others} negative ones")
    total = ranks[places[positive]].sum().item()
    return (total - some * (some + 1) / 2) / (some * others)
