"""Faults that a job is given on purpose."""
