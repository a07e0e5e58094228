"""Algorithms with local steps: ranks train by themselves, and meet once in many steps."""
