"""Requests and results of training."""
