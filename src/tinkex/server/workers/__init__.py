"""Processes that compute, and which model lives on which of them."""
