"""Training on through the loss of a run."""
