"""Listings, accounts and files: the calls that answer at once."""
