"""Models that people train, a file each: its data, which come with packages, its network, its loss and its metric."""
