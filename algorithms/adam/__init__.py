"""Algorithms that average the momentum of Adam, and the optimizer that they need."""
