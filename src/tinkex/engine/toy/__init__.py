"""A deterministic engine without torch, for tests and for trying a loop."""
