"""How several processes that compute one thing come together: in a meeting, or through files."""
