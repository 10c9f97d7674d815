"""Engines on other machines, by Ray. The only package that imports ray."""
