"""Jobs of the engine made from messages, checked, and messages made from results."""
