"""What the server keeps on disk beside its database."""
