"""The engines there are, and what each can do."""
