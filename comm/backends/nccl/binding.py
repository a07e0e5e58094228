"""NCCL as CuPy binds it, torch's streams, and how tensors become the arguments of one and travel on the other."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from bagua_kernels.comm.reduction import BITWISE, ReduceOp
from bagua_kernels.errors import BackendUnavailableError, CollectiveTimeoutError

OLDEST_CUPY = 14  # the first that releases the interpreter's lock in `NcclCommunicator()`, `abort` and `destroy`
OLDEST = 21000  # NCCL 2.10, the first with bfloat16; 2.7 brought send and receive
_FAREWELL = 5.0  # seconds that a process which exits waits for a call of NCCL
_GRACE = 1.0  # seconds that `Endpoint.abort` leaves a thread inside NCCL to come out by itself
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the driver's header cuda.h

_DTYPES = {
    torch.float64: "NCCL_FLOAT64",
    torch.float32: "NCCL_FLOAT32",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int64: "NCCL_INT64",
    torch.int32: "NCCL_INT32",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    # One byte that is 0 or 1; the reductions that keep it so are bitwise, which `reduces` declines.
    torch.bool: "NCCL_UINT8",
}
_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    # NCCL's own average scales the inputs of every dtype; `ReduceOp` promises that for halves only.
    ReduceOp.AVG: "NCCL_SUM",
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}


@dataclass(frozen=True)
class Runtime:
    """Everything that a communicator needs of a GPU.

    Attributes:
        nccl: the module `cupy.cuda.nccl`, or what behaves like it.
        cuda: the module `torch.cuda`, or what behaves like its streams, events and devices.
        record_stream: marks a tensor's memory as used by a stream, for the allocator.
        ignore_captures: lets the calling thread query events while another thread captures a graph.
        open_stream: makes a stream of high priority on a device, which nothing else uses.
    """

    nccl: Any
    cuda: Any
    record_stream: Callable[[torch.Tensor, Any], None]
    ignore_captures: Callable[[], None]
    open_stream: Callable[[torch.device], Any]

    def unique_id(self) -> bytes:
        """Returns a fresh name for a communicator, which its rank 0 makes and all its ranks pass to `connect`."""
        return bytes(self.nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Returns NCCL's communicator on the current device; blocks until all ranks have called it."""
        with _nameless_statuses():
            return self.nccl.NcclCommunicator(size, unique_id, rank)

    def bounded(self, call: Callable[[], None], device: torch.device, limit: float) -> bool:
        """Makes a call that may never return, on a thread of its own.

        Args:
            call: what to do with `device` as the current one; what it raises is raised.
            device: the GPU.
            limit: seconds to wait for it.

        Returns:
            True if it returned in time; if not, the thread goes on alone.
        """
        raised: list[Exception] = []

        def run() -> None:
            try:
                self.cuda.set_device(device)
                call()
            except Exception as error:
                raised.append(error)
            finally:
                atexit.unregister(threading.current_thread().join)

        thread = threading.Thread(target=run, name="bagua_kernels nccl call", daemon=True)
        thread.start()
        thread.join(limit)
        for error in raised:
            raise error
        if thread.is_alive():
            # A thread that comes back from C++ while the interpreter ends would end the process with an abort.
            atexit.register(thread.join, _FAREWELL)
        if not thread.is_alive():
            atexit.unregister(thread.join)
            return True
        return False


