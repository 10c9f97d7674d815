"""Whose turn it is: fair gates, backlogs, pauses."""
