"""What the numbered requests of a model mean, one class for each kind."""
