"""Cut a batch into requests of bounded size (R11, contract 5.2), and put the results together.

Greedy and order-preserving: a datum goes into the current chunk unless that would exceed a limit. A
datum larger than the limit travels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.errors import InvalidInputError
from tinkex.types.data.chunks import DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.training.forward_backward import ForwardBackwardOutput
from tinkex.wire.metrics import reduce_metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLimits:
    """How large a request may be: what the server's client config says."""

    max_datums: int
    """Most datums per request."""
    max_size: int
    """Most bytes per request by `datum_size`, or most numbers when `by_numbers`."""
    by_numbers: bool = False
    """Count numbers rather than bytes, as servers of the 0.4.1 generation do."""

    def __post_init__(self) -> None:
        if self.max_datums < 1 or self.max_size < 1:
            raise InvalidInputError(
                f"chunk limits must be 1 or more, got {self.max_datums} and {self.max_size}"
            )


LIMITS_V04 = ChunkLimits(max_datums=128, max_size=500_000, by_numbers=True)
"""For a server that has no client config."""


def split(data: Sequence[Datum], limits: ChunkLimits) -> list[list[Datum]]:
    """The batch as chunks in the order given. An empty batch is an error."""
    if not data:
        raise InvalidInputError("at least one datum is needed, got none", path="data")
    return list(_chunks(data, limits))


def _chunks(data: Sequence[Datum], limits: ChunkLimits) -> Iterator[list[Datum]]:
    measure = datum_numbers if limits.by_numbers else datum_size
    chunk: list[Datum] = []
    filled = 0
    for datum in data:
        size = measure(datum)
        if chunk and (filled + size > limits.max_size or len(chunk) == limits.max_datums):
            yield chunk
            chunk, filled = [], 0
        chunk.append(datum)
        filled += size
    yield chunk


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The results of all chunks as one, in the order of the chunks."""
    if not outputs:
        return ForwardBackwardOutput()
    weights = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        outputs[0].loss_fn_output_type,
        [item for output in outputs for item in output.loss_fn_outputs],
        reduce_metrics([output.metrics for output in outputs], weights),
    )


def datum_size(datum: Datum) -> int:
    """About how many bytes a datum takes in a request."""
    inputs = sum(_tensor_size(tensor) for tensor in datum.loss_fn_inputs.values())
    return model_input_size(datum.model_input) + inputs


def model_input_size(model_input: ModelInput, bytes_per_token: int = 4) -> int:
    """About how many bytes an input takes; sampling counts 10 per token (contract 6.3)."""
    return sum(_chunk_size(chunk, bytes_per_token) for chunk in model_input.chunks)


def _chunk_size(chunk: Any, bytes_per_token: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return bytes_per_token * len(chunk.tokens_np)
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, ImageAssetPointerChunk):
        return len(chunk.location)
    assert isinstance(chunk, DmelChunk)
    return len(chunk.dmel)


def _tensor_size(tensor: TensorData) -> int:
    crow, col = tensor.crow_array, tensor.col_array
    indices = 0 if crow is None or col is None else 8 * (len(crow) + len(col))
    return int(tensor.array.nbytes) + indices


def datum_numbers(datum: Datum) -> int:
    """How many numbers a datum holds, counted as SDK 0.4.1 does."""
    tokens = 0
    for chunk in datum.model_input.chunks:
        tokens += (
            len(chunk.tokens_np)
            if isinstance(chunk, EncodedTextChunk)
            else _chunk_size(chunk, bytes_per_token=1)
        )
    return tokens + sum(tensor.array.size for tensor in datum.loss_fn_inputs.values())
