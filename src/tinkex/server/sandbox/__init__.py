"""A process of its own for the bytes of strangers: archives unpacked, templates rendered."""
