"""The buffers of a module, made equal on all ranks again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from bagua_kernels.algorithms.wrapping.replicas import Write, average_from_first, bytes_of, synchronize
from bagua_kernels.comm import Communicator, ReduceOp

# Bytes of a buffer from which it is sent only if it has changed: to compare less takes as long as to send it.
_LARGE = 64 << 10

# Of what torch's modules keep, only these are means over samples. The mean of two unit vectors is no unit vector.
RUNNING = ("*running_mean", "*running_var")


def patterns_of(average: bool | str | Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of the names of buffers that are averaged: none for False, those of batch norm for True.

    Raises:
        TypeError: it is neither a bool, a str nor a sequence of str.
    """
    if isinstance(average, bool):
        return RUNNING if average else ()
    found = (average,) if isinstance(average, str) else average
    if not isinstance(found, Sequence) or not all(isinstance(each, str) for each in found):
        raise TypeError(
            f"average_buffers must be a bool, a pattern of buffers' names, or a sequence of patterns, got {average!r}: write "
            "for example ['*running_mean', '*running_var'], which is what True means"
        )
    return tuple(found)


def averaged_names(module: torch.nn.Module, patterns: Collection[str]) -> set[str]:
    """Returns the names of a module's buffers of floating point that match a pattern under one of their names."""
    matching = {
        buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if buffer.is_floating_point() and any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return {name for name, buffer in module.named_buffers() if buffer in matching}


class Buffers:
    """Writes rank 0's buffers, or the means, into those of this rank, between forward passes that wait for their backward.

    Autograd refuses a backward pass if a tensor that it saved has been written since. Batch norm saves its running statistics
    in each forward pass, and changes them without a new version for autograd. The backward pass of training does not read them.
    So a GAN's discriminator may see real and generated samples before one backward pass. Here a write must not
    fail if the module's own does not, and must not hide a change from autograd:

    1. A buffer may be the same tensor as after the last write, with the same version for autograd. Then it has changed at
       most as batch norm's statistics do. It is written without a new version.
    2. If the module has put another tensor in its place, that one may have been saved, and its values may be needed. It
       stays as it is; the buffer becomes a new tensor.
    3. Everything else is written as any operation in place does it: autograd knows of the module's change already.

    What has the right bits is not written in cases 2 and 3, where looking at it does not wait for a GPU.

    A buffer of 64 KiB or more is sent only if its bytes have changed on some rank since the last write. A copy of them is kept.
    Versions do not tell: batch norm, compiled code and writes to `data` leave them as they are. Ranks decide together, by one
    all-reduce of a byte for each such buffer. On a GPU the host waits for it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Takes the buffers as they are, which is as after a write."""
        self._module = module
        # By name, the tensor and its version after the last write.
        self._written: dict[str, tuple[torch.Tensor, int]] = {}
        # By name, what large buffers were after the last write, the same on all ranks.
        self._last: dict[str, torch.Tensor] = {}
        named = dict(module.named_buffers())
        self._note(named, named)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # messages cannot be traced
    def synchronize(self, communicator: Communicator, src: int = 0) -> None:
        """Gives all ranks those of rank `src`; collective."""
        named = dict(self._module.named_buffers())
        sent = self._changed(named, communicator)
        synchronize([named[name] for name in sent], communicator, src, self._writer(named))
        self._note(named, sent)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def average(self, communicator: Communicator, patterns: Collection[str] = RUNNING) -> None:
        """Gives all ranks the means of those of floating point whose names match, and rank 0's others; collective."""
        named = dict(self._module.named_buffers())
        names, write = averaged_names(self._module, patterns), self._writer(named)
        sent = self._changed({name: buffer for name, buffer in named.items() if name not in names}, communicator)
        synchronize([named[name] for name in sent], communicator, 0, write)
        average_from_first(
            [buffer for name, buffer in named.items() if name in names],
            lambda vector: communicator.all_reduce(vector, ReduceOp.AVG).wait(),
            lambda data: communicator.broadcast(data, 0).wait(),
            write,
        )
        self._note(named, [*sent, *names])

    @torch.no_grad()
    def _changed(self, named: Mapping[str, torch.Tensor], communicator: Communicator) -> list[str]:
        """Returns the names of buffers that may differ between ranks, the same on all ranks; collective if some are large."""
        large = [name for name, buffer in named.items() if buffer.nbytes >= _LARGE]
        if not large:
            return list(named)
        flags = [self._has_changed(name, named[name]) for name in large]
        # waits: no, buffers are on the communicator's device.
        changed = torch.stack(flags).to(communicator.device, torch.uint8)
        communicator.all_reduce(changed, ReduceOp.MAX).wait()
        # waits: where there are large buffers, once for each forward pass.
        same = {name for name, flag in zip(large, changed.tolist(), strict=True) if not flag}
        return [name for name in named if name not in same]

    def _has_changed(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        last, now = self._last.get(name), bytes_of(buffer)
        if last is None or last.shape != now.shape or last.device != now.device:
            return torch.ones((), dtype=torch.bool, device=buffer.device)
        return (now != last).any() if buffer.is_cuda else torch.tensor(not torch.equal(now, last))

    @torch.no_grad()
    def _note(self, named: dict[str, torch.Tensor], sent: Collection[str]) -> None:
        """Takes buffers as they are after a write.

        Args:
            named: all of them.
            sent: the names of those that may have been written.
        """
        self._written = {name: (buffer, _version(buffer)) for name, buffer in named.items()}
        self._last = {name: last for name, last in self._last.items() if name in named}
        for name in sent:
            if named[name].nbytes >= _LARGE:
                values = bytes_of(named[name])
                last = self._last.get(name)
                if last is not None and last.shape == values.shape and last.device == values.device:
                    last.copy_(values)
                else:
                    self._last[name] = values.clone()
            else:
                self._last.pop(name, None)

    def _writer(self, named: dict[str, torch.Tensor]) -> Write:
        names = {buffer: name for name, buffer in named.items()}

        def write(buffer: torch.Tensor, values: torch.Tensor) -> None:
            name = names[buffer]
            before, version = self._written.get(name, (None, -1))
            if before is buffer and version == _version(buffer):
                buffer.data.copy_(values)  # `data` has a version of its own
            elif buffer.is_cuda or not torch.equal(bytes_of(buffer), bytes_of(values)):
                if before is None or before is buffer:
                    buffer.copy_(values)
                else:
                    named[name] = torch.empty_like(buffer).copy_(values)
                    self._replace(buffer, named[name])

        return write

    def _replace(self, buffer: torch.Tensor, other: torch.Tensor) -> None:
        for module in self._module.modules():
            for name, each in module._buffers.items():
                if each is buffer:
                    module._buffers[name] = other


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
