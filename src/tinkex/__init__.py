"""Tinkex: the Tinker training API on your laptop, your GPUs, a cluster or the hosted service.

Names load when first touched, so `import tinkex` costs milliseconds and pulls in neither torch nor
a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__title__ = "tinkex"

# Public name -> module that owns it.
_EXPORTS: dict[str, str] = {
    "InvalidInputError": "tinkex.errors",
    "TinkerError": "tinkex.errors",
    "AdamOptimizerConfig": "tinkex.types",
    "AdamParams": "tinkex.types",
    "Checkpoint": "tinkex.types",
    "CheckpointType": "tinkex.types",
    "Datum": "tinkex.types",
    "DimuonOptimizerConfig": "tinkex.types",
    "DimuonParams": "tinkex.types",
    "DmelChunk": "tinkex.types",
    "EncodedTextChunk": "tinkex.types",
    "ForwardBackwardOutput": "tinkex.types",
    "LoraConfig": "tinkex.types",
    "ModelID": "tinkex.types",
    "ModelInput": "tinkex.types",
    "ModelInputChunk": "tinkex.types",
    "OptimParams": "tinkex.types",
    "OptimStepRequest": "tinkex.types",
    "OptimStepResponse": "tinkex.types",
    "ParsedCheckpointTinkerPath": "tinkex.types",
    "PromptProvenanceSpan": "tinkex.types",
    "SampleRequest": "tinkex.types",
    "SampleResponse": "tinkex.types",
    "SampledProvenanceSpan": "tinkex.types",
    "SampledSequence": "tinkex.types",
    "SamplingParams": "tinkex.types",
    "StopReason": "tinkex.types",
    "TensorData": "tinkex.types",
    "TensorDtype": "tinkex.types",
    "TrainingRun": "tinkex.types",
}
# Public submodule -> where it lives.
_SUBMODULES: dict[str, str] = {
    "errors": "tinkex.errors",
    "events": "tinkex.client.events",
    "regularizers": "tinkex.regularizers",
    "types": "tinkex.types",
}

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if (module := _SUBMODULES.get(name)) is not None:
        return import_module(module)
    if (module := _EXPORTS.get(name)) is not None:
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
