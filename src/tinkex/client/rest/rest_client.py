"""Listings, checkpoints, sessions: the calls that answer at once.

Each method says so with a future that can be awaited, and has an `_async` twin that gives the plain
value. Paths and scopes are checked before anything is sent. Needs no session.
"""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from collections.abc import Iterator
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel

from tinkex import types
from tinkex.client import validation
from tinkex.client.config import ClientConfig
from tinkex.client.direct import DirectFuture, awaited
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.client.http.transport import Call
from tinkex.client.session.holder import Holder, parse, shared_holder
from tinkex.errors import ConfigError, InvalidInputError, RequestFailedError
from tinkex.wire import requests

if TYPE_CHECKING:
    from tinkex.client.rest.admin_client import AdminClient

__all__ = ["RestClient", "RestClientFuture"]

M = TypeVar("M", bound=BaseModel)
AccessScope = Literal["owned", "accessible"]
_TRACE_POLL_S = 5.0


class Caller:
    """What RestClient and AdminClient share: a session-less holder and the sdk headers."""

    def __init__(
        self,
        _holder: Holder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is None:
            _holder = shared_holder(ClientConfig.from_env(base_url=base_url, api_key=api_key))
        self.holder = _holder

    def _get(
        self,
        method: str,
        path: str,
        answer: type[M],
        query: dict[str, Any] | None = None,
        pool: str = "train",
    ) -> APIFuture[M]:
        call = Call(
            method="GET", path=path, query=query, pool=pool, headers=self._sdk_headers(method)
        )
        return self.holder.spawn(lambda waiting: self.holder.ask(call, answer, waiting))

    def _send(
        self, method: str, verb: str, path: str, body: bytes | None = None
    ) -> APIFuture[None]:
        call = Call(method=verb, path=path, body=body, headers=self._sdk_headers(method))

        async def send(waiting: Waiting) -> None:
            await self.holder.transport.call(call, waiting)

        return self.holder.spawn(send)

    def _post(
        self,
        method: str,
        path: str,
        request: BaseModel,
        answer: type[M],
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        method_body: str | None = None,
    ) -> APIFuture[M]:
        call = Call(
            method="POST",
            path=path,
            body=requests.encode(method_body or path, request).content,
            headers={**self._sdk_headers(method), **(headers or {})},
            idempotency_key=idempotency_key,
        )
        return self.holder.spawn(lambda waiting: self.holder.ask(call, answer, waiting))

    @staticmethod
    def _sdk_headers(method: str) -> dict[str, str]:
        return {"x-sdk-version": CONTRACT_VERSION, "x-sdk-method": method}

    def get_telemetry(self) -> Any:
        return self.holder.reporter

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.holder.config.base_url}>"


