"""Finds out when gradients are ready, and has them exchanged while backward goes on."""
