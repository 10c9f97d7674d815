"""Requests and results of sampling."""