def unavailable() -> str:
    """Returns why there is no NCCL through CuPy in this process, or an empty text."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    try:
        version, nccl = _modules()
    except ImportError as error:
        lines = str(error).splitlines()
        return f"cupy cannot be imported ({lines[0] if lines else error!r}): install bagua-kernels[cuda13] or [cuda12]"
    if int(version.partition(".")[0]) < OLDEST_CUPY:
        return (
            f"cupy.__version__ is {version}, expected at least {OLDEST_CUPY}: install cupy-cuda13x>={OLDEST_CUPY} "
            f"(or cupy-cuda12x>={OLDEST_CUPY}); with an older one a lost rank stops all threads of the others"
        )
    if not getattr(nccl, "available", False):
        return "cupy.cuda.nccl.available is False: install nvidia-nccl-cu13 (or -cu12)"
    if nccl.get_version() < OLDEST:
        return f"cupy.cuda.nccl.get_version() is {nccl.get_version()}: install an NCCL of at least {OLDEST}"
    return ""


def load() -> Runtime:
    """Returns the runtime of this process.

    Raises:
        BackendUnavailableError: if there is none.
    """
    if reason := unavailable():
        raise BackendUnavailableError(f"NcclCommunicator needs a GPU and NCCL through CuPy: {reason}")
    return Runtime(_modules()[1], torch.cuda, torch.Tensor.record_stream, _ignore_captures, _open_stream)


def share_unique_id(store: Store, rank: int, size: int, timeout: float, make: Callable[[], bytes]) -> bytes:
    """Waits as `await_ranks` does, and returns what `make` returned on rank 0."""
    if rank == 0:
        store.set("id", make().hex())
    await_ranks(store, rank, size, timeout)
    return bytes.fromhex(store.get("id").decode())


def await_ranks(store: Store, rank: int, size: int, timeout: float) -> None:
    """Waits until all ranks have called it; NCCL itself waits for ranks without a limit.

    Args:
        store: used for this and nothing else.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds.

    Raises:
        CollectiveTimeoutError: if not all ranks come; it names those.
    """
    store.set(f"here/{rank}", "")
    keys = [f"here/{r}" for r in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise CollectiveTimeoutError(
            f"ranks {missing} of {size} did not come within {timeout:g} s to open a communicator that rank {rank} "
            "waits for: make it on all of them, in the same order as others, or raise timeout=",
            missing,
        ) from error


def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Returns True if NCCL has this reduction."""
    return dtype in _DTYPES and op not in BITWISE


