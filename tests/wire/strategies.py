"""Hypothesis strategies for every type, built from the types' own annotations."""

from __future__ import annotations

import types as python_types
import typing
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel

from tinkex import types
from tinkex.contract.bounds import TokenNumbers

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
STORABLE = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXT = st.text(STORABLE, max_size=8)
# None inside free-form data is left out by the 0.36 dialect, so it is not there to survive.
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(
    lambda moment: moment.replace(tzinfo=UTC)
)


def tensors(*, sparse: bool = True, nonfinite: bool = False) -> st.SearchStrategy[Any]:
    """Dense tensors with and without a shape, and sparse ones."""
    floats = st.floats(width=32) if nonfinite else FLOATS
    flat = st.one_of(
        st.lists(floats, max_size=5).map(lambda v: (v, "float32")),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda v: (v, "int64")),
    )
    plain = flat.map(lambda given: types.TensorData(*given))
    shaped = flat.map(lambda given: types.TensorData(*given, shape=[len(given[0])]))
    two_d = st.tuples(st.integers(0, 3), st.integers(1, 3)).map(
        lambda size: types.TensorData.from_numpy(np.arange(size[0] * size[1]).reshape(size) * 0.5)
    )
    kinds = [plain, shaped, two_d]
    if sparse:
        kinds.append(st.integers(0, 2**32).map(_sparse))
    return st.one_of(kinds)


def _sparse(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    dense = rng.random((8, 8)).astype(np.float32) * (rng.random((8, 8)) < 0.1)
    return types.TensorData.from_numpy_sparse(dense)


def chunks(generation: str) -> st.SearchStrategy[Any]:
    count = st.integers(0, 2**31 - 1)
    formats = st.sampled_from(["png", "jpeg"])
    text = st.builds(types.EncodedTextChunk, TOKENS)
    if generation == "0.4.1":
        size = st.fixed_dictionaries({"height": count, "width": count, "tokens": count})
        image = st.builds(
            lambda data, kind, s: types.ImageChunk(data, kind, **s), st.binary(), formats, size
        )
        return text | image
    image = st.builds(types.ImageChunk, st.binary(), formats, st.none() | count)
    return text | image | st.builds(types.DmelChunk, st.binary())


def model_inputs(generation: str, *, pointers: bool) -> st.SearchStrategy[Any]:
    kinds = chunks(generation)
    if pointers:
        counts = st.integers(0, 2**31 - 1)
        make = types.ImageAssetPointerChunk
        kinds |= st.builds(make, st.just("png"), TEXT, counts)
    return st.builds(types.ModelInput, st.lists(kinds, max_size=3))


def datums(generation: str) -> st.SearchStrategy[Any]:
    inputs = st.dictionaries(TEXT, tensors(sparse=generation != "0.4.1"), max_size=3)
    plain = st.builds(types.Datum, model_inputs(generation, pointers=False), inputs)
    if generation == "0.4.1":
        return plain
    spans = st.lists(
        st.builds(
            lambda cls, name, offset, length: cls(sequence_id=name, offset=offset, length=length),
            st.sampled_from([types.PromptProvenanceSpan, types.SampledProvenanceSpan]),
            st.text(min_size=1, max_size=4),
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**63 - 1),
        ),
        min_size=1,
        max_size=2,
    )
    marked = st.builds(types.Datum, model_inputs(generation, pointers=False), inputs, spans, spans)
    return plain | marked


def passes(generation: str) -> st.SearchStrategy[Any]:
    values = FLOATS if generation == "0.4.1" else FLOATS | TEXT
    config = st.none() | st.dictionaries(TEXT, values, min_size=1, max_size=3)
    given = st.builds(
        types.ForwardBackwardInput, st.lists(datums(generation), max_size=3), TEXT, config
    )
    cls = st.sampled_from([types.ForwardBackwardRequest, types.ForwardRequest])
    # Whose turn it is has bounds in every dialect: `wire.json_requests.Address`.
    model_ids = st.text(STORABLE, min_size=1, max_size=8)
    return st.builds(
        lambda kind, g, m, s: kind(g, m, s), cls, given, model_ids, st.integers(1, 2**31 - 1)
    )


