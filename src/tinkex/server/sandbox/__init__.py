"""A process of its own for the bytes of strangers: adapters are read, templates rendered."""
