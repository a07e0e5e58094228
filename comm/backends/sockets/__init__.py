"""Sockets of one's own between ranks on CPUs: how they connect, who moves the bytes, and the steps of each collective."""
