"""A rank that does not answer: heartbeats, the diagnosis of the rank at fault, and waits that end in time."""
