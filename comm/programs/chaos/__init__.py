"""The command that gives a job faults."""
