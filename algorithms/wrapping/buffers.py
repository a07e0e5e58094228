"""The buffers of a module, made equal on all ranks again and again."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms.wrapping.replicas import Write, average, bytes_of, synchronize
from bagua_kernels.comm import Communicator


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
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Takes the buffers as they are, which is as after a write."""
        self._module = module
        # By name, the tensor and its version after the last write.
        self._written: dict[str, tuple[torch.Tensor, int]] = {}
        self._note(dict(module.named_buffers()))

    @torch._disable_dynamo  # type: ignore[attr-defined]  # messages cannot be traced
    def synchronize(self, communicator: Communicator, src: int = 0) -> None:
        """Gives all ranks those of rank `src`; collective."""
        named = dict(self._module.named_buffers())
        synchronize(list(named.values()), communicator, src, self._writer(named))
        self._note(named)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def average(self, communicator: Communicator) -> None:
        """Gives all ranks the means of floating point, and rank 0's others; collective."""
        named = dict(self._module.named_buffers())
        average(list(named.values()), communicator, self._writer(named))
        self._note(named)

    def _note(self, named: dict[str, torch.Tensor]) -> None:
        self._written = {name: (buffer, _version(buffer)) for name, buffer in named.items()}

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
