"""Sessions, promises, and what a server says about itself."""
