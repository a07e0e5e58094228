"""Which algorithm is fastest on which network: what the cost model predicts beside what was measured."""
