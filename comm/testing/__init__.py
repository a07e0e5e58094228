"""Ranks as processes of this machine, for tests."""

from bagua_kernels.comm.testing.processes import Processes as Processes
from bagua_kernels.comm.testing.processes import ProcessResult as ProcessResult
from bagua_kernels.comm.testing.processes import free_port as free_port
from bagua_kernels.comm.testing.processes import process_command as process_command
from bagua_kernels.comm.testing.processes import run_processes as run_processes

__all__ = ["ProcessResult", "Processes", "free_port", "process_command", "run_processes"]
