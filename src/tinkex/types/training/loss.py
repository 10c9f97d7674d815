"""Losses by name, and the numbers they take and give."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from tinkex.types.data.tensor_data import TensorData

LossFnInputs: TypeAlias = dict[str, TensorData]
LossFnOutput: TypeAlias = dict[str, TensorData]


class LossFnType(StrEnum):
    """The named losses. A plain string of the same text works wherever one of these does.

    `kl_divergence` and `dppo` are computed by a Tinkex server; the hosted service refuses them.
    """

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"
    DPPO = "dppo"
    STABLE_REINFORCE = "stable_reinforce"
    KL_DIVERGENCE = "kl_divergence"
    CUSTOM = "custom"
