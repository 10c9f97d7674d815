"""The ground under every message: its bases, the kinds and bounds of fields, error texts."""
