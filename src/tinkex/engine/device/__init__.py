"""The one room that asks which device there is, and chooses what computes on it."""