class RestClient(Caller):
    """Training runs, checkpoints and sessions of an account."""

    # -- training runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """One training run."""
        scope = validation.check_access_scope(access_scope)
        path = f"training_runs/{_segment(training_run_id, 'training_run_id')}"
        return self._get("get_training_run", path, types.TrainingRun, {"access_scope": scope})

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """The training run that made a checkpoint."""
        run, _ = validation.check_tinker_path(tinker_path)
        scope = validation.check_access_scope(access_scope)
        return self._get(
            "get_training_run_by_tinker_path",
            f"training_runs/{run}",
            types.TrainingRun,
            {"access_scope": scope},
        )

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """One page of training runs; `cursor.total_count` says how many there are."""
        query = {
            **_page(limit, offset),
            "access_scope": validation.check_access_scope(access_scope),
            "project_id": project_id,
        }
        return self._get("list_training_runs", "training_runs", types.TrainingRunsResponse, query)

    list_training_runs_async = awaited(list_training_runs)

    def iter_training_runs(
        self, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Iterator[types.TrainingRun]:
        """All training runs, page by page as they are read. Waits between pages."""
        offset = 0
        while True:
            page = self.list_training_runs(100, offset, access_scope, project_id).result()
            yield from page.training_runs
            offset += len(page.training_runs)
            if not page.training_runs or offset >= page.cursor.total_count:
                return

    # -- checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[types.CheckpointsListResponse]:
        """All checkpoints of one run."""
        path = f"training_runs/{_segment(training_run_id, 'training_run_id')}/checkpoints"
        return self._get("list_checkpoints", path, types.CheckpointsListResponse)

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[types.CheckpointsListResponse]:
        """One page of all checkpoints of the account, newest first."""
        return self._get(
            "list_user_checkpoints",
            "checkpoints",
            types.CheckpointsListResponse,
            _page(limit, offset),
        )

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def iter_user_checkpoints(self) -> Iterator[types.Checkpoint]:
        """All checkpoints of the account, page by page as they are read. Waits between pages."""
        offset = 0
        while True:
            page = self.list_user_checkpoints(100, offset).result()
            yield from page.checkpoints
            offset += len(page.checkpoints)
            total = page.cursor.total_count if page.cursor else offset
            if not page.checkpoints or offset >= total:
                return

    def get_weights_info_by_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[types.WeightsInfoResponse]:
        """What a checkpoint was trained from: base model, rank, layers."""
        validation.check_tinker_path(tinker_path)
        return self._post(
            "get_weights_info_by_tinker_path",
            "weights_info",
            types.WeightsInfoRequest(tinker_path=tinker_path),
            types.WeightsInfoResponse,
        )

    get_weights_info_by_tinker_path_async = awaited(get_weights_info_by_tinker_path)

    def get_external_weights_urls(
        self, tinker_path: str
    ) -> APIFuture[types.ExternalWeightsUrlsResponse]:
        """Signed addresses of the files of an exported checkpoint."""
        run, checkpoint = validation.check_tinker_path(tinker_path, kinds=("external_weights",))
        return self._get(
            "get_external_weights_urls",
            f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls",
            types.ExternalWeightsUrlsResponse,
        )

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[types.CheckpointArchiveUrlResponse]:
        """A signed address of a checkpoint as one archive. Tinkex and old servers only."""
        run = _segment(training_run_id, "training_run_id")
        path = f"training_runs/{run}/checkpoints/{_checkpoint(checkpoint_id)}/archive"
        headers = self._sdk_headers("get_checkpoint_archive_url")
        call = Call(method="GET", path=path, headers=headers)

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
        run = _segment(training_run_id, "training_run_id")
        path = f"training_runs/{run}/checkpoints/{_checkpoint(checkpoint_id)}"
        return self._send("delete_checkpoint", "DELETE", path)

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint for good."""
        run, checkpoint = validation.check_tinker_path(tinker_path)
        path = f"training_runs/{run}/checkpoints/{checkpoint}"
        return self._send("delete_checkpoint_from_tinker_path", "DELETE", path)

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everyone read a checkpoint."""
        return self._publish("publish_checkpoint_from_tinker_path", "POST", tinker_path)

    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint private again."""
        return self._publish("unpublish_checkpoint_from_tinker_path", "DELETE", tinker_path)

    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)

    def _publish(self, method: str, verb: str, tinker_path: str) -> APIFuture[None]:
        run, checkpoint = validation.check_tinker_path(tinker_path)
        return self._send(method, verb, f"training_runs/{run}/checkpoints/{checkpoint}/publish")

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire after so many seconds; None keeps it for good."""
        run, checkpoint = validation.check_tinker_path(tinker_path)
        body = orjson.dumps({"ttl_seconds": validation.check_ttl(ttl_seconds)})
        path = f"training_runs/{run}/checkpoints/{checkpoint}/ttl"
        return self._send("set_checkpoint_ttl_from_tinker_path", "PUT", path, body)

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def name_checkpoint(self, tinker_path: str, name: str) -> APIFuture[None]:
        """Give a checkpoint a short name; one that is in use moves to it. Tinkex servers only."""
        validation.check_tinker_path(tinker_path)
        body = orjson.dumps({"name": name, "path": tinker_path})
        return self._send("name_checkpoint", "POST", "checkpoint_names", body)

    name_checkpoint_async = awaited(name_checkpoint)

    def list_checkpoint_names(self) -> APIFuture[types.CheckpointNamesResponse]:
        """The short names of the account's checkpoints. Tinkex servers only."""
        kind = types.CheckpointNamesResponse
        return self._get("list_checkpoint_names", "checkpoint_names", kind)

    list_checkpoint_names_async = awaited(list_checkpoint_names)

    def remove_checkpoint_name(self, name: str) -> APIFuture[None]:
        """Take a short name back; the checkpoint stays. Tinkex servers only."""
        path = f"checkpoint_names/{_segment(name, 'name')}"
        return self._send("remove_checkpoint_name", "DELETE", path)

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
        token = {"X-Tinker-Weights-Access-Token": weights_access_token or ""}
        answer = self._post(
            "copy_weights",
            "copy_weights",
            request,
            types.CopyWeightsResponse,
            headers=token if weights_access_token else None,
            idempotency_key=str(uuid.uuid4()),
        )

        async def copied(waiting: Waiting) -> str:
            return (await answer).tinker_path

        return self.holder.spawn(copied)

    copy_weights_async = awaited(copy_weights)

    # -- sessions

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.GetSessionResponse]:
        """The runs and samplers of one session."""
        scope = validation.check_access_scope(access_scope)
        path = f"sessions/{_segment(session_id, 'session_id')}"
        return self._get("get_session", path, types.GetSessionResponse, {"access_scope": scope})

    get_session_async = awaited(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.ListSessionsResponse]:
        """One page of session ids."""
        scope = validation.check_access_scope(access_scope)
        query = {**_page(limit, offset), "access_scope": scope}
        return self._get("list_sessions", "sessions", types.ListSessionsResponse, query)

    list_sessions_async = awaited(list_sessions)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session into a project."""
        path = f"sessions/{_segment(session_id, 'session_id')}/project"
        body = orjson.dumps({"project_id": project_id})
        return self._send("assign_session_project", "PUT", path, body)

    assign_session_project_async = awaited(assign_session_project)

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """The address of a session's trace, once the server has built it."""
        path = f"sessions/{_segment(session_id, 'session_id')}/trace_export"
        call = Call(method="GET", path=path, headers=self._sdk_headers("export_session_trace"))

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
        return self._post(
            "search_sessions",
            "sessions/search",
            request,
            types.SessionSearchResponse,
            method_body="search_sessions",
        )

    search_sessions_async = awaited(search_sessions)

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        """What a sampling session samples from."""
        path = f"samplers/{_segment(sampler_id, 'sampler_id')}"
        return self._get("get_sampler", path, types.GetSamplerResponse)

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


def _checkpoint(checkpoint_id: str) -> str:
    """`weights/NAME` and friends: two segments."""
    kind, _, name = str(checkpoint_id).partition("/")
    validation.check_tinker_path(f"tinker://run/{kind}/{name}", name="checkpoint_id")
    return checkpoint_id
