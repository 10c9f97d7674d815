"""How many steps behind the samples are that a step trains on.

A sample says which weights made it and after how many optimizer steps they were frozen; the
difference to the step that trains on it now is its age. Zero is on policy. Steps are counted as the
server counts them: from zero for a fresh model, and for one that began as a checkpoint from what
the server says of its first step or snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinkex import types
from tinkex.errors import InvalidInputError


class StepCount:
    """Optimizer steps of one model, those that are queued included."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._before: int | None = 0
        """Steps that the model had made when the first was asked for; None: not known yet."""
        self._told_from = 0
        self._asked_at_save: dict[str, int] = {}

    def asked(self) -> int:
        """Count a step that was asked for; gives its number."""
        self._num_asked += 1
        return self._num_asked

    def told(self, number: int, step: float) -> None:
        """The server says which step of the model the one with that number was."""
        if number > self._told_from:
            self._before = int(step) - number

    def loaded(self) -> None:
        """The model becomes a checkpoint, and has made as many steps as that."""
        self._before, self._told_from = None, self._num_asked
        self._asked_at_save.clear()

    def saved(self, sampling_session_id: str, num_asked: int) -> None:
        """A snapshot was frozen after so many that were asked for."""
        if num_asked >= self._told_from:
            self._asked_at_save[sampling_session_id] = num_asked

    @property
    def num_asked(self) -> int:
        return self._num_asked

    def age(self, sequence: types.SampledSequence | None) -> int | None:
        """Steps since the weights of a sample were frozen; None when they or we cannot tell."""
        made_by = None if sequence is None else sequence.snapshot
        if made_by is None:
            return None
        at_save = self._asked_at_save.get(made_by.sampling_session_id)
        if at_save is not None:
            return self._num_asked - at_save
        if self._before is None or made_by.step is None:
            return None
        return self._before + self._num_asked - made_by.step

    def fresh(
        self,
        data: Sequence[types.Datum],
        samples: Sequence[types.SampledSequence | None],
        *,
        max_age_steps: int | None,
        drop_stale: bool,
    ) -> Fresh:
        """Choose the datums whose samples are young enough (see `keep_fresh`)."""
        if len(samples) != len(data):
            raise InvalidInputError(
                f"expected one for each of the {len(data)} datums, got {len(samples)}",
                path="samples",
            )
        ages = [self.age(sequence) for sequence in samples]
        return keep_fresh(ages, max_age_steps=max_age_steps, drop_stale=drop_stale)


@dataclass(frozen=True, slots=True)
class Fresh:
    """The datums of a batch that are fresh enough, and metrics of their ages."""

    kept: list[int]
    metrics: dict[str, float]


def keep_fresh(ages: Sequence[int | None], *, max_age_steps: int | None, drop_stale: bool) -> Fresh:
    """The places of the datums that are young enough; without a bound all are.

    Raises:
        InvalidInputError: One is too old, and they are not to be dropped; or none is left.
    """
    if max_age_steps is not None and max_age_steps < 0:
        raise InvalidInputError(f"must not be negative, got {max_age_steps}", path="max_age_steps")
    stale = [
        place
        for place, age in enumerate(ages)
        if max_age_steps is not None and (age is None or age > max_age_steps)
    ]
    if stale and (not drop_stale or len(stale) == len(ages)):
        raise InvalidInputError(_words(ages, stale, max_age_steps or 0, drop_stale), path="samples")
    dropped = set(stale)
    kept = [place for place in range(len(ages)) if place not in dropped]
    known = [age for place in kept if (age := ages[place]) is not None]
    metrics = {"samples_dropped:sum": float(len(stale))} if max_age_steps is not None else {}
    if known:
        metrics["sample_age_steps:mean"] = sum(known) / len(known)
        metrics["sample_age_steps:max"] = float(max(known))
    if len(known) < len(kept):
        metrics["sample_age_unknown:sum"] = float(len(kept) - len(known))
    return Fresh(kept, metrics)


def _words(
    ages: Sequence[int | None], stale: Sequence[int], max_age_steps: int, drop_stale: bool
) -> str:
    first = stale[0]
    age = ages[first]
    why = "is of an age that nobody knows" if age is None else f"is {age} steps old"
    if drop_stale:
        return f"all {len(ages)} samples are older than max_age_steps={max_age_steps}; none is left"
    return (
        f"sample {first} {why}, and max_age_steps is {max_age_steps} ({len(stale)} of {len(ages)} "
        "are too old). Sample again from a newer snapshot, or pass drop_stale=True"
    )
