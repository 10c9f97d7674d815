"""The answer to a sample: sequences, and logprobs of the prompt when they were asked for.

Arrays are the truth; the list properties of the older SDK are made from them on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError
from tinkex.types.data.arrays import pack_flat, token_array
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.data.topk_logprobs import TopkList, TopkLogprobs
from tinkex.types.fields.plain import PlainRecord
from tinkex.types.fields.value import Value, kept, nest, readonly, set_field, short
from tinkex.types.sampling.snapshot import WeightsSnapshot
from tinkex.types.sampling.stop_reason import StopReason


@dataclass(frozen=True)
class PromptAltTokens(PlainRecord):
    """Alternative draws at each prompt position: row i belongs to prompt position i + 1."""

    tokens: TensorData
    logprobs: TensorData

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens.to_dict(), "logprobs": self.logprobs.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        if isinstance(value, Mapping):
            tensors = ("tokens", "logprobs")
            value = {name: TensorData._validate(value[name]) for name in tensors if name in value}
        return super().from_dict(value)


class SampledSequence(Value):
    """A sampled sequence. `tokens`, `logprobs` and `topk_logprobs` are lists made on first use.

    `routed_experts`, where they were asked for, has a row per token (docs/wire.md, 20.4).
    `sequence_id` is empty when the server is too old to give ids. `snapshot` says which weights
    made it, where a client sampled it; equality does not look at it.
    """

    _FIELDS = (
        "stop_reason",
        "sequence_id",
        "tokens_np",
        "logprobs_np",
        "topk_logprobs_np",
        "routed_experts",
        "snapshot",
    )
    __slots__ = (*_FIELDS, "_logprobs", "_tokens")
    stop_reason: StopReason
    sequence_id: str
    tokens_np: NDArray[np.int32]
    logprobs_np: NDArray[np.float32] | None
    topk_logprobs_np: TopkLogprobs | None
    routed_experts: TensorData | None
    snapshot: WeightsSnapshot | None

    def __init__(
        self,
        stop_reason: str,
        sequence_id: str = "",
        tokens_np: Any = None,
        logprobs_np: Any = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        *,
        tokens: Any = None,
        logprobs: Any = None,
        topk_logprobs: TopkList | None = None,
        routed_experts: TensorData | None = None,
    ) -> None:
        ids = tokens if tokens_np is None else tokens_np
        values = logprobs if logprobs_np is None else logprobs_np
        self._fill(
            parse_stop_reason(stop_reason),
            sequence_id,
            token_array([] if ids is None else ids),
            None if values is None else logprob_array(values),
            _topk(topk_logprobs_np, topk_logprobs),
            routed_experts,
            None,
        )

    @classmethod
    def wrap(
        cls,
        stop_reason: StopReason,
        sequence_id: str,
        tokens_np: NDArray[np.int32],
        logprobs_np: NDArray[np.float32] | None,
        topk_logprobs_np: TopkLogprobs | None = None,
        routed_experts: TensorData | None = None,
    ) -> Self:
        """Take arrays of the right dtype as they are."""
        arrays = tokens_np, logprobs_np, topk_logprobs_np, routed_experts
        return cls._make(stop_reason, sequence_id, *arrays, None)

    def made_by(self, snapshot: WeightsSnapshot, sequence_id: str | None = None) -> Self:
        """The same sequence, with the weights that made it and the id that it was promised."""
        name = self.sequence_id if sequence_id is None else sequence_id
        return self._replace(snapshot=snapshot, sequence_id=name)

    def _stamp(self, snapshot: WeightsSnapshot, sequence_id: str) -> None:
        """Like `made_by`, in place: for one that was just read, before anybody has seen it."""
        set_field(self, "snapshot", snapshot)
        set_field(self, "sequence_id", sequence_id)

    @kept
    def tokens(self) -> list[int]:
        listed: list[int] = self.tokens_np.tolist()
        return listed

    @kept
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else self.logprobs_np.tolist()

    @property
    def topk_logprobs(self) -> TopkList | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.tolist()

    def _content(self) -> tuple[Any, ...]:
        return super()._content()[:-1]  # all but the snapshot

    def __repr__(self) -> str:
        return (
            f"SampledSequence(stop_reason={str(self.stop_reason)!r}, "
            f"sequence_id={self.sequence_id!r}, tokens={self.tokens!r}, logprobs={self.logprobs!r})"
        )

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        tokens, logprobs = value.get("tokens"), value.get("logprobs")
        if not isinstance(tokens, list):
            raise InvalidInputError("expected a list of token ids", path="tokens")
        if logprobs is not None and not isinstance(logprobs, list):
            raise InvalidInputError("expected a list of numbers", path="logprobs")
        topk = value.get("topk_logprobs")
        if topk is not None and not isinstance(topk, list):
            raise InvalidInputError("expected a list", path="topk_logprobs")
        sequence_id = value.get("sequence_id") or ""
        if not isinstance(sequence_id, str):
            raise InvalidInputError("expected text", path="sequence_id")
        return cls(
            value.get("stop_reason", ""),
            sequence_id,
            tokens=tokens,
            logprobs=logprobs,
            topk_logprobs=topk,
            routed_experts=_experts(value, "routed_experts"),
        )

    def to_dict(self) -> dict[str, Any]:
        return _without_none(
            stop_reason=str(self.stop_reason),
            tokens=self.tokens,
            sequence_id=self.sequence_id or None,
            logprobs=None if self.logprobs_np is None else _nan_to_none(self.logprobs_np),
            topk_logprobs=self.topk_logprobs,
            routed_experts=self.routed_experts and self.routed_experts.to_dict(),
        )


class SampleResponse(Value):
    """The sequences sampled from one prompt, in the order of their sample index."""

    _FIELDS = (
        "sequences",
        "prompt_logprobs_np",
        "topk_prompt_logprobs_np",
        "target_prompt_logprobs",
        "prompt_cache_hit_tokens",
        "prompt_alt_tokens",
        "prompt_routed_experts",
    )
    __slots__ = (*_FIELDS, "_prompt_logprobs")
    sequences: list[SampledSequence]
    prompt_logprobs_np: NDArray[np.float32] | None
    topk_prompt_logprobs_np: TopkLogprobs | None
    target_prompt_logprobs: TensorData | None
    prompt_cache_hit_tokens: int
    prompt_alt_tokens: PromptAltTokens | None
    prompt_routed_experts: TensorData | None

    __hash__ = None  # type: ignore[assignment]
    type: Literal["sample"] = "sample"

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs_np: Any = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
        *,
        prompt_logprobs: Sequence[float | None] | None = None,
        topk_prompt_logprobs: TopkList | None = None,
        type: Literal["sample"] = "sample",
        prompt_routed_experts: TensorData | None = None,
    ) -> None:
        values = prompt_logprobs if prompt_logprobs_np is None else prompt_logprobs_np
        self._fill(
            # A dict is what `to_dict` makes of one.
            [SampledSequence._validate(sequence) for sequence in sequences],
            None if values is None else logprob_array(values, path="prompt_logprobs"),
            _topk(topk_prompt_logprobs_np, topk_prompt_logprobs),
            target_prompt_logprobs,
            prompt_cache_hit_tokens,
            prompt_alt_tokens,
            prompt_routed_experts,
        )

    @kept
    def prompt_logprobs(self) -> list[float | None] | None:
        """A logprob per prompt token; None where there is none, as at position 0."""
        array = self.prompt_logprobs_np
        return None if array is None else _nan_to_none(array)

    @property
    def topk_prompt_logprobs(self) -> TopkList | None:
        topk = self.topk_prompt_logprobs_np
        return None if topk is None else topk.tolist()

    def __repr__(self) -> str:
        return (
            f"SampleResponse(sequences={self.sequences!r}, "
            f"prompt_logprobs={self.prompt_logprobs!r})"
        )

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        listed = value.get("sequences")
        if not isinstance(listed, list):
            raise InvalidInputError("expected a list", path="sequences")
        sequences = []
        for index, item in enumerate(listed):
            try:
                sequences.append(SampledSequence._validate(item))
            except InvalidInputError as exc:
                raise nest(exc, f"sequences[{index}]") from exc
        for name in ("prompt_logprobs", "topk_prompt_logprobs"):
            if not isinstance(value.get(name), (list, type(None))):
                raise InvalidInputError("expected a list", path=name)
        return cls(
            sequences,
            prompt_logprobs=value.get("prompt_logprobs"),
            topk_prompt_logprobs=value.get("topk_prompt_logprobs"),
            target_prompt_logprobs=_experts(value, "target_prompt_logprobs"),
            prompt_cache_hit_tokens=_count(value.get("prompt_cache_hit_tokens")),
            prompt_alt_tokens=_alternatives(value.get("prompt_alt_tokens")),
            prompt_routed_experts=_experts(value, "prompt_routed_experts"),
        )

    def to_dict(self) -> dict[str, Any]:
        return _without_none(
            sequences=[sequence.to_dict() for sequence in self.sequences],
            type=self.type,
            prompt_cache_hit_tokens=self.prompt_cache_hit_tokens,
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            target_prompt_logprobs=self.target_prompt_logprobs
            and self.target_prompt_logprobs.to_dict(),
            prompt_alt_tokens=self.prompt_alt_tokens and self.prompt_alt_tokens.to_dict(),
            prompt_routed_experts=self.prompt_routed_experts
            and self.prompt_routed_experts.to_dict(),
        )


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _topk(rectangle: TopkLogprobs | None, listed: TopkList | None) -> TopkLogprobs | None:
    """The likeliest tokens in the form that was given; the rectangle where both were."""
    if rectangle is not None or listed is None:
        return rectangle
    return TopkLogprobs.from_list(listed)


def _experts(value: dict[str, Any], name: str) -> TensorData | None:
    experts = value.get(name)
    return None if experts is None else TensorData._validate(experts)


def _alternatives(value: Any) -> PromptAltTokens | None:
    if value is None or isinstance(value, PromptAltTokens):
        return value
    return PromptAltTokens.from_dict(value)


def parse_stop_reason(value: str) -> StopReason:
    try:
        return StopReason(value)
    except ValueError:
        raise InvalidInputError(
            f"expected a short text, such as {', '.join(StopReason)}; got {short(value)}",
            path="stop_reason",
        ) from None


def logprob_array(values: Any, *, path: str = "logprobs") -> NDArray[np.float32]:
    """float32 logprobs from a list (None becomes NaN) or an array."""
    if not isinstance(values, (list, tuple)):
        return readonly(np.array(values, dtype="<f4"))
    if None in values:
        values = [float("nan") if value is None else value for value in values]
    return pack_flat(values, "float32", path=path)


def _nan_to_none(array: NDArray[np.float32]) -> list[float | None]:
    values = array.tolist()
    for index in np.flatnonzero(np.isnan(array)).tolist():
        values[index] = None
    return values  # type: ignore[no-any-return]


def _count(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidInputError(f"expected a count, got {value!r}", path="prompt_cache_hit_tokens")
    return value