def logprobs(count: int) -> st.SearchStrategy[Any]:
    return st.lists(st.floats(width=32), min_size=count, max_size=count).map(
        lambda values: np.array(values, np.float32)
    )


@st.composite
def sample_responses(draw: Any, *, proto: bool) -> Any:
    sequences = []
    for index in range(draw(st.integers(0, 3))):
        tokens = draw(TOKENS)
        # An empty logprobs field reads as none, on both sides of the official wire too.
        scores = draw(logprobs(len(tokens))) if tokens and draw(st.booleans()) else None
        reason = draw(st.sampled_from(["length", "stop"]))
        topk = draw(st.none() | topks()) if tokens else None
        sequences.append(types.SampledSequence(reason, f"id-{index}", tokens, scores, topk))
    extras: dict[str, Any] = {}
    if proto:
        extras["target_prompt_logprobs"] = draw(st.none() | tensors(nonfinite=True))
        pair = st.builds(types.PromptAltTokens, tensors(), tensors(nonfinite=True))
        extras["prompt_alt_tokens"] = draw(st.none() | pair)
    return types.SampleResponse(
        sequences,
        draw(st.none() | logprobs(3)),
        draw(st.none() | topks()),
        prompt_cache_hit_tokens=draw(st.integers(0, 2**31 - 1)),
        **extras,
    )


def topks() -> st.SearchStrategy[Any]:
    row = st.lists(st.tuples(st.integers(1, 2**31 - 1), FLOATS), min_size=1, max_size=3)
    return (
        st.lists(st.none() | row, min_size=1, max_size=3)
        .filter(any)
        .map(types.TopkLogprobs.from_list)
    )


def pass_outputs(*, proto: bool) -> st.SearchStrategy[Any]:
    shaped = st.tuples(st.integers(0, 4), st.booleans(), st.booleans()).map(_output_tensor)
    names = st.lists(TEXT, unique=True, min_size=1, max_size=2)
    outputs = names.flatmap(
        lambda keys: st.lists(st.fixed_dictionaries(dict.fromkeys(keys, shaped)), max_size=4)
    )
    metrics = st.dictionaries(TEXT, st.floats(width=64, allow_nan=False), max_size=3)
    return st.builds(types.ForwardBackwardOutput, st.just("ArrayRecord"), outputs, metrics)


def _output_tensor(spec: tuple[int, bool, bool]) -> Any:
    rows, is_int, is_wide = spec
    array = np.arange(rows * (2 if is_wide else 1), dtype=np.int64 if is_int else np.float32)
    return types.TensorData.from_numpy(array.reshape((rows, 2)) if is_wide else array)


# ------------------------------------------------------------------------------------ models


@cache  # building a strategy takes longer than drawing from it
def models(kind: type[BaseModel], only: tuple[str, ...] | None = None) -> st.SearchStrategy[Any]:
    """Instances of a pydantic model with any subset of its optional fields."""
    required, optional = {}, {}
    for name, field in kind.model_fields.items():
        if only is not None and name not in only and not field.is_required():
            continue
        annotation: Any = field.annotation
        if field.metadata:
            annotation = Annotated[(annotation, *field.metadata)]
        target = required if field.is_required() else optional
        target[name] = _of(annotation, only is not None)
    return st.fixed_dictionaries(required, optional=optional).map(lambda given: kind(**given))


