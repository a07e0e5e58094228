"""How tensors move between ranks: one folder a transport, each with a communicator over it."""
