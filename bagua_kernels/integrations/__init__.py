"""Doors into other libraries, a module for each: `accelerate`, `fabric`, `lightning`, `transformers`.

Each imports its library when it is imported itself, and nothing else does.
"""
