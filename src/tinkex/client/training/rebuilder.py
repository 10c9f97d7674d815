"""Make a new run from the checkpoints of a lost one.

One attempt at a time: connect, take the first checkpoint that can still be loaded. When to try, and
what to repeat on the new run, is for `recovering_client.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.recovery.call_log import CallLog, SavedPoint
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.session.holder import Holder
from tinkex.errors import (
    BadRequestError,
    NotFoundError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)

if TYPE_CHECKING:
    from tinkex.client.training.training_client import TrainingClient

logger = logging.getLogger("tinkex.recovery")


class HopelessError(TinkerError):
    """Trying again will not help."""


class Rebuilder:
    def __init__(self, policy: RecoveryPolicy, log: CallLog, config: ClientConfig) -> None:
        self._policy = policy
        self._log = log
        self._config = config

    def connect(self) -> Holder:
        """A new session for one attempt, which gives up sooner than a patient program would."""
        if self._policy.connect is not None:
            try:
                return self._policy.connect().holder
            except Exception as exc:  # the user's own code: whatever it raises may pass
                raise RetryableException(f"connect() failed: {exc!r}") from exc
        window_s = min(self._config.retry_window_s, self._policy.attempt_timeout_s)
        return Holder(self._config.replace(retry_window_s=window_s))

    def load_first(
        self, holder: Holder, run_ids: Sequence[str]
    ) -> tuple[SavedPoint, TrainingClient]:
        """A new run from the first checkpoint that can still be loaded."""
        known = self._known(holder, run_ids)
        refusals = self._log.distrusted(known)
        for saved in self._log.candidates(known):
            try:
                return saved, self._load(holder, saved.path, run_ids[-1])
            except (NotFoundError, BadRequestError, RequestFailedError) as exc:
                # The server's own trouble says nothing about the checkpoint; an older one would
                # throw work away. That is for the next attempt.
                if exc.category != "user":
                    raise
                logger.warning("Checkpoint %s cannot be loaded: %s", saved.path, exc)
                refusals.append(f"{saved.path}: {exc}")
        raise HopelessError(
            "no checkpoint can be loaded. "
            + ("; ".join(refusals) or "None was saved: set save_every_steps, or call save_state.")
        )

    def _load(self, holder: Holder, path: str, lost_run_id: str) -> TrainingClient:
        from tinkex.client.training.creation import create_from_state

        wanted = types.LoadWeightsRequest(
            path=path,
            user_metadata={"recovered_from": lost_run_id},
            optimizer=self._policy.restore_optimizer,
        )
        return holder.spawn(lambda waiting: create_from_state(holder, wanted, waiting)).result()

    def _known(self, holder: Holder, run_ids: Sequence[str]) -> list[SavedPoint]:
        """The checkpoints there are, newest first."""
        if self._policy.checkpoint.startswith("tinker://"):
            return [SavedPoint(self._policy.checkpoint, self._log.position)]
        # What we saw being saved stands where we know; a listing is asked for only without it.
        if self._log.saved:
            return self._log.saved[::-1]
        rest = RestClient(holder)
        found: list[types.Checkpoint] = []
        for run_id in run_ids:
            with contextlib.suppress(NotFoundError):
                found += rest.list_checkpoints(run_id).result().checkpoints
        return self._log.place(found)
