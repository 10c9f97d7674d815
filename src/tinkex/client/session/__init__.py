"""The inside of every client: its session, credential, background loop and telemetry."""
