"""How a scalar rule becomes a kernel: the vocabulary it is written in, its rebuilding for a backend, the choice of one."""

from bagua_kernels.rules import vocabulary as vocabulary
