"""Algorithms on gradients whose codec sends every element in a few bits."""
