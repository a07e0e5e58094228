"""Which outer steps suit runs of few rounds, and which those of many."""
