"""R5: chunks and the inputs made of them."""

from __future__ import annotations

import base64
import copy
import pickle
import sys
import time

import numpy as np
import pytest
import torch

from tinkex.errors import InvalidInputError
from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)


def test_text_copies_its_tokens():
    tokens = [1, 2, 3]
    array = np.array(tokens)
    chunks = EncodedTextChunk(tokens=tokens), EncodedTextChunk(tokens=array)
    tokens[0] = array[0] = 9
    assert all(chunk.tokens == [1, 2, 3] for chunk in chunks)


@pytest.mark.parametrize(
    "tokens",
    [(1, 2), range(1, 3), np.array([1, 2], np.uint16), torch.tensor([1, 2]), iter([1, 2])],
    ids=["tuple", "range", "numpy", "torch", "iterator"],
)
def test_any_sequence_of_ints_is_accepted(tokens):
    assert ModelInput.from_ints(tokens).to_ints() == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        ("text", "tokens"),
        (5, "tokens"),
        ([1, 2.0], "tokens[1]"),
        ([2**31], "tokens[0]"),
        (np.array([1.0]), "tokens"),
        (np.array([[1]]), "tokens"),
        (np.array([2**40]), "tokens"),
    ],
)
def test_what_is_not_token_ids_is_refused_by_position(tokens, path):
    with pytest.raises(InvalidInputError) as caught:
        EncodedTextChunk(tokens=tokens)
    assert caught.value.path == path


def test_the_kind_of_a_chunk_is_found_without_its_type():
    """SDK 0.4.1 leaves `type` out."""
    plain = [
        {"tokens": [1]},
        {
            "data": base64.b64encode(b"x").decode(),
            "format": "png",
            "height": 1,
            "width": 1,
            "tokens": 4,
        },
        {"location": "l", "format": "jpeg", "expected_tokens": 2},
        {"dmel": base64.b64encode(b"\x00\x02\x07\x50").decode()},
    ]
    chunks = ModelInput(plain).chunks
    kinds = [EncodedTextChunk, ImageChunk, ImageAssetPointerChunk, DmelChunk]
    assert [type(chunk) for chunk in chunks] == kinds
    assert [chunk.length for chunk in chunks] == [1, 4, 2, 7]


def test_an_unknown_chunk_is_refused_by_position():
    with pytest.raises(InvalidInputError, match="video") as caught:
        ModelInput([{"tokens": [1]}, {"type": "video"}])
    assert caught.value.path == "chunks[1].type"


def test_an_image_without_a_size_has_no_length():
    with pytest.raises(InvalidInputError, match="expected_tokens"):
        _ = ImageChunk(b"", "png").length
    with pytest.raises(InvalidInputError, match="gif"):
        ImageChunk(b"", "gif")
    with pytest.raises(InvalidInputError, match="0 or more"):
        ImageChunk(b"", "png", -1)


@pytest.mark.parametrize("raw", [b"", b"\xfe", b"\x09\x01\x01", b"\x00\x00", b"\x00\x01\x80"])
def test_a_broken_audio_header_is_refused(raw):
    with pytest.raises(InvalidInputError):
        _ = DmelChunk(raw).length


def test_an_audio_length_is_its_first_dimension():
    assert DmelChunk(b"\xfe\x01\x02\xac\x02\x50").length == 300


def test_inputs_compare_by_value_and_grow_by_copy():
    one = ModelInput.from_ints([1, 2])
    two = one.append_int(3)
    assert one == ModelInput([EncodedTextChunk([1, 2])])
    assert two.to_ints() == [1, 2, 3]
    assert len(two.chunks) == 1
    assert one.length == 2
    assert ModelInput.empty().append(ImageChunk(b"x", "png", 5)).append_int(1).length == 6
    assert {one: 1}[copy.deepcopy(one)] == 1


def test_token_ids_of_an_image_are_refused():
    with pytest.raises(InvalidInputError, match="ImageChunk") as caught:
        ModelInput([ImageChunk(b"x", "png", 5)]).to_ints()
    assert caught.value.path == "chunks[0]"


