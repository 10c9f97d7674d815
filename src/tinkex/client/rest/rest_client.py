"""Listings, checkpoints, sessions: the calls that answer at once.

Each method says so with a future that can be awaited, and has an `_async` twin that gives the plain
value. Paths and scopes are checked before anything is sent. Needs no session.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from tinkex import types
from tinkex.client import validation
from tinkex.client.deprecations import warn
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.options import CallLimits, Options
from tinkex.client.older_sdk import DirectFuture
from tinkex.client.rest.budget_calls import BudgetCalls
from tinkex.client.rest.caller import segment
from tinkex.client.rest.paged import Paged, page
from tinkex.client.rest.session_calls import AccessScope, SessionCalls
from tinkex.client.session.holder import parse
from tinkex.client.twins import awaited
from tinkex.errors import ConfigError
from tinkex.types.account.budgets import BudgetsResponse
from tinkex.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinkex.client.rest.admin_client import AdminClient
    from tinkex.types.account.administration import DeleteRunResponse, StopWorkResponse


class RestClient(SessionCalls, BudgetCalls):
    """Training runs, checkpoints and sessions of an account."""

    # -- training runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned", *, options: Options = None
    ) -> APIFuture[types.TrainingRun]:
        """A training run, by its id."""
        scope = validation.check_access_scope(access_scope)
        run = segment(training_run_id, "training_run_id")
        return self._ask(
            "get_training_run", query={"access_scope": scope}, run_id=run, options=options
        )

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned", *, options: Options = None
    ) -> APIFuture[types.TrainingRun]:
        """The training run that made a checkpoint."""
        run, _ = validation.check_tinker_path(tinker_path)
        scope = validation.check_access_scope(access_scope)
        method, query = "get_training_run_by_tinker_path", {"access_scope": scope}
        return self._ask(method, "get_training_run", query=query, run_id=run, options=options)

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """A page of training runs; `cursor.total_count` says how many there are."""
        query = {
            **page(limit, offset),
            "access_scope": validation.check_access_scope(access_scope),
            "project_id": project_id,
        }
        return self._ask("list_training_runs", query=query, options=options)

    list_training_runs_async = awaited(list_training_runs)

    def iter_training_runs(
        self,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        options: Options = None,
    ) -> Paged[types.TrainingRun]:
        """All training runs, page by page as they are read: with `for`, or with `async for`."""

        def page_at(offset: int) -> APIFuture[types.TrainingRunsResponse]:
            scope = access_scope, project_id
            return self.list_training_runs(100, offset, *scope, options=options)

        return Paged(page_at, "training_runs")

    def describe_run(
        self,
        training_run_id: str,
        *,
        name: str | None = None,
        note: str | None = None,
        tags: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        continues: tuple[str, int] | None = None,
        options: Options = None,
    ) -> APIFuture[types.TrainingRun]:
        """Name, note and tag a run, or say what it was started with. Tinkex servers only.

        What is left out stays as it is.

        Args:
            name: An empty one takes the name back; the run then goes by that of its session.
            note: Text for yourself; empty: none.
            tags: In place of those that it has.
            settings: Added to those that it has; one of the same name is replaced.
            continues: The id of a run and the step after which this one goes on from it: both are
                segments of one run from then on, and this one is its last.
        """
        request = ENDPOINTS["describe_run"].request(
            name=name,
            note=note,
            tags=None if tags is None else list(tags),
            settings=None if settings is None else dict(settings),
            continues=None if continues is None else {"run_id": continues[0], "step": continues[1]},
        )
        run = segment(training_run_id, "training_run_id")
        return self._ask("describe_run", request=request, run_id=run, options=options)

    describe_run_async = awaited(describe_run)

    def stop_run(
        self, training_run_id: str, reason: str = "", *, options: Options = None
    ) -> APIFuture[StopWorkResponse]:
        """End what a run has queued and running; its checkpoints stay. Tinkex servers only."""
        request = ENDPOINTS["stop_run"].request(reason=reason)
        run = segment(training_run_id, "training_run_id")
        return self._ask("stop_run", request=request, run_id=run, options=options)

    stop_run_async = awaited(stop_run)

    def delete_run(
        self, training_run_id: str, *, options: Options = None
    ) -> APIFuture[DeleteRunResponse]:
        """Delete a run for good: all its checkpoints, curves and state. Tinkex servers only.

        A resumed run goes with all its segments. Refused while it trains (`stop_run` ends it), and
        while a checkpoint of it is published. What it used stays billed. The result says how many
        checkpoints went (`num_checkpoints`) and their size (`freed_bytes`).
        """
        run = segment(training_run_id, "training_run_id")
        return self._ask("delete_run", run_id=run, options=options)

    delete_run_async = awaited(delete_run)

    # -- checkpoints

    def list_checkpoints(
        self, training_run_id: str, *, options: Options = None
    ) -> APIFuture[types.CheckpointsListResponse]:
        """All checkpoints of one run."""
        run = segment(training_run_id, "training_run_id")
        return self._ask("list_checkpoints", run_id=run, options=options)

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0, *, options: Options = None
    ) -> APIFuture[types.CheckpointsListResponse]:
        """A page of all checkpoints of the account, newest first."""
        return self._ask("list_user_checkpoints", query=page(limit, offset), options=options)

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def iter_user_checkpoints(self, *, options: Options = None) -> Paged[types.Checkpoint]:
        """All checkpoints of the account, page by page: with `for`, or with `async for`."""
        return Paged(
            lambda offset: self.list_user_checkpoints(100, offset, options=options), "checkpoints"
        )

    def search_checkpoints(
        self, request: types.CheckpointSearchRequest, *, options: Options = None
    ) -> APIFuture[types.CheckpointSearchResponse]:
        """Checkpoints by project, metadata, type, owner or base model, newest first. Experimental.

        Give `next_cursor` back as the `cursor` of the next request; it is None on the last page.
        """
        return self._ask("search_checkpoints", request=request, options=options)

    search_checkpoints_async = awaited(search_checkpoints)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[types.WeightsInfoResponse]:
        """The base model, rank and layers that a checkpoint was trained from."""
        validation.check_tinker_path(tinker_path)
        request = types.WeightsInfoRequest(tinker_path=tinker_path)
        return self._ask(
            "get_weights_info_by_tinker_path", "weights_info", request, options=options
        )

    get_weights_info_by_tinker_path_async = awaited(get_weights_info_by_tinker_path)

    def get_external_weights_urls(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[types.ExternalWeightsUrlsResponse]:
        """Signed addresses of the files of an exported checkpoint."""
        parts = _parts(tinker_path, kinds=("external_weights",))
        return self._ask(
            "get_external_weights_urls", "external_weights_urls", **parts, options=options
        )

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def external_weights_upload_start(
        self,
        base_model: str,
        lora_config: types.LoraConfig,
        destination_project_id: str | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.ExternalWeightsUploadStartResult]:
        """Start an upload of an adapter's files, as `save_weights_external` writes them.

        PUT every file to its address in `urls`, once, then call `external_weights_upload_finish`.
        Experimental; a server may not take uploads.
        """
        request = types.ExternalWeightsUploadStartRequest(
            base_model=base_model,
            lora_config=lora_config,
            destination_project_id=destination_project_id,
        )
        answer = self._ask("external_weights_upload_start", request=request, options=options)

        async def started(waiting: Waiting) -> types.ExternalWeightsUploadStartResult:
            new: types.ExternalWeightsUploadStartResponse = await answer
            return types.ExternalWeightsUploadStartResult(new.upload_id, new.urls, new.expires)

        return self.holder.spawn(started, CallLimits.of(options))

    external_weights_upload_start_async = awaited(external_weights_upload_start)

    def external_weights_upload_finish(
        self, upload_id: str, *, options: Options = None
    ) -> APIFuture[types.ExternalWeightsUploadFinishResult]:
        """Make a checkpoint of the files that were put. Repeating the call gives the same one."""
        request = types.ExternalWeightsUploadFinishRequest(upload_id=upload_id)
        answer = self._ask("external_weights_upload_finish", request=request, options=options)

        async def finished(waiting: Waiting) -> types.ExternalWeightsUploadFinishResult:
            new: types.ExternalWeightsUploadFinishResponse = await answer
            return types.ExternalWeightsUploadFinishResult(new.tinker_path)

        return self.holder.spawn(finished, CallLimits.of(options))

    external_weights_upload_finish_async = awaited(external_weights_upload_finish)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str, *, options: Options = None
    ) -> APIFuture[types.CheckpointArchiveUrlResponse]:
        """A signed address of a checkpoint as one archive. Tinkex and old servers only."""
        parts = _checkpoint(training_run_id, checkpoint_id)
        call = self._call(
            "get_checkpoint_archive_url", "checkpoint_archive", **parts, options=options
        )

        async def fetch(waiting: Waiting) -> types.CheckpointArchiveUrlResponse:
            reply = await self.holder.transport.archive(call)
            return parse(reply, types.CheckpointArchiveUrlResponse)

        return self.holder.spawn(fetch, call.limits)

    get_checkpoint_archive_url_async = awaited(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[types.CheckpointArchiveUrlResponse]:
        """Like `get_checkpoint_archive_url`, from a path."""
        parts = validation.check_tinker_path(tinker_path)
        return self.get_checkpoint_archive_url(*parts, options=options)

    get_checkpoint_archive_url_from_tinker_path_async = awaited(
        get_checkpoint_archive_url_from_tinker_path
    )

    def delete_checkpoint(
        self, training_run_id: str, checkpoint_id: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Delete a checkpoint for good."""
        return self._ask(
            "delete_checkpoint", **_checkpoint(training_run_id, checkpoint_id), options=options
        )

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Delete a checkpoint for good."""
        method = "delete_checkpoint_from_tinker_path"
        return self._ask(method, "delete_checkpoint", **_parts(tinker_path), options=options)

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Let everyone read a checkpoint."""
        method = "publish_checkpoint_from_tinker_path"
        return self._ask(method, "publish_checkpoint", **_parts(tinker_path), options=options)

    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Make a checkpoint private again."""
        method = "unpublish_checkpoint_from_tinker_path"
        return self._ask(method, "unpublish_checkpoint", **_parts(tinker_path), options=options)

    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None, *, options: Options = None
    ) -> APIFuture[None]:
        """Let a checkpoint expire after so many seconds; None keeps it for good."""
        parts = _parts(tinker_path)
        request = types.SetCheckpointTtlRequest(ttl_seconds=validation.check_ttl(ttl_seconds))
        method = "set_checkpoint_ttl_from_tinker_path"
        return self._ask(method, "set_checkpoint_ttl", request, **parts, options=options)

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def name_checkpoint(
        self, tinker_path: str, name: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Give a checkpoint a short name; one that is in use moves to it. Tinkex servers only."""
        validation.check_tinker_path(tinker_path)
        request = ENDPOINTS["name_checkpoint"].request(name=name, path=tinker_path)
        return self._send(self._call("name_checkpoint", request=request, options=options))

    name_checkpoint_async = awaited(name_checkpoint)

    def list_checkpoint_names(
        self, *, options: Options = None
    ) -> APIFuture[types.CheckpointNamesResponse]:
        """The short names of the account's checkpoints. Tinkex servers only."""
        return self._ask("list_checkpoint_names", options=options)

    list_checkpoint_names_async = awaited(list_checkpoint_names)

    def remove_checkpoint_name(self, name: str, *, options: Options = None) -> APIFuture[None]:
        """Take a short name back; the checkpoint stays. Tinkex servers only."""
        return self._send(
            self._call("remove_checkpoint_name", name=segment(name, "name"), options=options)
        )

    remove_checkpoint_name_async = awaited(remove_checkpoint_name)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        options: Options = None,
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
        options = {"idempotency_key": str(uuid.uuid4()), **(options or {})}
        headers = {}
        if weights_access_token:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token
        answer = self._ask("copy_weights", request=request, headers=headers, options=options)

        async def copied(waiting: Waiting) -> str:
            copy: types.CopyWeightsResponse = await answer
            return copy.tinker_path

        return self.holder.spawn(copied, CallLimits.of(options))

    copy_weights_async = awaited(copy_weights)

    def interpolate_checkpoints(
        self,
        source_paths: Sequence[str],
        coefficients: Sequence[float],
        name: str | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.InterpolateCheckpointsResponse]:
        """Make a checkpoint to sample from of others: their matrices, weighted and added up.

        MinT's call, for its servers and ours. A and B of the LoRA adapters are added each by
        itself, so sources need one base model and one rank, and should come from one run.

        Args:
            coefficients: One for each source; 0.9 and 0.1 make a moving average.
            name: Of the result in the run of the first source; made up where left out.
        """
        request = types.InterpolateCheckpointsRequest(
            source_paths=validation.listed(source_paths),
            coefficients=validation.listed(coefficients),
            output_path=name,
        )
        for index, path in enumerate(request.source_paths):
            validation.check_tinker_path(path, name=f"source_paths[{index}]")
        kind = types.InterpolateCheckpointsResponse
        return self.holder.spawn(
            lambda waiting: self.holder.promised(
                "interpolate_checkpoints", request, kind, waiting, options=options
            ),
            CallLimits.of(options),
        )

    interpolate_checkpoints_async = awaited(interpolate_checkpoints)

    # -- budgets

    def list_budgets(self, *, options: Options = None) -> APIFuture[BudgetsResponse]:
        """Your budgets, those of your keys and of your runs. An extension of our servers."""
        return self._ask("list_budgets", options=options)

    list_budgets_async = awaited(list_budgets)

    # -- moved to AdminClient

    def get_audit_log(
        self, event_type: str = "all", day: date | str | None = None, *, options: Options = None
    ) -> APIFuture[types.AuditLogResponse]:
        """Deprecated: use AdminClient."""
        return self._admin("get_audit_log").get_audit_log(event_type, day, options=options)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str, *, options: Options = None
    ) -> APIFuture[types.BillingUsageResponse]:
        """Deprecated: use AdminClient."""
        admin = self._admin("get_billing_usage")
        return admin.get_billing_usage(starting_on, ending_before, options=options)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None, *, options: Options = None
    ) -> APIFuture[types.CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use AdminClient."""
        admin = self._admin("get_current_checkpoint_storage_usage")
        return admin.get_current_checkpoint_storage_usage(project_id, options=options)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    def _admin(self, method: str) -> AdminClient:
        # Here, because its messages are many and few programs need them.
        from tinkex.client.rest.admin_client import AdminClient

        warn(f"RestClient.{method} moved to AdminClient.{method}.")
        return AdminClient(self.holder)


if TYPE_CHECKING:

    class RestClientFuture(DirectFuture[RestClient], RestClient):
        """For type checkers: await it, ask for its result, or use it as the client."""

else:
    RestClientFuture = DirectFuture


def _checkpoint(training_run_id: str, checkpoint_id: str) -> dict[str, Any]:
    """Like `_parts`, of a run and `weights/NAME` or one of its friends."""
    run = segment(training_run_id, "training_run_id")
    return {**_parts(f"tinker://run/{checkpoint_id}", name="checkpoint_id"), "run_id": run}


def _parts(tinker_path: str, **options: Any) -> dict[str, Any]:
    """The parts of a checkpoint's path that fill the path of an endpoint."""
    run, checkpoint = validation.check_tinker_path(tinker_path, **options)
    kind, _, name = checkpoint.partition("/")
    return {"run_id": run, "kind": kind, "name": name}
