"""The call that asks a server what work would take there, before it is done."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture
from tinkex.client.http.call import Call
from tinkex.client.http.options import Options
from tinkex.client.session.holder import Holder
from tinkex.client.twins import awaited
from tinkex.types.account.estimates import Estimate, EstimateRequest


class EstimateCalls:
    """The part of a ServiceClient that needs no session on the server."""

    config: ClientConfig
    _lock: threading.Lock
    _holder: Holder | None
    """With a session; None before the first call that needs one."""
    _plain_holder: Holder | None
    """Without one."""

    def _sessionless(self) -> Holder:
        """The session's own holder when there is one, else one that needs no session."""
        with self._lock:
            if self._holder is not None:
                return self._holder.latest
            if self._plain_holder is None:
                self._plain_holder = Holder(self.config, with_session=False)
            return self._plain_holder

    def estimate(
        self,
        base_model: str,
        *,
        rank: int = 32,
        steps: int = 0,
        training_tokens: int = 0,
        forward_tokens: int = 0,
        prefill_tokens: int = 0,
        sample_tokens: int = 0,
        scored_tokens: Mapping[str, int] | None = None,
        state_saves: int = 0,
        sampler_saves: int = 0,
        snapshots: int = 0,
        run_id: str | None = None,
        options: Options = None,
    ) -> APIFuture[Estimate]:
        """Estimate the work of a run on this server: time, money, disk, what is left of budgets.

        By the rates that the server measured on its own work: work of a kind that it never did is
        named, and not guessed. Nothing is made or run. An extension of our servers; the recipes
        count their work by `tinkex.recipes.plans`.

        Args:
            base_model: The model that is trained and sampled.
            rank: Rank of the LoRA adapter; checkpoints grow with it.
            steps: Optimizer steps.
            training_tokens: Tokens through `forward_backward`.
            forward_tokens: Tokens through `forward`.
            prefill_tokens: Tokens of prompts that are sampled from or scored.
            sample_tokens: Tokens that are sampled.
            scored_tokens: Tokens of prompts that other base models score, by their names.
            state_saves: Checkpoints with the state of the optimizer.
            sampler_saves: Checkpoints of weights alone.
            snapshots: Weights that are sampled from and not kept.
            run_id: A run that goes on, whose budgets hold, too.
        """
        scored: Any = {} if scored_tokens is None else scored_tokens  # the message refuses the rest
        request = EstimateRequest(
            base_model=base_model,
            rank=rank,
            steps=steps,
            training_tokens=training_tokens,
            forward_tokens=forward_tokens,
            prefill_tokens=prefill_tokens,
            sample_tokens=sample_tokens,
            scored_tokens=scored,
            state_saves=state_saves,
            sampler_saves=sampler_saves,
            snapshots=snapshots,
            run_id=run_id,
        )
        holder, call = self._sessionless(), Call.to("estimate", request).having(options)
        return holder.spawn(lambda waiting: holder.ask(call, Estimate, waiting), call.limits)

    estimate_async = awaited(estimate)
