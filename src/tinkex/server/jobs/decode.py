"""Turn messages into what an engine takes: arrays, without a copy where the types agree.

What a text model cannot take (an image, audio) is refused by name. Bodies are read by `wire`, and
whether values make sense for the model is checked in `validation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.teachers import split_config
from tinkex.engine.jobs import Array, CsrArray, TrainDatum
from tinkex.errors import NotSupportedError
from tinkex.server.jobs.teaching import Teaching
from tinkex.types.data.chunks import DmelChunk, EncodedTextChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.wire.json_requests import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """The work of a forward or forward_backward request of either generation."""

    data: tuple[TrainDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    """Without what names a teacher."""
    teaching: Teaching | None = None
    references: tuple[TrainDatum, ...] = ()
    """What the teacher reads in place of `data`: other contexts of the same last targets."""

    @property
    def taught_from(self) -> tuple[TrainDatum, ...]:
        return self.references or self.data


def train_request(request: Pass) -> TrainRequest:
    inputs = request.input
    teacher, config = split_config(inputs.loss_fn, inputs.loss_fn_config or {})
    return TrainRequest(
        data=tuple(_datum(index, datum) for index, datum in enumerate(inputs.data)),
        loss_fn=inputs.loss_fn,
        loss_fn_config={k: v if isinstance(v, str) else float(v) for k, v in config.items()},
        teaching=None if teacher is None else Teaching.of(teacher),
    )


def _datum(index: int, datum: Datum) -> TrainDatum:
    inputs = datum.loss_fn_inputs
    experts = inputs.get(ROUTED_EXPERTS)
    return TrainDatum(
        tokens=tokens_of(datum.model_input, f"data[{index}].model_input"),
        inputs={name: array_of(inputs[name]) for name in sorted(inputs) if name != ROUTED_EXPERTS},
        routed_experts=None if experts is None else array_of(experts),
    )


def tokens_of(given: ModelInput, where: str) -> NDArray[np.int64]:
    """The tokens of an input of text chunks."""
    for index, chunk in enumerate(given.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            what = "dmel audio is" if isinstance(chunk, DmelChunk) else "images are"
            raise NotSupportedError(
                f"{what} not supported by the text models served here; send encoded_text chunks.",
                path=f"{where}.chunks[{index}]",
            )
    return given.to_numpy().astype(np.int64)


def array_of(tensor: TensorData) -> Array | CsrArray:
    if tensor.crow_array is None or tensor.col_array is None:
        return tensor.array
    assert tensor.shape is not None
    rows, columns = tensor.shape
    return CsrArray(
        values=tensor.array,
        crow_indices=tensor.crow_array,
        col_indices=tensor.col_array,
        shape=(rows, columns),
    )
