"""Which ranks are alive, what they agree on after a loss, and the communicator that the living have."""
