"""What a teacher's logprobs make of training data: asked for, filled in, kept in the journal.

Arrays only; which weights a teacher has, and who may use them, is `work.teachers`. The scores of a
datum have the form of its targets, and are 0 in front of the first target that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.losses import CUSTOM, LOSSES, TEACHER_LOGPROBS
from tinkex.contract.teachers import PATH, TeacherName
from tinkex.engine.jobs import (
    Array,
    CsrArray,
    ModelInfo,
    SampleJob,
    SampleResult,
    TrainDatum,
    TrainResult,
)
from tinkex.engine.numerics.arrays import dense
from tinkex.errors import InvalidInputError
from tinkex.store import UsageKind

Scores = Array | CsrArray
T = TEACHER_LOGPROBS.name


@dataclass(slots=True)
class Teaching:
    """The teacher of a request, and its logprobs once they are known."""

    teacher: TeacherName
    scores: tuple[Scores, ...] = ()
    """Of each datum; empty: not computed yet."""
    num_computed: int = 0
    num_cached: int = 0
    """Tokens that it has read, and those whose logprobs were known; none in a replay."""
    device_seconds: float = 0.0
    base_model: str = ""
    """Of the teacher; empty while that of a checkpoint was not looked up."""

    @classmethod
    def of(cls, teacher: TeacherName) -> Self:
        return cls(teacher, base_model="" if teacher.is_checkpoint else teacher.name)

    def usage(self) -> dict[UsageKind, float]:
        counts: dict[UsageKind, float] = {
            "sampling_prefill": self.num_computed,
            "sampling_prefill_cached": self.num_cached,
            "device_seconds": self.device_seconds,
        }
        return {kind: count for kind, count in counts.items() if count}


# ------------------------------------------------------------------------------------ checks


def check_untaught(teaching: Teaching, loss_fn: str, data: Sequence[TrainDatum]) -> None:
    """Refuse data that have already what the teacher is to fill in.

    Raises:
        InvalidInputError: Names the field and the way out.
    """
    filled = _filled(loss_fn)
    for index, datum in enumerate(data):
        if filled and filled in datum.inputs:
            raise InvalidInputError(
                f"is what the teacher {teaching.teacher.name!r} fills in; leave out one of them",
                path=f"data[{index}].loss_fn_inputs.{filled}",
            )


def check_fit(
    data: Sequence[TrainDatum], student: ModelInfo | None, teacher: ModelInfo | None
) -> None:
    """Refuse a teacher that reads other tokens than the model that learns, or fewer of them.

    Raises:
        InvalidInputError: Names the field and the way out.
    """
    if student is not None and teacher is not None and student.vocab_size != teacher.vocab_size:
        raise InvalidInputError(
            f"{teacher.base_model!r} has a vocabulary of {teacher.vocab_size} tokens, the model "
            f"that learns one of {student.vocab_size}; choose a teacher of the same family",
            path=PATH,
        )
    for index, datum in enumerate(data):
        targets = datum.inputs["target_tokens"]
        if isinstance(targets, CsrArray):
            dense(targets, f"data[{index}].loss_fn_inputs.target_tokens")
        if teacher is not None and len(datum.tokens) >= teacher.max_context_length:
            raise InvalidInputError(
                f"{len(datum.tokens)} tokens and a target exceed the context of "
                f"{teacher.max_context_length} of the teacher; shorten it",
                path=f"data[{index}].model_input",
            )


def _filled(loss_fn: str) -> str:
    """The input that is the teacher's alone; empty when it adds to one, or is only reported."""
    if loss_fn == CUSTOM:
        return T
    return "logprobs" if LOSSES[loss_fn].teacher == "in place of q" else ""


# ------------------------------------------------------------------------------------ jobs


def score_job(
    datum: TrainDatum, loss_fn: str, *, job_id: str, base_model: str, folder: str | None, user: str
) -> SampleJob:
    """The job that scores a datum: nothing is drawn, and its last target ends the prompt."""
    targets = datum.inputs["target_tokens"]
    is_plain = is_sequence(datum)
    wanted = targets if isinstance(targets, CsrArray) or targets.ndim == 2 else targets[:, None]
    last = np.asarray(targets)[-1:] if is_plain else datum.tokens[-1:]
    skipped = first_scored(datum, loss_fn)
    return SampleJob(
        job_id=job_id,
        base_model=base_model,
        adapter_folder=folder,
        prompt=np.concatenate([datum.tokens, np.asarray(last, np.int64)]),
        max_tokens=0,
        stop_tokens=(),
        seed=0,
        # As a sampling client asks for it, so that the bits are those that it gets.
        prompt_logprobs=is_plain,
        prompt_logprobs_last_n=len(datum.tokens) - skipped if is_plain and skipped else None,
        target_prompt_logprobs=None if is_plain else wanted,
        tenant=user,
    )


def is_sequence(datum: TrainDatum) -> bool:
    """Whether each target is the token after its position, as in nearly all data."""
    targets = datum.inputs["target_tokens"]
    if isinstance(targets, CsrArray) or targets.ndim != 1:
        return False
    return bool(np.array_equal(targets[:-1], datum.tokens[1:]))


def first_scored(datum: TrainDatum, loss_fn: str) -> int:
    """The first target that counts; those before it, a prompt as a rule, cost no logits."""
    weights = datum.inputs.get("weights")
    if loss_fn == CUSTOM or weights is None or not is_sequence(datum):
        return 0
    counting = np.flatnonzero(np.asarray(weights))
    return int(counting[0]) if len(counting) else 0


