"""The loop of an engine: whose turn it is. Needs no torch."""
