"""Peak memory of training by each algorithm beyond that of the plain loop; see `measure`."""
