"""What algorithms share that exchange parameters instead of gradients."""
