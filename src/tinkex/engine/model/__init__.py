"""The base model: what it is, where its weights come from, and the decoder that runs it."""