def test_text_is_encoded_without_a_chat_template():
    """R25: what the tokenizer says, nothing added."""

    class Letters:
        def encode(self, text, add_special_tokens):
            return [ord(letter) for letter in text] + [0] * add_special_tokens

    assert ModelInput.from_text("ab", Letters()).to_ints() == [97, 98, 0]
    plain = ModelInput.from_text("ab", Letters(), add_special_tokens=False)
    assert plain.to_ints() == [97, 98]


# ------------------------------------------------------------------------------------ datums


def test_every_form_of_a_loss_input_becomes_a_tensor():
    datum = Datum(
        ModelInput.from_ints([1, 2]),
        {
            "target_tokens": [2, 3],
            "weights": torch.tensor([0.5, 1.0]),
            "advantages": np.array([1, 2.0]),
            "logprobs": TensorData([-1.0, -2.0], "float32"),
            "clip_low_threshold": (0.5, 0.25),
        },
    )
    assert all(isinstance(value, TensorData) for value in datum.loss_fn_inputs.values())
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["clip_low_threshold"].data == [0.5, 0.25]


def test_two_dimensional_torch_weights_become_sparse_when_smaller():
    weights = torch.zeros(16, 16)
    weights[0, 0] = 1
    datum = Datum(ModelInput.from_ints([1]), {"weights": weights, "logprobs": weights})
    assert datum.loss_fn_inputs["weights"].is_sparse
    assert not datum.loss_fn_inputs["logprobs"].is_sparse


def test_loss_inputs_are_a_dict_one_may_change():
    datum = Datum(ModelInput.from_ints([1]))
    datum.loss_fn_inputs["weights"] = TensorData([1.0], "float32")
    assert list(datum.loss_fn_inputs) == ["weights"]
    with pytest.raises(AttributeError, match="frozen"):
        datum.model_input = None


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ([1, "x"], "loss_fn_inputs.weights[1]", "'x'"),
        ([[1], [1, 2]], "loss_fn_inputs.weights", "rectangular"),
        ("text", "loss_fn_inputs.weights", "str"),
        (np.array([True]), "loss_fn_inputs.weights", "bool"),
    ],
)
def test_a_bad_loss_input_is_refused_by_name(value, path, words):
    with pytest.raises(InvalidInputError, match=words) as caught:
        Datum(ModelInput.from_ints([1]), {"weights": value})
    assert caught.value.path == path


def test_a_list_under_an_unknown_name_has_no_dtype():
    with pytest.raises(InvalidInputError, match="no dtype"):
        Datum(ModelInput.from_ints([1]), {"mine": [1, 2]})


def test_provenance_spans_must_tile_the_tokens():
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    prompt = PromptProvenanceSpan(sequence_id="a", length=1)
    sampled = SampledProvenanceSpan(sequence_id="a", offset=5, length=2)
    whole = SampledProvenanceSpan(sequence_id="a", length=3)
    marked = datum.with_provenance(model_input=[prompt, sampled], loss_fn_inputs=[whole])
    assert marked.model_input_spans == [prompt, sampled]
    assert pickle.loads(pickle.dumps(marked)) == marked
    with pytest.raises(InvalidInputError, match="cover 2 tokens of 3"):
        datum.with_provenance(model_input=[sampled], loss_fn_inputs=[whole])
    with pytest.raises(InvalidInputError, match="both"):
        Datum(ModelInput.from_ints([1]), {}, [prompt])
    with pytest.raises(InvalidInputError, match="0 or more"):
        PromptProvenanceSpan(sequence_id="a", length=-1)
    with pytest.raises(InvalidInputError, match="dict"):
        Datum(ModelInput.from_ints([1]), {}, [{"length": 1}], [prompt])


def test_a_thousand_datums_from_arrays_never_become_lists():
    """No per-token Python objects: memory grows by the arrays, and time by their number."""
    tokens, weights = np.arange(2048), np.ones(2048, np.float32)
    before = sys.getallocatedblocks()
    start = time.process_time()
    data = [
        Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": weights})
        for _ in range(1000)
    ]
    took = time.process_time() - start
    assert len(data) == 1000
    assert sys.getallocatedblocks() - before < 60_000  # a list each would be two million
    assert took < 2.0
