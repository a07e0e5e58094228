"""What tests of AutoTune share: a model, measurements that lead to one choice or the other, and a way to force a choice."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms import AutoTune
from bagua_kernels.algorithms.choosing.facts import Facts
from tests.algorithms.ranks import fill

SIGN, PLAIN, TOPK, LOW_RANK = (
    "SignSGD, 10 MiB",
    "GradientAllReduce, 10 MiB",
    "TopK 1 %, 10 MiB",
    "PowerSGD 4, 0.0056 MiB",
)
CODECS = {
    "minmax_uint8": 1e-9,
    "absmax_int8": 1e-9,
    "absmax_int4": 1e-9,
    "sign": 1e-9,
    "topk": 1e-9,
    "cast": 1e-9,
    "": 1e-9,
}
SLOW = Facts(step=10.0, waited=9.9, exchange=9.95, sent=4e3, latency=1e-4, codecs=CODECS, pass_over=1e-10)
FAST = Facts(step=0.1, waited=0.0, exchange=1e-5, sent=4e3, latency=0.0, codecs=CODECS | {"": 1e-3, "sign": 1e-3, "topk": 1e-3,
             "minmax_uint8": 1e-3, "absmax_int8": 1e-3, "absmax_int4": 1e-3}, pass_over=1e-3)  # fmt: skip


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def force(algorithm: AutoTune, label: str) -> None:
    """Makes a candidate the choice."""
    algorithm.search.current, algorithm.search.state = label, "chosen"
    algorithm.chooser.follow()


class Wide(torch.nn.Module):
    """Matrices that are large enough for all candidates to compress them, a bias, and one that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 96)
        self.second = torch.nn.Linear(96, 8, bias=False)
        self.other = torch.nn.Linear(7, 80, bias=False)
        fill(self, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.second(torch.tanh(self.first(x))), self.other(x)], 1)
