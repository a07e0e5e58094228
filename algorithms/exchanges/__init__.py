"""What happens to one bucket: each exchange replaces its vector by a mean over ranks, and owns the state for it."""
