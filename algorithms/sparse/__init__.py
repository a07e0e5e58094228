"""Algorithms that send a few elements of a gradient, and remember the others."""
