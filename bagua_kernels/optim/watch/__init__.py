"""This room reads PyTorch's objects in memory, at offsets that are measured; `BAGUA_KERNELS_WATCH=0` switches it off.

A kernel that works through addresses must check them at each step: parameters get other memory (`.data`), gradients are new
ones. Asking PyTorch costs 0.1 µs for each property of each tensor, together more than the update of small tensors. So
compiled code reads the fields from the tensor objects. Their offsets are measured on tensors whose fields are known, and
tried on all kinds of changes. Where a field is not as expected, `watch` returns None and the caller asks PyTorch.
"""

from bagua_kernels.optim.watch.sweep import Watch as Watch
from bagua_kernels.optim.watch.sweep import watch as watch
