"""Which way of training reaches the lowest loss in the same time on slow links: ours, and those of other packages."""
