"""Chooses in training what averages gradients: by a cost model first, and then by the time of steps."""
