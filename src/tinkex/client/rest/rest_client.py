"""Listings, checkpoints, sessions: the calls that answer at once.

Each method says so with a future that can be awaited, and has an `_async` twin that gives the plain
value. Paths and scopes are checked before anything is sent. Needs no session.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal

from tinkex import types
from tinkex.client import validation
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.older_sdk import DirectFuture
from tinkex.client.rest.caller import Caller
from tinkex.client.session.holder import parse
from tinkex.client.twins import awaited
from tinkex.errors import ConfigError, InvalidInputError, RequestFailedError
from tinkex.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinkex.client.rest.admin_client import AdminClient

AccessScope = Literal["owned", "accessible"]
_TRACE_POLL_S = 5.0


class RestClient(Caller):
    """Training runs, checkpoints and sessions of an account."""

    # -- training runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """A training run, by its id."""
        scope = validation.check_access_scope(access_scope)
        run = _segment(training_run_id, "training_run_id")
        return self._ask("get_training_run", query={"access_scope": scope}, run_id=run)

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """The training run that made a checkpoint."""
        run, _ = validation.check_tinker_path(tinker_path)
        scope = validation.check_access_scope(access_scope)
        method, query = "get_training_run_by_tinker_path", {"access_scope": scope}
        return self._ask(method, "get_training_run", query=query, run_id=run)

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """A page of training runs; `cursor.total_count` says how many there are."""
        query = {
            **_page(limit, offset),
            "access_scope": validation.check_access_scope(access_scope),
            "project_id": project_id,
        }
        return self._ask("list_training_runs", query=query)

    list_training_runs_async = awaited(list_training_runs)

    def iter_training_runs(
        self, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Iterator[types.TrainingRun]:
        """All training runs, page by page as they are read. Waits between pages."""
        return _all(
            lambda offset: self.list_training_runs(100, offset, access_scope, project_id),
            "training_runs",
        )

    # -- checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[types.CheckpointsListResponse]:
        """All checkpoints of one run."""
        run = _segment(training_run_id, "training_run_id")
        return self._ask("list_checkpoints", run_id=run)

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[types.CheckpointsListResponse]:
        """A page of all checkpoints of the account, newest first."""
        return self._ask("list_user_checkpoints", query=_page(limit, offset))

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def iter_user_checkpoints(self) -> Iterator[types.Checkpoint]:
        """All checkpoints of the account, page by page as they are read. Waits between pages."""
        return _all(lambda offset: self.list_user_checkpoints(100, offset), "checkpoints")

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[types.WeightsInfoResponse]:
        """The base model, rank and layers that a checkpoint was trained from."""
        validation.check_tinker_path(tinker_path)
        request = types.WeightsInfoRequest(tinker_path=tinker_path)
        return self._ask("get_weights_info_by_tinker_path", "weights_info", request)

    get_weights_info_by_tinker_path_async = awaited(get_weights_info_by_tinker_path)

    def get_external_weights_urls(
        self, tinker_path: str
    ) -> APIFuture[types.ExternalWeightsUrlsResponse]:
        """Signed addresses of the files of an exported checkpoint."""
        parts = _parts(tinker_path, kinds=("external_weights",))
        return self._ask("get_external_weights_urls", "external_weights_urls", **parts)

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[types.CheckpointArchiveUrlResponse]:
        """A signed address of a checkpoint as one archive. Tinkex and old servers only."""
        parts = _checkpoint(training_run_id, checkpoint_id)
        call = self._call("get_checkpoint_archive_url", "checkpoint_archive", **parts)

        async def fetch(waiting: Waiting) -> types.CheckpointArchiveUrlResponse:
            reply = await self.holder.transport.archive(call)
            return parse(reply, types.CheckpointArchiveUrlResponse)

        return self.holder.spawn(fetch)

    get_checkpoint_archive_url_async = awaited(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[types.CheckpointArchiveUrlResponse]:
        """Like `get_checkpoint_archive_url`, from a path."""
        return self.get_checkpoint_archive_url(*validation.check_tinker_path(tinker_path))

    get_checkpoint_archive_url_from_tinker_path_async = awaited(
        get_checkpoint_archive_url_from_tinker_path
    )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint for good."""
        return self._ask("delete_checkpoint", **_checkpoint(training_run_id, checkpoint_id))

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint for good."""
        method = "delete_checkpoint_from_tinker_path"
        return self._ask(method, "delete_checkpoint", **_parts(tinker_path))

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everyone read a checkpoint."""
        method = "publish_checkpoint_from_tinker_path"
        return self._ask(method, "publish_checkpoint", **_parts(tinker_path))

    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint private again."""
        method = "unpublish_checkpoint_from_tinker_path"
        return self._ask(method, "unpublish_checkpoint", **_parts(tinker_path))

    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire after so many seconds; None keeps it for good."""
        parts = _parts(tinker_path)
        request = types.SetCheckpointTtlRequest(ttl_seconds=validation.check_ttl(ttl_seconds))
        method = "set_checkpoint_ttl_from_tinker_path"
        return self._ask(method, "set_checkpoint_ttl", request, **parts)

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def name_checkpoint(self, tinker_path: str, name: str) -> APIFuture[None]:
        """Give a checkpoint a short name; one that is in use moves to it. Tinkex servers only."""
        validation.check_tinker_path(tinker_path)
        request = ENDPOINTS["name_checkpoint"].request(name=name, path=tinker_path)
        return self._send(self._call("name_checkpoint", request=request))

    name_checkpoint_async = awaited(name_checkpoint)

    def list_checkpoint_names(self) -> APIFuture[types.CheckpointNamesResponse]:
        """The short names of the account's checkpoints. Tinkex servers only."""
        return self._ask("list_checkpoint_names")

    list_checkpoint_names_async = awaited(list_checkpoint_names)

    def remove_checkpoint_name(self, name: str) -> APIFuture[None]:
        """Take a short name back; the checkpoint stays. Tinkex servers only."""
        return self._send(self._call("remove_checkpoint_name", name=_segment(name, "name")))

    remove_checkpoint_name_async = awaited(remove_checkpoint_name)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project; gives the new path. Repeating a call copies once."""
        validation.check_tinker_path(path, name="path")
        project = destination_project_id or os.environ.get("TINKER_PROJECT_ID")
        if not project:
            raise ConfigError(
                "copy_weights needs a project: pass destination_project_id= or set "
                "TINKER_PROJECT_ID."
            )
        request = types.CopyWeightsRequest(
            source_path=path,
            destination_project_id=project,
            ttl_seconds=validation.check_ttl(ttl_seconds),
        )
        # One key for every try: whichever of them arrived, the checkpoint is copied once.
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token
        answer = self._ask("copy_weights", request=request, headers=headers)

        async def copied(waiting: Waiting) -> str:
            copy: types.CopyWeightsResponse = await answer
            return copy.tinker_path

        return self.holder.spawn(copied)

    copy_weights_async = awaited(copy_weights)

    # -- sessions

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.GetSessionResponse]:
        """The runs and samplers of one session."""
        scope = validation.check_access_scope(access_scope)
        session = _segment(session_id, "session_id")
        return self._ask("get_session", query={"access_scope": scope}, session_id=session)

    get_session_async = awaited(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.ListSessionsResponse]:
        """A page of session ids."""
        scope = validation.check_access_scope(access_scope)
        return self._ask("list_sessions", query={**_page(limit, offset), "access_scope": scope})

    list_sessions_async = awaited(list_sessions)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        session = _segment(session_id, "session_id")
        request = types.AssignSessionProjectRequest(project_id=project_id)
        return self._ask("assign_session_project", request=request, session_id=session)

    assign_session_project_async = awaited(assign_session_project)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """The address of a session's trace, once the server has built it."""
        session = _segment(session_id, "session_id")
        call = self._call("export_session_trace", session_id=session)

        async def export(waiting: Waiting) -> str:
            while True:
                answer = await self.holder.ask(call, types.TraceExportResponse, waiting)
                if answer.status == "ready" and answer.url:
                    return answer.url
                if answer.status != "pending":
                    raise RequestFailedError(
                        f"The trace of session {session_id} could not be built: {answer.error}",
                        category="server",
                    )
                waiting.state, waiting.reason = "queued", "the server is building the trace"
                await asyncio.sleep(_TRACE_POLL_S)

        return self.holder.spawn(export)

    export_session_trace_async = awaited(export_session_trace)

    def search_sessions(
        self, request: types.SessionSearchRequest
    ) -> APIFuture[types.SessionSearchResponse]:
        """Sessions by owner, name, status or metadata. Experimental."""
        return self._ask("search_sessions", request=request)

    search_sessions_async = awaited(search_sessions)

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """The weights that a sampling session samples from."""
        return self._ask("get_sampler", sampler_id=_segment(sampler_id, "sampler_id"))

    get_sampler_async = awaited(get_sampler)

    def whoami(self) -> APIFuture[types.WhoamiResponse]:
        """Whose credential this is, read from its token; asks the server only for a token."""

        async def read(waiting: Waiting) -> types.WhoamiResponse:
            await self.holder.tokens.token()
            claims = self.holder.tokens.token_claims
            if not claims.get("sub") or not claims.get("org_id"):
                raise ConfigError(
                    "whoami needs a token, and this server takes the API key as it is. It has no "
                    "name to show."
                )
            return types.WhoamiResponse(
                user_urn=str(claims["sub"]),
                org_urn=f"tml:organization:{claims['org_id']}",
                email=claims.get("email") or None,
            )

        return self.holder.spawn(read)

    whoami_async = awaited(whoami)

    # -- moved to AdminClient

    def get_audit_log(
        self, event_type: str = "all", day: date | str | None = None
    ) -> APIFuture[types.AuditLogResponse]:
        """Deprecated: use AdminClient."""
        return self._admin("get_audit_log").get_audit_log(event_type, day)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[types.BillingUsageResponse]:
        """Deprecated: use AdminClient."""
        return self._admin("get_billing_usage").get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use AdminClient."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    def _admin(self, method: str) -> AdminClient:
        # Here, because its messages are many and few programs need them.
        from tinkex.client.rest.admin_client import AdminClient

        warnings.warn(
            f"RestClient.{method} moved to AdminClient.{method}.", FutureWarning, stacklevel=3
        )
        return AdminClient(self.holder)


