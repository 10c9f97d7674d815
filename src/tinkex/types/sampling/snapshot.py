"""Which weights made a sample."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.types.fields.plain import PlainRecord


@dataclass(frozen=True, slots=True)
class WeightsSnapshot(PlainRecord):
    """Frozen weights that were sampled from. A field is None when the server does not say it."""

    sampling_session_id: str
    path: str | None = None
    """The checkpoint's `tinker://` path; None for unnamed weights and base models."""
    step: int | None = None
    """Optimizer steps that the weights had seen."""
    content: str | None = None
    """SHA-256 of the weights: equal exactly when they are."""
