"""Checkpoint folders: written, read, and kept in memory for sampling."""
