"""Where the tokens of a training example came from: which sampled sequence, which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinkex.errors import InvalidInputError
from tinkex.types.fields.plain import PlainRecord
from tinkex.types.fields.value import nest, short


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span(PlainRecord):
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise InvalidInputError(
                f"expected a non-empty id, got {self.sequence_id!r}", path="sequence_id"
            )
        for name in ("offset", "length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise InvalidInputError(f"must be an integer, 0 or more, got {value!r}", path=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptProvenanceSpan(_Span):
    """`length` tokens from `offset` on of the prompt that led to a sampled sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledProvenanceSpan(_Span):
    """`length` tokens from `offset` on of a sampled sequence."""


ProvenanceSpan: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans: TypeAlias = list[ProvenanceSpan]


_KINDS: dict[str, type[ProvenanceSpan]] = {
    "prompt_tokens": PromptProvenanceSpan,
    "sampled_tokens": SampledProvenanceSpan,
}


def span_to_dict(span: ProvenanceSpan) -> dict[str, Any]:
    """A span under the name of its kind, as protobuf has it."""
    return {name: span.to_dict() for name, kind in _KINDS.items() if type(span) is kind}


def span_from_dict(value: Any) -> ProvenanceSpan:
    """The span that `span_to_dict` wrote."""
    if isinstance(value, _Span):
        return value  # type: ignore[return-value]
    for name, kind in _KINDS.items():
        if isinstance(value, dict) and name in value:
            try:
                return kind.from_dict(value[name])
            except InvalidInputError as exc:
                raise nest(exc, name) from exc
    raise InvalidInputError(
        f"expected an object with one of {', '.join(_KINDS)}, got {short(value)}"
    )


def checked_spans(spans: Sequence[ProvenanceSpan], *, path: str) -> ProvenanceSpans:
    """The spans as a list, refusing anything else in it."""
    for index, span in enumerate(spans):
        if not isinstance(span, _Span):
            raise InvalidInputError(
                f"expected a provenance span, got {type(span).__name__}", path=f"{path}[{index}]"
            )
    return list(spans)


def check_tiling(spans: Sequence[ProvenanceSpan], num_tokens: int, *, path: str) -> None:
    """Refuse spans that do not cover `num_tokens` exactly."""
    covered = sum(span.length for span in checked_spans(spans, path=path))
    if covered != num_tokens:
        raise InvalidInputError(f"spans cover {covered} tokens of {num_tokens}", path=path)