class Endpoint:
    """One rank of an NCCL communicator, whose operations are issued on one stream.

    Tensors are contiguous; all methods but `abort` only put work on the stream. Reductions take what `reduces` accepts;
    everything else moves bytes. Once aborted or destroyed, every other method raises `RuntimeError`.

    Args:
        runtime: the GPU.
        native: NCCL's communicator.
        stream: where to issue.
    """

    def __init__(self, runtime: Runtime, native: Any, stream: Any) -> None:
        self.stream = stream
        self._nccl = runtime.nccl
        self._handle: Any = native
        # NCCL frees a communicator in `abort` and `destroy`, whatever other threads do with it.
        self._lock = threading.Lock()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduces in place."""
        with self._native() as native:
            pointer = tensor.data_ptr()
            native.allReduce(pointer, pointer, tensor.numel(), *self._kinds(tensor, op), self.stream.cuda_stream)

    def reduce(self, tensor: torch.Tensor, op: ReduceOp, root: int, *, receives: bool) -> None:
        """Reduces in place on the root (`receives`), whose tensor alone is written."""
        with self._native() as native:
            pointer, kinds = tensor.data_ptr(), self._kinds(tensor, op)
            output = pointer if receives else 0
            native.reduce(pointer, output, tensor.numel(), *kinds, root, self.stream.cuda_stream)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> None:
        """Reduces the input, of which part number rank goes to the output."""
        with self._native() as native:
            pointers = input.data_ptr(), output.data_ptr()
            native.reduceScatter(*pointers, output.numel(), *self._kinds(output, op), self.stream.cuda_stream)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copies the root's tensor into all."""
        with self._native() as native:
            pointer, kind = tensor.data_ptr(), self._nccl.NCCL_UINT8
            native.broadcast(pointer, pointer, tensor.nbytes, kind, root, self.stream.cuda_stream)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Puts all inputs, in rank order, into the output."""
        with self._native() as native:
            pointers = input.data_ptr(), output.data_ptr()
            native.allGather(*pointers, input.nbytes, self._nccl.NCCL_UINT8, self.stream.cuda_stream)

    def exchange(self, outputs: Mapping[int, list[torch.Tensor]], inputs: Mapping[int, list[torch.Tensor]]) -> None:
        """Receives and sends all at once; the messages between two ranks are paired in list order.

        Args:
            outputs: for each rank to hear from, this rank itself perhaps among them, what receives it.
            inputs: the tensor for each destination; empty tensors are left out on both sides.
        """
        kind, stream = self._nccl.NCCL_UINT8, self.stream.cuda_stream
        with self._native() as native:
            self._nccl.groupStart()
            try:
                for peer, tensors in inputs.items():
                    for tensor in filter(torch.Tensor.numel, tensors):
                        native.send(tensor.data_ptr(), tensor.nbytes, kind, peer, stream)
                for peer, tensors in outputs.items():
                    for tensor in filter(torch.Tensor.numel, tensors):
                        native.recv(tensor.data_ptr(), tensor.nbytes, kind, peer, stream)
            finally:
                # Left open, the group would swallow this thread's next operations.
                self._nccl.groupEnd()

    def check(self) -> None:
        """Raises `RuntimeError` if an operation under way has failed, but not while another thread starts one."""
        if self._handle is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self._handle is not None:
                with _nameless_statuses():
                    self._handle.check_async_error()
        finally:
            self._lock.release()

    def abort(self) -> None:
        """Ends everything under way on this rank, and frees the communicator; from any thread, as often as one likes."""
        # A thread may hang inside NCCL, which connects ranks when they first speak: then this is what frees it.
        held = self._lock.acquire(timeout=_GRACE)
        try:
            native, self._handle = self._handle, None
            if native is not None:
                with _nameless_statuses():
                    native.abort()
        finally:
            if held:
                self._lock.release()

    def destroy(self) -> None:
        """Frees the communicator, once its operations have finished on all ranks."""
        with self._lock, _nameless_statuses():
            native, self._handle = self._handle, None
            if native is not None:
                native.destroy()

    @contextlib.contextmanager
    def _native(self) -> Iterator[Any]:
        with self._lock, _nameless_statuses():
            if self._handle is None:
                raise RuntimeError("NCCL's communicator has been given up")
            yield self._handle

    def _kinds(self, tensor: torch.Tensor, op: ReduceOp) -> tuple[int, int]:
        return getattr(self._nccl, _DTYPES[tensor.dtype]), getattr(self._nccl, _OPS[op])


@contextlib.contextmanager
def _nameless_statuses() -> Iterator[None]:
    """Raises `RuntimeError` for a status of NCCL that CuPy has no name for, for which CuPy raises `KeyError`."""
    try:
        yield
    except KeyError as error:
        raise RuntimeError(f"NCCL returned status {error}") from error


def _modules() -> tuple[str, Any]:
    """Returns the version of CuPy and its module `nccl`."""
    with warnings.catch_warnings():
        # CuPy warns if it lacks NCCL; `unavailable` returns the same reason.
        warnings.simplefilter("ignore")
        import cupy
        from cupy.cuda import nccl

        return cupy.__version__, nccl


def _ignore_captures() -> None:
    """Exempts this thread from the rule that no thread may query an event while any captures in the global mode."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned {status}")


# Never destroyed: when memory that was used on a stream is freed, however late, the allocator records an event there.
_streams: list[Any] = []


def _open_stream(device: torch.device) -> Any:
    """Makes a stream outside torch's pool, whose 32 streams of a priority would go round among communicators."""
    from cupy.cuda import Stream

    with torch.cuda.device(device):
        _streams.append(Stream(non_blocking=True, priority=-1))
    return torch.cuda.ExternalStream(_streams[-1].ptr, device)
