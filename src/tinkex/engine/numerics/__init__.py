"""Arithmetic and arrays that every room of the engine shares; it imports no other room."""
