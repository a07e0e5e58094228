"""Which codec encodes what, when, and whether it does at all."""
