"""Which algorithm reaches an accuracy first, on which network."""