def _of(annotation: Any, old: bool) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _constrained(arguments, old)
    if origin in (Union, python_types.UnionType):
        return st.one_of([_of(argument, old) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(_of(arguments[0], old), max_size=3)
    if origin is dict:
        return st.dictionaries(_of(arguments[0], old), _of(arguments[1], old), max_size=3)
    return _simple(annotation, old)


def _constrained(arguments: tuple[Any, ...], old: bool) -> st.SearchStrategy[Any]:
    limits = {k: v for item in arguments[1:] for k, v in limits_of(item).items()}
    inner = arguments[0]
    if isinstance(arguments[1], TokenNumbers):
        between = arguments[1].between
        numbers = st.floats(between.at_least, between.at_most)
        return st.dictionaries(st.integers(0, 2**31 - 1), numbers, max_size=3)
    if inner is int:
        return st.integers(limits.get("ge", -(2**63)), limits.get("le", 2**63 - 1))
    if inner is float and limits:
        least, below = limits.get("gt", limits.get("ge")), limits.get("lt", limits.get("le"))
        edges = {"exclude_max": "lt" in limits, "exclude_min": "gt" in limits}
        return st.floats(least, below, allow_nan=False, allow_infinity=False, **edges)
    if inner is str:
        texts = st.text(STORABLE, min_size=limits.get("min_length", 0), max_size=8)
        rules = [item.func for item in arguments[1:] if isinstance(item, AfterValidator)]
        return texts.filter(lambda text: all(_allows(rule, text) for rule in rules))
    if get_origin(inner) is list:
        least = limits.get("min_length", 0)
        return st.lists(_of(get_args(inner)[0], old), min_size=least, max_size=3)
    return _of(inner, old)


def _allows(rule: Any, text: str) -> bool:
    try:
        rule(text)
    except ValueError:
        return False
    return True


def limits_of(item: Any) -> dict[str, Any]:
    """The bounds in one piece of an annotation; a pydantic Field has them in pieces of its own."""
    parts = [item, *getattr(item, "metadata", ())]
    words = {"at_least": "ge", "above": "gt", "at_most": "le", "below": "lt"}  # of a `Between`
    names = words | {n: n for n in ("ge", "gt", "le", "lt", "min_length")}
    found = [(name, getattr(part, word, None)) for part in parts for word, name in names.items()]
    return {name: limit for name, limit in found if limit is not None}


def _simple(annotation: Any, old: bool) -> st.SearchStrategy[Any]:
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXT,
        int: st.integers(-(2**63), 2**63 - 1),
        float: FLOATS,
        bool: st.booleans(),
        type(None): st.none(),
        Any: PLAIN,
        datetime: MOMENTS,
        types.TensorData: tensors().filter(lambda tensor: tensor.dtype == "int64"),
        types.ModelInput: model_inputs("0.4.1" if old else "0.36", pointers=not old),
    }
    if annotation in plain:
        return plain[annotation]
    if getattr(annotation, "__name__", "") == "AwareDatetime":
        return MOMENTS
    if isinstance(annotation, typing.ForwardRef):
        raise TypeError(f"unresolved annotation {annotation}")
    if issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    if annotation.__name__ in ("OptimizerConfigBase", "OptimParamsBase"):
        return _families(annotation)
    return models(annotation, _known_then(annotation) if old else None)


def _families(base: Any) -> st.SearchStrategy[Any]:
    if base.__name__ == "OptimizerConfigBase":
        unknown = st.just(base(type="unheard_of", beta=0.5))
        known = [types.AdamOptimizerConfig, types.DimuonOptimizerConfig]
        known += [types.MuonOptimizerConfig, types.LionOptimizerConfig]
        return st.one_of([unknown, *(models(kind) for kind in known)])
    unknown = st.just(base(type="unheard_of", beta=0.5))
    known = [types.DimuonParams, types.MuonParams, types.LionParams]
    return st.one_of([unknown, *(models(kind) for kind in known)])


def _known_then(kind: type[BaseModel]) -> tuple[str, ...]:
    from tinkex.wire.sdk_0_4 import FIELDS

    return FIELDS.get(kind.__name__) or tuple(kind.model_fields)
