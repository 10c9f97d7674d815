"""Training runs as people see them: sessions that are alive, curves, kept answers."""
