"""A training example as most tests want it: predict each next token of a sequence.

Weights are one unless other inputs are given. `datum` is the SDK's, `train_datum` the engine's.
Scripts that run in another SDK's environment (`tests/peers`, `same_scenario`) cannot import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinkex.engine.jobs import TrainDatum
from tinkex.types import Datum, ModelInput


def datum(tokens: Sequence[int], **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens[:-1]), _inputs(np.array(tokens), inputs))


def train_datum(tokens: Sequence[int], **inputs: Any) -> TrainDatum:
    array = np.array(tokens)
    return TrainDatum(tokens=array[:-1], inputs=_inputs(array, inputs))


def _inputs(tokens: np.ndarray[Any, Any], given: dict[str, Any]) -> dict[str, Any]:
    targets = tokens[1:]
    return {"target_tokens": targets} | (given or {"weights": np.ones(len(targets), np.float32)})
