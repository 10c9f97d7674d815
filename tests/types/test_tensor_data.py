"""R3: tensors from and to lists, numpy and torch, dense and sparse."""

from __future__ import annotations

import json
import logging
import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.errors import InvalidInputError
from tinkex.types import TensorData, TensorDtype
from tinkex.types.data import arrays
from tinkex.wire import Generation, requests


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros(3, np.float64), "float32"),
        (np.zeros(3, np.float16), "float32"),
        (np.zeros(3, np.int32), "int64"),
        (np.zeros((2, 3), np.uint8), "int64"),
    ],
)
def test_numpy_becomes_one_of_two_dtypes_and_keeps_its_shape(array, dtype):
    tensor = TensorData.from_numpy(array)
    assert tensor.dtype == dtype
    assert tensor.shape == list(array.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_torch_round_trip_keeps_values_and_shape(dtype):
    given = torch.arange(6).reshape(2, 3).to(dtype)
    back = TensorData.from_torch(given).to_torch()
    assert torch.equal(back.double(), given.double())
    assert back.dtype in (torch.float32, torch.int64)


def test_torch_tensor_with_a_gradient_is_detached():
    tensor = TensorData.from_torch(torch.ones(2, requires_grad=True))
    assert tensor.data == [1.0, 1.0]


def test_shape_none_differs_from_a_given_shape():
    flat = TensorData(data=[1, 2], dtype="int64")
    shaped = TensorData(data=[1, 2], dtype="int64", shape=[2])
    assert flat.shape is None
    assert shaped.shape == [2]
    assert flat != shaped


def test_the_array_given_is_copied_and_the_one_inside_cannot_be_written():
    given = np.ones(3, np.float32)
    tensor = TensorData.from_numpy(given)
    given[0] = 9
    assert tensor.data == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="read-only"):
        tensor.array[0] = 9
    copy = tensor.to_numpy()
    copy[0] = 9
    assert tensor.data == [1.0, 1.0, 1.0]


def test_a_sparse_tensor_reads_densely_with_its_pad_value():
    tensor = TensorData([5, 6], "int64", [3, 4], [0, 1, 1, 2], [2, 0])
    assert tensor.tolist(-1) == [[-1, -1, 5, -1], [-1] * 4, [6, -1, -1, -1]]
    assert tensor.to_torch().sum() == 11


def test_sparse_is_used_only_when_it_is_smaller():
    dense = torch.zeros(8, 8)
    dense[2, 3] = 1.5
    assert TensorData.from_torch_sparse(dense).is_sparse
    assert not TensorData.from_torch_sparse(torch.ones(2, 2)).is_sparse
    assert torch.equal(TensorData.from_torch_sparse(dense).to_torch(), dense)


@pytest.mark.parametrize(
    ("make", "path", "words"),
    [
        (lambda: TensorData([1, "a"], "int64"), "data[1]", "'a'"),
        (lambda: TensorData([1.5], "int64"), "data[0]", "1.5"),
        (lambda: TensorData([1, None], "float32"), "data[1]", "None"),
        (lambda: TensorData([2**70], "int64"), "data[0]", "int64"),
        (lambda: TensorData([1e300], "float32"), "data[0]", "float32"),
        (lambda: TensorData([1], "int32"), "dtype", "int32"),
        (lambda: TensorData([1]), "dtype", "needed"),
        (lambda: TensorData([1, 2], "int64", [3]), "", "expected 3 values for shape [3], got 2"),
        (lambda: TensorData([1, 2], "int64", [-2]), "shape", "0 or more"),
        (lambda: TensorData([1, 2], "int64", [1.5]), "shape", "1.5"),
        (lambda: TensorData([[1, 2], [3]], "int64"), "data", "rectangular"),
        (lambda: TensorData(np.array(["a"])), "data", "does not travel"),
        (lambda: TensorData(np.array([True])), "data", "astype"),
        (lambda: TensorData(np.array([1.5]), "int64"), "data", "int64"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1]), "sparse_col_indices", "both"),
        (lambda: TensorData([1], "int64", [1], [0, 1], [0]), "shape", "2-D"),
        (lambda: TensorData([1], "int64", [2, 2], [0, 1], [0]), "sparse_crow_indices", "3"),
        (lambda: TensorData([1], "int64", [1, 2], [0, 1], [2]), "sparse_col_indices", "0..1"),
        (lambda: TensorData([1], "int64", [1, 2], [1, 1], [0]), "sparse_crow_indices", "rise"),
        (
            lambda: TensorData([1, 2, 3, 4], "int64", [2, 3], [0, 1, 4], [2, 1, 0, 1]),
            "sparse_col_indices",
            "row 1 has column 1 twice",
        ),
        (lambda: TensorData([1], "int64", [1, 2], [0, 1], [0, 1]), "sparse_col_indices", "got 2"),
        (lambda: TensorData([1], "int64").to_numpy(True), "pad_value", "True"),
    ],
)
def test_bad_input_is_a_value_error_that_says_what_and_where(make, path, words):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert caught.value.path == path
    assert words in str(caught.value)


