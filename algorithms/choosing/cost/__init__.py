"""What a step of training costs with each algorithm: an alpha-beta model with overlap and processor time."""
