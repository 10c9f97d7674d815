"""Adapters under training: gradients by shard, optimizer state, and steps."""
