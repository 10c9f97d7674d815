"""Adapters: their matrices, how a batch mixes them, and the forms that fast products take."""
