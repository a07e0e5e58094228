"""`python -m bagua_kernels.comm.doctor`: what is wrong with the ranks of a job and the network between them."""
