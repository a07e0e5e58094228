"""What a wheel has to do where it is installed: `python -I tests/installed.py VERSION` takes steps with it, on one rank.

Imports nothing of this repository but the package.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch

import bagua_kernels
from bagua_kernels import comm
from bagua_kernels.algorithms import ByteGrad
from bagua_kernels.optim import AdamW


def check_place(expected: str) -> None:
    """The package is that of this environment, and has the version in both places."""
    file = Path(bagua_kernels.__file__).resolve()
    assert file.is_relative_to(Path(sys.prefix).resolve()), f"imported {file}, expected a file below {sys.prefix}"
    versions = {bagua_kernels.__version__, importlib.metadata.version("bagua-kernels")}
    assert versions == {expected}, f"got the versions {versions}, expected {expected}"


def check_step() -> None:
    """One step of AdamW is PyTorch's."""
    start, gradient = torch.linspace(-1, 1, 1000), torch.linspace(2, -2, 1000)
    stepped = []
    for kind in (AdamW, torch.optim.AdamW):
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        kind([parameter], lr=0.1).step()
        stepped.append(parameter.detach())
    assert not torch.equal(stepped[0], start)
    torch.testing.assert_close(*stepped)


def check_training() -> None:
    """One step of ByteGrad on one rank is that of the bare module, for there is nobody to send to."""
    inputs = torch.linspace(-1, 1, 64).reshape(4, 16)
    stepped = []
    comm.init()
    for wrap in (ByteGrad, torch.nn.Module.train):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(16, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(inputs).square().mean().backward()
        optimizer.step()
        stepped.append([parameter.detach().clone() for parameter in model.parameters()])
    comm.shutdown()
    assert all(torch.equal(one, other) for one, other in zip(*stepped, strict=True))


if __name__ == "__main__":
    check_place(sys.argv[1])
    check_step()
    check_training()
