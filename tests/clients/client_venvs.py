"""Environments that hold foreign clients (`tests/harness/cached_venv.py` says where)."""

from __future__ import annotations

from pathlib import Path

from cached_venv import cached_python

PACKAGES = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # without mcp its completion() cannot take tools
    "langchain": ("langchain-openai",),
    "inspect": ("inspect-ai", "openai"),
    "lm-eval": ("lm-eval[api]", "transformers"),
}


def client_python(name: str) -> Path:
    """The interpreter of the environment that holds a client; builds it when absent."""
    return cached_python(f"client-{name}", PACKAGES[name])
