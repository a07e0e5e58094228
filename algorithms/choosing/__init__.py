"""Chooses an algorithm: in training by the time of steps, and before it by a cost model or the bytes of a line."""
