"""The base model that runs without any choice of the user, and how large an adapter may be."""

from __future__ import annotations

DEFAULT_MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
"""A 4-bit copy of HuggingFaceTB/SmolLM2-135M-Instruct that a package index has; see
`engine/model/default_model.py`."""
MAX_RANK = 512
"""Of a LoRA adapter."""