def test_losing_precision_is_logged_once(caplog):
    arrays._warned.clear()
    with caplog.at_level(logging.WARNING, "tinkex.types"):
        TensorData.from_numpy(np.array([0.1]))
        TensorData.from_numpy(np.array([0.2]))
        TensorData.from_numpy(np.array([0.5]))
    assert len(caplog.records) == 1
    assert "float32" in caplog.text


def test_unsigned_values_that_do_not_fit_are_cast_and_logged_once(caplog):
    """R3, as settled: unsigned integers become int64, with a warning where that loses something."""
    arrays._warned.clear()
    with caplog.at_level(logging.WARNING, "tinkex.types"):
        assert TensorData(np.array([7, 2**63 - 1], np.uint64)).tolist() == [7, 2**63 - 1]
        assert not caplog.records
        assert TensorData(np.array([7, 2**64 - 1], np.uint64)).tolist() == [7, -1]
        TensorData(np.array([2**63], np.uint64))
    assert len(caplog.records) == 1
    assert "int64" in caplog.text


def test_dtype_is_an_enum_and_a_string():
    """R4."""
    tensor = TensorData([1], "int64")
    assert tensor.dtype is TensorDtype.INT64
    assert tensor.dtype == "int64"


def test_values_are_frozen_compare_by_content_and_survive_pickling():
    tensor = TensorData([1.0, float("nan")], "float32")
    assert tensor == TensorData([1.0, float("nan")], "float32")
    assert hash(tensor) == hash(TensorData([1.0, float("nan")], "float32"))
    back = pickle.loads(pickle.dumps(tensor))
    assert back == tensor
    with pytest.raises(ValueError, match="read-only"):
        back.array[0] = 1
    with pytest.raises(AttributeError, match="frozen"):
        tensor.array = None


@pytest.mark.parametrize(("step", "megabytes"), [(0.5, 4.2), (0.1, 12.2)])
def test_a_list_of_a_million_floats_is_held_as_float32_and_as_doubles_where_those_differ(
    step, megabytes
):
    """SDK 0.4.1 sends floats unrounded, so what rounding changes must be kept; nothing else is."""
    values = [number * step for number in range(1_000_000)]
    tracemalloc.start()
    tensor = TensorData(values, "float32")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < megabytes * 1e6
    request = types.ForwardRequest(
        types.ForwardBackwardInput(
            [types.Datum(types.ModelInput.from_ints([1]), {"weights": tensor})], "ppo"
        ),
        "m",
    )
    sent = json.loads(requests.encode("forward", request, Generation.V0_4).content)
    assert sent["forward_input"]["data"][0]["loss_fn_inputs"]["weights"]["data"] == values


def test_a_number_that_float32_cannot_hold_is_named():
    with pytest.raises(InvalidInputError, match=r"data\[1\]: expected float32 values, got 1e\+39"):
        TensorData([1.0, 1e39], "float32")
    assert TensorData([float("inf"), float("nan")], "float32").data[0] == float("inf")
