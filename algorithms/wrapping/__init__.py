"""What happens to a module that is wrapped: checks between ranks, its buffers, its copies."""
