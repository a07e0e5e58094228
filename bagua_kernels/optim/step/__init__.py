"""How a fused optimizer takes its step: tensors gathered into launches, scalars, and where memory lies."""
