"""The front door of a service, and the downloads through it."""
