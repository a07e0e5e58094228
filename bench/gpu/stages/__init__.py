"""The stages of `make gpu-check`, one file each, with a function `run`."""
