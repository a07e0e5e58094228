"""Algorithms whose exchanges wait for no rank's training: a courier per rank makes them."""
