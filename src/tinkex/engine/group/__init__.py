"""Several devices as one: a base model cut over the members of a group."""