def scores_of(datum: TrainDatum, loss_fn: str, result: SampleResult) -> Scores:
    """The scores that a job has brought.

    Raises:
        InvalidInputError: They are not finite.
    """
    if result.prompt_logprobs is not None:
        skipped = first_scored(datum, loss_fn)
        values = np.zeros(len(datum.tokens), np.float32)
        values[skipped:] = result.prompt_logprobs[skipped + 1 :]
        scores: Scores = values
    else:
        assert result.target_prompt_logprobs is not None
        scores = _shaped(datum, _cells(result.target_prompt_logprobs))
    if not np.isfinite(_cells(scores)).all():
        raise InvalidInputError(
            "the logprobs of the teacher are not finite; it may have diverged", path=PATH
        )
    return scores


def moved(scores: Sequence[Scores], data: Sequence[TrainDatum]) -> tuple[Scores, ...]:
    """Scores of the same last targets behind other contexts, in the form of the data's own."""
    placed = []
    for known, datum in zip(scores, data, strict=True):
        values = np.zeros(len(datum.tokens), np.float32)
        shared = min(len(datum.tokens), known.shape[0])
        values[-shared:] = np.asarray(known)[-shared:]
        placed.append(values)
    return tuple(placed)


# ------------------------------------------------------------------------------------ filling in


def taught(data: Sequence[TrainDatum], loss_fn: str, teaching: Teaching) -> tuple[TrainDatum, ...]:
    """The data as the loss of an engine reads them."""
    filled = _filled(loss_fn)
    if not filled and LOSSES[loss_fn].teacher == "reported":
        return tuple(data)
    if filled:
        new: Sequence[Scores] = teaching.scores
    else:
        filled, new = "advantages", _advantages(data, teaching)
    return tuple(
        replace(datum, inputs={**datum.inputs, filled: values})
        for datum, values in zip(data, new, strict=True)
    )


def _advantages(data: Sequence[TrainDatum], teaching: Teaching) -> list[NDArray[np.float32]]:
    """A + coef * ((t - q) - mean) of every target that counts, in float64 until the end.

    The mean is a baseline: it changes no gradient on average, and takes most of the noise away.
    """
    gaps, counts = list(_gaps(data, teaching)), [_counts(datum) for datum in data]
    baseline = mean_gap(gaps, counts)
    advantages = []
    for datum, gap, count in zip(data, gaps, counts, strict=True):
        own = np.asarray(datum.inputs.get("advantages", np.zeros(gap.shape)), np.float64)
        push = np.where(count, teaching.teacher.coef * (baseline - gap), 0.0)
        advantages.append((own + push).astype(np.float32))
    return advantages


def mean_gap(gaps: Sequence[Array], counts: Sequence[Array]) -> float:
    """How much likelier its targets are for the policy than for the teacher, on average."""
    counted = np.concatenate([gap[count] for gap, count in zip(gaps, counts, strict=True)])
    return math.fsum(counted.tolist()) / len(counted) if len(counted) else 0.0


def _gaps(data: Sequence[TrainDatum], teaching: Teaching) -> Iterator[NDArray[np.float64]]:
    for datum, scores in zip(data, teaching.scores, strict=True):
        yield np.asarray(datum.inputs["logprobs"], np.float64) - np.asarray(scores, np.float64)


def _counts(datum: TrainDatum) -> Array:
    if (weights := datum.inputs.get("weights")) is None:
        return np.ones(len(datum.tokens), bool)
    counted: NDArray[np.bool_] = np.asarray(weights) != 0
    return counted


def reported(result: TrainResult, teaching: Teaching) -> TrainResult:
    """The result with what the teacher said of each target; 0 where it was not asked."""
    outputs = tuple(
        {**output, T: dense(scores, T)}
        for output, scores in zip(result.outputs, teaching.scores, strict=True)
    )
    return replace(result, outputs=outputs)


def placeholders(data: Sequence[TrainDatum]) -> tuple[TrainDatum, ...]:
    """The data with a teacher's input of the right form, for what looks at forms alone."""
    return tuple(
        replace(datum, inputs={**datum.inputs, T: _shaped(datum, np.zeros(_num_cells(datum)))})
        for datum in data
    )


# ------------------------------------------------------------------------------------ as bytes


def pack_scores(scores: Sequence[Scores]) -> bytes:
    return b"".join(np.asarray(_cells(each), "<f4").tobytes() for each in scores)


def unpack_scores(data: Sequence[TrainDatum], packed: bytes) -> tuple[Scores, ...]:
    bounds = np.cumsum([_num_cells(datum) for datum in data])[:-1]
    parts = np.split(np.frombuffer(packed, "<f4"), bounds)
    return tuple(_shaped(datum, part) for datum, part in zip(data, parts, strict=True))


def _num_cells(datum: TrainDatum) -> int:
    return int(_cells(datum.inputs["target_tokens"]).size)


def _cells(value: Array | CsrArray) -> Array:
    return np.asarray(value.values if isinstance(value, CsrArray) else value).reshape(-1)


def _shaped(datum: TrainDatum, cells: Array) -> Scores:
    """Values of the stored cells of a datum's targets, in the form of these."""
    targets, values = datum.inputs["target_tokens"], cells.astype(np.float32, copy=False)
    if isinstance(targets, CsrArray):
        return replace(targets, values=values)
    return values.reshape(targets.shape)
