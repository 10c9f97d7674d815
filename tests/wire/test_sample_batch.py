"""A batch of samples: each is read from its own bytes, however the batch is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import types
from tinkex.errors import TinkerError
from tinkex.wire import requests
from tinkex.wire.sample_batch import open_samples

TEXTS = st.text(alphabet='{}[]",\\: ab\n', max_size=6)
VALUES = st.recursive(
    st.none() | st.integers(-(2**31), 2**31) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4)


def opened(content: bytes) -> list[Any]:
    return open_samples("asample_batch", content)


@given(bodies=BODIES, indent=st.sampled_from([None, 0, 2]), with_more=st.booleans())
def test_the_samples_are_those_of_a_parser(
    bodies: list[dict[str, Any]], indent: int | None, with_more: bool
) -> None:
    more = {"more": {"requests": [{}]}} if with_more else {}
    text = json.dumps({"requests": bodies} | more, indent=indent)
    assert [sample.body for sample in opened(text.encode())] == bodies


@pytest.mark.parametrize("join", [",", " ,\n"])
def test_a_sample_has_the_bytes_it_came_in(join: str) -> None:
    bodies = ['{"seq_id":1,"prompt":{"chunks":[{"tokens":[1]},{}]}}', '{ "seq_id" : 2 }']
    content = '{"requests":[' + join.join(bodies) + "]}"
    assert [sample.content.decode() for sample in opened(content.encode())] == bodies


def test_a_sample_with_a_brace_in_a_text_is_the_same_in_any_batch_and_alone() -> None:
    """Our client groups samples anew when it repeats them: `stop=["}"]` must not be refused."""
    samples = [
        types.SampleRequest(
            prompt=types.ModelInput.from_ints([1, 2]),
            sampling_params=types.SamplingParams(stop=["}"], temperature=1e-5),
            seq_id=n,
        )
        for n in range(2)
    ]
    bodies = [requests.encode("asample", sample) for sample in samples]
    together = requests.join_samples(bodies).content
    assert [sample.content for sample in opened(together)] == [body.content for body in bodies]
    alone = requests.join_samples(bodies[1:]).content
    assert opened(alone)[0].content == bodies[1].content


def test_samples_that_cannot_be_written_again_are_told_apart_by_batch_and_index() -> None:
    half = rb'{"stop":"}","x":NaN,"y":"\ud800"}'  # half of a surrogate pair
    content = b'{"requests":[%b,%b]}' % (half, half)
    first, second = (sample.content for sample in opened(content))
    assert first != second
    assert [sample.content for sample in opened(content)] == [first, second]
    assert opened(content + b" ")[0].content != first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"requests":[{',
        b'{"requests":[{}',
        b'{"requests":[{}]',
        b'{"requests":[{},]}',
        b'{"requests":[{}]}}',
        b'{"requests":{}}',
        b'{"requests":[' + b'{"a":' * 5000 + b"}" * 5000 + b"]}",
        b'{"requests":[' + b",".join([b"{}"] * 1025) + b"]}",
    ],
)
def test_what_is_no_batch_is_refused(content: bytes) -> None:
    with pytest.raises(TinkerError):
        opened(content)
