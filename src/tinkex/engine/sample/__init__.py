"""Sampling: continuous batching over a paged KV cache."""
