"""The sampling client."""
