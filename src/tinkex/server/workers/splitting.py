"""How a training pass is split for several members, and its answer put together again.

Parts are as even as their tokens allow, given what each member has to do already. In deterministic
mode whole virtual shards move, and one that a member has begun stays with it until the next step.
Numbers and jobs only; who the members are, and whether it pays to split, `placement` decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinkex.engine.jobs import Array, TrainJob, TrainResult
from tinkex.engine.metrics import join
from tinkex.engine.optim.shards import NUM_SHARDS, deal
from tinkex.errors import InvalidInputError

_DATUM = re.compile(r"\bdata\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class JobPart:
    """Some datums of a job, for one of the members that share the adapter."""

    index: int
    """Of the member among them."""
    indices: tuple[int, ...]
    shards: tuple[int, ...]
    """Of these datums; empty where the order of sums may vary."""
    num_tokens: int


def split(
    costs: Sequence[int], loads: Sequence[float], pins: Mapping[int, int] | None
) -> list[JobPart]:
    """Deal datums to members, whose `loads` are what they have to do already.

    Args:
        pins: The member of each virtual shard that has one; None: there are no shards.
    """
    shards = [] if pins is None else deal(costs)
    if len(loads) == 1:  # as nearly always
        return [JobPart(0, tuple(range(len(costs))), tuple(shards), sum(costs))]
    if pins is None:
        members = deal(costs, len(loads), loads)
    else:
        member_of = _members_of_shards(costs, shards, loads, pins)
        members = [member_of[shard] for shard in shards]
    parts = []
    for member in sorted(set(members)):
        indices = tuple(i for i, chosen in enumerate(members) if chosen == member)
        of_shards = tuple(shards[i] for i in indices) if shards else ()
        parts.append(JobPart(member, indices, of_shards, sum(costs[i] for i in indices)))
    return parts


def _members_of_shards(
    costs: Sequence[int], shards: Sequence[int], loads: Sequence[float], pins: Mapping[int, int]
) -> dict[int, int]:
    weights = [0] * NUM_SHARDS
    for cost, shard in zip(costs, shards, strict=True):
        weights[shard] += cost
    filled = list(loads)
    for shard, member in pins.items():
        filled[member] += weights[shard]
    free = [shard for shard in range(NUM_SHARDS) if shard not in pins]
    dealt = deal([weights[shard] for shard in free], len(loads), filled)
    return {**pins, **dict(zip(free, dealt, strict=True))}


def part_of(job: TrainJob, part: JobPart) -> TrainJob:
    return replace(
        job,
        job_id=f"{job.job_id}/{part.index}",
        data=tuple(job.data[i] for i in part.indices),
        shards=part.shards,
    )


def joined(parts: Sequence[JobPart], results: Sequence[TrainResult]) -> TrainResult:
    """The answer to the whole job, in the order of its datums."""
    outputs: dict[int, Mapping[str, Array]] = {}
    for part, result in zip(parts, results, strict=True):
        outputs.update(zip(part.indices, result.outputs, strict=True))
    tally = join([result.tally for result in results])
    return TrainResult(
        outputs=tuple(outputs[i] for i in range(len(outputs))),
        metrics=tally.metrics(),
        num_tokens=sum(result.num_tokens for result in results),
        tally=tally,
        turns=tuple(turn for result in results for turn in result.turns),
    )


def renumbered(error: InvalidInputError, part: JobPart) -> InvalidInputError:
    """A refusal of a part, its datums counted as in the whole job."""

    def whole(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"data[{part.indices[index]}]" if index < len(part.indices) else found[0]

    return InvalidInputError(_DATUM.sub(whole, str(error)))
