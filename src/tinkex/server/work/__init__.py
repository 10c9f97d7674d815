"""Accepted work: its order, its promises, its journal, and what a restart makes of it."""
