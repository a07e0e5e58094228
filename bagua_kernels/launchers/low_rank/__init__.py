"""The passes of PowerSGD over matrices and their thin factors, compiled for CPUs; see `passes.Passes`.

Backends have the same functions as elsewhere, but there is one: on a GPU, and with NumPy, PowerSGD uses tensor operations.
"""

from __future__ import annotations

import torch

from bagua_kernels.jit.op import Op, compiles_for_cpu

OP = Op(__name__, only="numba_cpu")

# What the table holds of a matrix: its lengths, and where its parts are in memory. TURNED has room for a right factor by columns.
FIELDS = (
    *("ROWS", "COLUMNS", "RANK", "TOTAL", "BEFORE", "BEFORE_LEFT", "BEFORE_RIGHT"),
    *("LEFT", "RIGHT", "KEPT", "DRAWN", "TURNED", "KEPT_LEFT", "GIVEN"),
)
ROWS, COLUMNS, RANK, TOTAL, *_, GIVEN = range(len(FIELDS))
# Which averaged factors a step leaves to later ones.
KEEP_NOTHING, KEEP_RIGHT, KEEP_LEFT = range(3)
IN_REGISTERS = (1, 2, 4)  # ranks that are compiled each by itself


def compiled_for(tensor: torch.Tensor) -> bool:
    """True if these passes can read and write a tensor, and are compiled here."""
    return suits(tensor) and compiles_for_cpu()


def suits(tensor: torch.Tensor) -> bool:
    """True if these passes can read and write a tensor: float32 on the CPU, whose memory holds its numbers."""
    plain = tensor.layout == torch.strided and not (tensor.is_neg() or tensor._is_zerotensor())
    return plain and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def orthonormalize(p: torch.Tensor) -> None:
    """Orthonormalises the columns of each matrix of a stack in place, in the order that `docs/powersgd.md` fixes.

    Args:
        p: shape (matrices, rows, columns), contiguous float32 on the CPU.
    """
    OP.backend(p.device).orthonormalize(p)
