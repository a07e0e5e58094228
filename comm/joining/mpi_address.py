"""Where rank 0 runs, by mpi4py where that is installed."""

from __future__ import annotations

from bagua_kernels.comm.joining.address import own_address


def address_by_mpi(rank: int, size: int) -> str:
    """Returns the address of rank 0, which it broadcasts by MPI; empty where there is no MPI of these ranks. Collective.

    Args:
        rank: this rank.
        size: the number of ranks, as the launcher has it.
    """
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, RuntimeError):  # it is not installed, or finds no library of MPI
        return ""
    world = MPI.COMM_WORLD
    # Another library of MPI than the launcher's makes each process a world of its own.
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        return ""
    return str(world.bcast(own_address() if rank == 0 else "", root=0))
