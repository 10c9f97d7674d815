"""Estimates of what a run will use, before it is made. An extension of ours."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING
from tinkex.types.account.budgets import BudgetInfo
from tinkex.types.fields.bounds import Count, Id, Name, Number
from tinkex.types.fields.message import Listing, Request, Response


class EstimateRequest(Request):
    """The work of a run that is to be estimated."""

    base_model: Name
    rank: Annotated[int, Between(1, 65_536, becomes=NOTHING)] = 32
    steps: Count = 0
    """Optimizer steps."""
    training_tokens: Number = 0
    """Through forward_backward."""
    forward_tokens: Number = 0
    """Through forward: evaluations. They count as prefilled ones where tokens are billed."""
    prefill_tokens: Number = 0
    """Of prompts that are sampled from or scored."""
    sample_tokens: Number = 0
    scored_tokens: Annotated[dict[Name, Number], Field(max_length=16)] = Field(default_factory=dict)
    """Of prompts that other base models score, such as a teacher, by their names."""
    state_saves: Count = 0
    """Checkpoints with the optimizer, to train on from."""
    sampler_saves: Count = 0
    """Checkpoints of weights alone, to sample from."""
    snapshots: Count = 0
    """Weights that are sampled from once and not kept."""
    run_id: Id | None = None
    """A run that goes on, whose budgets hold, too."""


class BudgetOutlook(Response):
    """A budget, and what a run would take of it."""

    budget: BudgetInfo
    left: float
    """Neither spent nor reserved."""
    needed: float | None
    """By the run, in the unit of the budget; None where that was never measured."""
    is_passed: bool
    """The run would not end within it."""


class Estimate(Response):
    """The time, money and room that a run will use, by what its server measured."""

    device_seconds: float | None = None
    """How long the device will compute; also the time that the run takes where nothing else runs.
    None: some of its work was never done here, see `unmeasured`."""
    unmeasured: Listing[str] = Field(default_factory=list)
    """Kinds of work of the run that this server has not done on this base model yet."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Measured, a second: tokens by forward_backward, forward, prefill and sample; optimizer steps
    and saves."""
    money: float | None = None
    """By the prices of the server; None where it has none."""
    budgets: Listing[BudgetOutlook] = Field(default_factory=list)
    """Those that hold for the caller, the key, and the run that goes on."""
    checkpoint_bytes: int | None = None
    """Of all checkpoints of the run; None where none of this base model was saved here yet."""
    disk_left_bytes: int | None = None
    """That the caller may still store; None where there is no quota."""
