"""Decentralized algorithms: each rank has its own parameters, and mixes them with those of its neighbours."""
