"""Samplers that give all ranks the same work in each step."""
