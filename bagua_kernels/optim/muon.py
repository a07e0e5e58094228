"""Muon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr
from torch.optim.optimizer import ParamsT

from bagua_kernels.launchers import multitensor
from bagua_kernels.launchers.multitensor import FACTOR, GRADIENT, SCALARS, Table, Variant
from bagua_kernels.optim.orthogonal import orthogonal
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.trust import assign
from bagua_kernels.optim.step.update import Group, Update, scalar_names
from bagua_kernels.rules.optimizers import MUON_DIRECTION, MUON_STEP
from bagua_kernels.upload import uploaded


class Muon(Fused, torch.optim.Muon):
    """`torch.optim.Muon` with one pass for all momenta and one for all parameters.

    Between them each matrix is orthogonalised by `orthogonal`, PyTorch's Newton-Schulz iteration, which is where the time goes.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        extras: Extras | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            extras=extras,
        )

    _by_address = False
    _whole = "whole matrices"
    _rule = Update(MUON_STEP, ("momentum_buffer",))

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        # Of each matrix, in `_launch`: the factor of the parameter, and the rate that the matrix's shape adjusts.
        return {"decay": 1.0, "lr": 0.0}

    def _launch(self, launch: Launch, rows: Any, keys: Any) -> None:
        variant, table = launch.variant, launch.table
        directions = [torch.empty_like(g) for g in table.columns[GRADIENT]]
        dtypes = (*variant.dtypes[:3], variant.dtypes[GRADIENT])
        first: Any = np.zeros((len(table), SCALARS + 3), launch.rows.dtype)
        names = scalar_names(MUON_DIRECTION)
        momentum, rate, nesterov = (SCALARS + names.index(name) for name in ("momentum", "rate", "nesterov"))
        for group, begin, end in launch.spans:
            first[begin:end, momentum] = group["momentum"]
            first[begin:end, rate] = 1 - group["momentum"]
            first[begin:end, nesterov] = group["nesterov"]
        if isinstance(rows, Tensor):
            first = uploaded(first, rows.device)
        first[:, FACTOR] = rows[:, FACTOR]
        multitensor.launch(Variant(MUON_DIRECTION, dtypes, 3), Table([*table.columns[:3], directions]), first)
        decays, rates = np.ones(len(table)), np.zeros(len(table))
        for group, begin, end in launch.spans:
            lr: Any = group["lr"]
            if isinstance(lr, Tensor):
                # PyTorch multiplies a tensor in its own dtype, which rounds where Python's numbers do not.
                # waits: only if the learning rate is a tensor on a GPU.
                lr = lr.detach().cpu().reshape(())
            decays[begin:end] = float(1 - lr * group["weight_decay"])
            for i in range(begin, end):
                options = group["ns_coefficients"], group["ns_steps"], group["eps"]
                # The products round as PyTorch's only if the matrix lies in memory as its gradient does.
                direction = torch.empty_like(launch.gradient(i)).copy_(directions[i])
                like = table.columns[0][i]
                dtype = like.dtype if variant.double else torch.bfloat16
                directions[i] = torch.empty_like(like, dtype=dtype).copy_(orthogonal(direction, *options))
                rates[i] = float(_adjust_lr(lr, group["adjust_lr_fn"], like.shape))
        assign(rows, launch.column("decay"), decays)
        assign(rows, launch.column("lr"), rates)
        rows[:, FACTOR] = 1.0
        columns = [table.columns[0], directions, *table.columns[2:]]
        step = replace(variant, dtypes=(variant.dtypes[0], directions[0].dtype, *variant.dtypes[2:]))
        multitensor.launch(step, Table(columns), rows, keys)
