"""`torch.cuda` for tests without a GPU: two devices with streams, whose tensors lie in the CPU's memory.

Operations run at once, so that all values are right. `Memory` follows what a GPU could have done instead: a free, or a use
of the same bytes on two streams, that no event orders raises `MisuseError`. A thread has tensors "on the GPU" within
`FakeGpu.used`, and within each `torch.cuda.stream(…)`, as the package's own threads have it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.mailbox import LocalMailbox
from bagua_kernels.comm.work import Work
from bagua_kernels.jit.op import Op
from tests import limits
from tests.comm.backends.nccl.fake_cuda import Cuda, Event, Machine, Stream
from tests.comm.backends.nccl.fake_memory import operands

T = TypeVar("T")
CPU = torch.device("cpu")
_DEVICE, _IS_CUDA, _NUMPY = torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.numpy


class FakeGpu:
    """Stands for `torch.cuda` while a test runs.

    Attributes:
        device: where tensors are, cuda:1; the current device is cuda:0 until a thread changes that.
        machine: `raise_failure` raises the first error.
        cuda: its streams and memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces `torch.cuda` until the test has ended."""
        self.device = torch.device("cuda", 1)
        self.machine = Machine()
        self.cuda = Cuda(self.machine)
        self._threads = threading.local()
        for name in (
            "Stream",
            "Event",
            "current_stream",
            "current_device",
            "set_device",
            "is_current_stream_capturing",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self.cuda, name))
        for name in ("stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        # Torch switches the mode off within `backward`, where hooks need it.
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.autograd, "_engine_run_backward", lambda *a, **k: self._backward(run, *a, **k))
        monkeypatch.setattr(torch.cuda.nvtx, "range", lambda label: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))
        backend = Op.backend
        monkeypatch.setattr(Op, "backend", lambda op, device: backend(op, CPU))
        monkeypatch.setattr(LocalMailbox, "_exchange", _on_transport(self, LocalMailbox._exchange, 0))
        for method, output in {"_start": 2, "_send": None, "_recv": 0, "_all_to_all": 0}.items():
            start = getattr(LocalCommunicator, method)
            monkeypatch.setattr(LocalCommunicator, method, _on_transport(self, start, output))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, this thread's tensors are on the device."""
        if getattr(self._threads, "inside", False):
            yield
            return
        self._threads.inside = True
        try:
            with _OnDevice(self), _Operations(self):
                yield
        finally:
            self._threads.inside = False

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _OnDevice(self) if getattr(self._threads, "inside", False) else contextlib.nullcontext():
            return run(*args, **kwargs)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        with self.used(), contextlib.nullcontext() if stream is None else self.cuda.stream(stream):
            yield

    def synchronize(self, device: torch.device | None = None) -> None:
        """`torch.cuda.synchronize`."""
        for stream in list(self.cuda.streams.values()):
            stream.synchronize()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`torch.Tensor.record_stream`; does not keep the tensor, as `Cuda.record_stream` does."""
        self.cuda.memory.record(tensor, stream.timeline)

    def operate(
        self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Notes an operation on the device's current stream."""
        self.machine.raise_failure()
        self.cuda.memory.operate(self.cuda.current_stream(self.device).timeline, name, reads, writes, made)

    def run_ranks(self, size: int, fn: Callable[[Communicator], T], current: int = 1) -> list[T]:
        """Runs `fn` on ranks that are threads; raises the first error of `Memory`.

        Args:
            size: number of ranks.
            fn: what every rank runs.
            current: index of the current device; 0 as in a program that never calls `set_device`.
        """

        def run(communicator: Communicator) -> T:
            torch.cuda.set_device(torch.device("cuda", current))
            return fn(communicator)

        try:
            return run_ranks(size, run, timeout=limits.seconds(60), device=self.device)
        finally:
            self.machine.raise_failure()


class _OnDevice(TorchFunctionMode):
    """Makes tensors say that they are on the device, and keeps them on the CPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _DEVICE.__get__:  # type: ignore[attr-defined]
            return self._gpu.device
        if function == _IS_CUDA.__get__:  # type: ignore[attr-defined]
            return True
        if function is _NUMPY:
            # Kernels of Numba read and write through it.
            self._gpu.operate("a kernel", [args[0]], [], [])
        if function is torch.Tensor.tolist:
            self._gpu.operate("tolist", [args[0]], [], [])
            self._gpu.cuda.current_stream(self._gpu.device).synchronize()
        args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs or {}))
        if function is torch.Tensor.pin_memory:
            return args[0].clone()
        return function(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Notes each operation on the thread's current stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._gpu.operate(str(function), *operands(function, args, kwargs, results))
        if function is torch.ops.aten._local_scalar_dense.default:
            self._gpu.cuda.current_stream(self._gpu.device).synchronize()
        return results


def _on_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class _OnTransport(Work):
    """A communication on the transport's own stream, in NCCL's order: the stream that waits goes on behind it."""

    def __init__(self, gpu: FakeGpu, work: Work, done: Event) -> None:
        self._gpu, self._work, self._done = gpu, work, done

    def wait(self) -> None:
        with self._gpu.cuda.memory.hidden():
            self._work.wait()
        self._gpu.cuda.current_stream(self._gpu.device).wait_event(self._done)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def count_from(self, started: float | None = None) -> None:
        self._work.count_from(started)


def _on_transport(gpu: FakeGpu, start: Callable[..., Work], output: int | None) -> Callable[..., Work]:
    """Returns a method that starts a communication, with the order of streams that NCCL has.

    Args:
        gpu: its device.
        start: the method.
        output: place of the argument that holds the outputs.
    """

    def started(self: Any, *arguments: Any) -> Work:
        memory = gpu.cuda.memory
        if memory.is_hidden:
            return start(self, *arguments)
        with memory.hidden():
            work = start(self, *arguments)
        stream = vars(self).setdefault("fake_stream", gpu.cuda.Stream(gpu.device))
        stream.wait_stream(gpu.cuda.current_stream(gpu.device))
        given, written = _tensors(arguments), [] if output is None else _tensors(arguments[output])
        with torch._C.DisableTorchFunction():
            memory.operate(stream.timeline, start.__name__, given, written, [])
            for tensor in given:
                gpu.record_stream(tensor, stream)
        return _OnTransport(gpu, work, stream.record_event())

    return started


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
