"""The training client, and losses of the user's own."""
