"""Launchers run rules over tensors: one folder each, with the same files, one for every backend."""
