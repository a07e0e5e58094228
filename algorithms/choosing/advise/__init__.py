"""`python -m bagua_kernels.algorithms.advise`: how long a step would take with each algorithm, on machines that are not there."""
