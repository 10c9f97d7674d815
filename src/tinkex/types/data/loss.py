"""Losses by name, and the numbers they take and give."""

from __future__ import annotations

from typing import TypeAlias

from tinkex.contract.losses import LossFnType as LossFnType
from tinkex.types.data.tensor_data import TensorData

LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]
