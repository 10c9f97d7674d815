"""The commands around saved weights."""
