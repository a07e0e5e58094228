"""Builds the documentation site: stages the pages for Sphinx, builds them, and checks the result."""
