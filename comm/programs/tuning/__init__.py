"""`python -m bagua_kernels.comm.tune -- torchrun …`: finds the variables that suit the hosts of a job, then starts it."""
