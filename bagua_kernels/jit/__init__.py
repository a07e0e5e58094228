"""How a scalar rule becomes a kernel: the vocabulary it is written in, its rebuilding for a backend, the choice of one."""
