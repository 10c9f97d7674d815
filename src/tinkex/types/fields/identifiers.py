"""Ids are opaque text."""

from __future__ import annotations

from typing import TypeAlias

ModelID: TypeAlias = str
RequestID: TypeAlias = str
