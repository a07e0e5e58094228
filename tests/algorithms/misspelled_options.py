"""Options that the types of constructors refuse; `make lint` fails if mypy accepts one, because no ignore may be unused."""

import torch

from bagua_kernels import algorithms

module = torch.nn.Linear(2, 2)
algorithms.ByteGrad(module, blok=3)  # type: ignore[call-arg]
algorithms.GradientAllReduce(module, bucket_bites=3)  # type: ignore[call-arg]
algorithms.PowerSGD(module, averge_buffers=True)  # type: ignore[call-arg]
algorithms.QSGD(module, bucket_bytes="many")  # type: ignore[arg-type]
algorithms.DGC(module, guard=3)  # type: ignore[arg-type]
algorithms.OneBitAdam(module, limt=1.0)  # type: ignore[call-arg]

optimizer = torch.optim.SGD(module.parameters())
algorithms.Decentralized(module, optimizer, intervall=2)  # type: ignore[call-arg]
algorithms.Choco(module, optimizer, average_states="yes")  # type: ignore[arg-type]
