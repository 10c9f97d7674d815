"""The routes of the training API."""
