"""Penalties on logprobs, and the pipeline that adds them to a loss. torch loads when called."""

from tinkex.regularizers.distributions import Consistency, Entropy, KLDivergence
from tinkex.regularizers.geometry import GradientPenalty, Orthogonality
from tinkex.regularizers.norms import L1, L2, ElasticNet
from tinkex.regularizers.outputs import BaseLossOutput, CustomLossOutput, RegularizerOutput
from tinkex.regularizers.pipeline import Pipeline, RegularizerSpec

__all__ = [
    "L1",
    "L2",
    "BaseLossOutput",
    "Consistency",
    "CustomLossOutput",
    "ElasticNet",
    "Entropy",
    "GradientPenalty",
    "KLDivergence",
    "Orthogonality",
    "Pipeline",
    "RegularizerOutput",
    "RegularizerSpec",
]
