"""Codecs that send a few elements, and what they share."""
