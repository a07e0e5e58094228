"""`torch.distributed`: Gloo, NCCL as torch drives it, and process groups of the user."""
