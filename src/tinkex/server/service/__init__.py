"""The living state of the server, how it starts and stops, and its metrics."""
