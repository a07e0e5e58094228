"""Muon for the hidden matrices of a module, and AdamW for all its other parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import torch

from bagua_kernels.optim.adam import AdamW
from bagua_kernels.optim.chained import ChainedOptimizer
from bagua_kernels.optim.muon import Muon


def muon_with_adamw(
    module: torch.nn.Module,
    *,
    lr: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    adamw_lr: float = 1e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_weight_decay: float = 0.1,
    adamw: Iterable[str] = (),
) -> ChainedOptimizer:
    """Makes the optimizer that Muon's and MuLoCo's authors use (MuLoCo, Thérien et al., 2025, section 3).

    Muon trains matrices, embeddings and the last matrix left out: rows of these belong to words or classes. AdamW trains
    everything else.

    Args:
        module: whose trainable parameters are to be trained.
        lr: of Muon, for square matrices. It is multiplied by sqrt(max(1, rows / columns)).
        momentum: of Muon.
        weight_decay: of Muon.
        adamw_lr: of AdamW.
        adamw_betas: of AdamW.
        adamw_weight_decay: of AdamW.
        adamw: patterns, as in file names, of the names of further matrices that AdamW is to train.

    Raises:
        ValueError: no parameter is left for one of both.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    hidden = _hidden_matrices(module, trained, tuple(adamw))
    others = [p for name, p in trained.items() if name not in hidden]
    if not hidden or not others:
        raise ValueError(
            f"expected hidden matrices and other parameters, got {len(hidden)} matrices and {len(others)} others: "
            "use one optimizer"
        )
    return ChainedOptimizer(
        Muon([trained[name] for name in hidden], lr=lr, momentum=momentum, weight_decay=weight_decay),
        AdamW(others, lr=adamw_lr, betas=adamw_betas, weight_decay=adamw_weight_decay),
    )


def _hidden_matrices(
    module: torch.nn.Module, trained: dict[str, torch.nn.Parameter], patterns: tuple[str, ...]
) -> list[str]:
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = {part.weight for part in module.modules() if isinstance(part, tables)}
    matrices = [name for name, p in trained.items() if p.dim() == 2 and p not in embeddings]
    # A head that shares its matrix with an embedding is among these already.
    shared = any(
        parameter in embeddings
        for part in module.modules()
        if not isinstance(part, tables)
        for parameter in part.parameters(recurse=False)
    )
    hidden = matrices if shared else matrices[:-1]
    return [name for name in hidden if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
