"""Which samples a rank is given: equal work in each step, or batches for ranks of different speed."""
