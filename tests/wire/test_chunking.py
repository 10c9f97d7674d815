"""R11: batches are cut greedily, in order, and put together again."""

from __future__ import annotations

import numpy as np
import pytest

from tinkex.errors import InvalidInputError
from tinkex.types import (
    Datum,
    DmelChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
)
from tinkex.wire.chunking import LIMITS_V04, ChunkLimits, combine, datum_numbers, datum_size, split


def datum(num_tokens: int) -> Datum:
    return Datum(ModelInput.from_ints(np.zeros(num_tokens, np.int32)))


def test_a_chunk_ends_at_the_byte_limit_and_at_the_count_limit():
    by_bytes = split([datum(10)] * 5, ChunkLimits(max_datums=100, max_size=80))
    assert [len(chunk) for chunk in by_bytes] == [2, 2, 1]
    by_count = split([datum(10)] * 5, ChunkLimits(max_datums=2, max_size=10**9))
    assert [len(chunk) for chunk in by_count] == [2, 2, 1]


def test_an_oversize_datum_travels_alone_and_order_is_kept():
    data = [datum(1), datum(100), datum(1), datum(2)]
    chunks = split(data, ChunkLimits(max_datums=10, max_size=100))
    assert [len(chunk) for chunk in chunks] == [1, 1, 2]
    assert [item for chunk in chunks for item in chunk] == data


def test_an_empty_batch_is_refused():
    with pytest.raises(InvalidInputError, match="at least one"):
        split([], LIMITS_V04)


def test_the_size_of_a_datum_counts_what_travels():
    sparse = TensorData([1.0], "float32", [2, 9], [0, 1, 1], [8])
    inputs = {"target_tokens": [1, 2], "weights": sparse}
    chunks = [
        ImageChunk(b"12345", "png", 1),
        ImageAssetPointerChunk("png", "s3://x", 1),
        DmelChunk(b"123"),
    ]
    given = Datum(ModelInput([*ModelInput.from_ints([1, 2, 3]).chunks, *chunks]), inputs)
    assert datum_size(given) == 3 * 4 + 5 + 6 + 3 + 2 * 8 + (4 + 8 * 3 + 8 * 1)


def test_an_older_server_counts_numbers():
    given = Datum(ModelInput.from_ints([1, 2, 3]), {"weights": [1.0, 2.0]})
    assert datum_numbers(given) == 5
    assert len(split([datum(1)] * 129, LIMITS_V04)) == 2
    assert len(split([datum(300_000)] * 2, LIMITS_V04)) == 2


def test_results_come_back_in_datum_order_with_reduced_metrics():
    def output(values, loss):
        outputs = [{"logprobs": TensorData([value], "float32")} for value in values]
        return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": loss, "x:mean": loss})

    whole = combine([output([1.0, 2.0], 3.0), output([3.0], 6.0)])
    assert [item["logprobs"].data for item in whole.loss_fn_outputs] == [[1.0], [2.0], [3.0]]
    assert whole.metrics == {"loss:sum": 9.0, "x:mean": 4.0}
    assert combine([]) == ForwardBackwardOutput()


def test_limits_must_be_positive():
    with pytest.raises(InvalidInputError, match="1 or more"):
        ChunkLimits(max_datums=0, max_size=1)
