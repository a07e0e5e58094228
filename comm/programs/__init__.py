"""Programs for the ranks of a job: what is wrong with their network, and which settings suit it."""
