"""Collectives on emulated hosts: `python -m bench.network`."""