if TYPE_CHECKING:

    class RestClientFuture(DirectFuture[RestClient], RestClient):
        """For type checkers: await it, ask for its result, or use it as the client."""

else:
    RestClientFuture = DirectFuture


def _page(limit: int, offset: int) -> dict[str, int]:
    for name, value in (("limit", limit), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInputError(f"must be a whole number from 0, got {value!r}", path=name)
    return {"limit": limit, "offset": offset}


def _segment(value: str, name: str) -> str:
    """An id that may stand in a URL path as it is."""
    if not isinstance(value, str) or not value or any(c in value for c in "/?#% \n"):
        raise InvalidInputError(f"expected an id, got {value!r}", path=name)
    return value


def _checkpoint(training_run_id: str, checkpoint_id: str) -> dict[str, Any]:
    """Like `_parts`, of a run and `weights/NAME` or one of its friends."""
    run = _segment(training_run_id, "training_run_id")
    return {**_parts(f"tinker://run/{checkpoint_id}", name="checkpoint_id"), "run_id": run}


def _parts(tinker_path: str, **options: Any) -> dict[str, Any]:
    """The parts of a checkpoint's path that fill the path of an endpoint."""
    run, checkpoint = validation.check_tinker_path(tinker_path, **options)
    kind, _, name = checkpoint.partition("/")
    return {"run_id": run, "kind": kind, "name": name}


def _all(page_at: Callable[[int], APIFuture[Any]], rows: str) -> Iterator[Any]:
    offset = 0
    while True:
        page = page_at(offset).result()
        page_rows = getattr(page, rows)
        yield from page_rows
        offset += len(page_rows)
        if not page_rows or page.cursor is None or offset >= page.cursor.total_count:
            return
