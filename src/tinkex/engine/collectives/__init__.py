"""Processes that compute one thing together: process groups, and the sum of their gradients."""
