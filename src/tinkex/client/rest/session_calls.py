"""Sessions, samplers and who one is: the calls of a RestClient that are not about checkpoints."""

from __future__ import annotations

import asyncio
from typing import Literal

from tinkex import types
from tinkex.client import validation
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.call import Call
from tinkex.client.http.options import Options
from tinkex.client.rest.caller import Caller, segment
from tinkex.client.rest.paged import page
from tinkex.client.twins import awaited
from tinkex.errors import ConfigError, RequestFailedError

AccessScope = Literal["owned", "accessible"]
_TRACE_POLL_S = 5.0


class SessionCalls(Caller):
    """The sessions of an account."""

    def get_server_capabilities(
        self, *, options: Options = None
    ) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """Which models the server offers."""
        return self._ask("get_server_capabilities", options=options)

    get_server_capabilities_async = awaited(get_server_capabilities)

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned", *, options: Options = None
    ) -> APIFuture[types.GetSessionResponse]:
        """The runs and samplers of one session."""
        scope = validation.check_access_scope(access_scope)
        session = segment(session_id, "session_id")
        return self._ask(
            "get_session", query={"access_scope": scope}, session_id=session, options=options
        )

    get_session_async = awaited(get_session)

    def list_sessions(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        *,
        options: Options = None,
    ) -> APIFuture[types.ListSessionsResponse]:
        """A page of session ids."""
        scope = validation.check_access_scope(access_scope)
        return self._ask(
            "list_sessions", query={**page(limit, offset), "access_scope": scope}, options=options
        )

    list_sessions_async = awaited(list_sessions)

    def assign_session_project(
        self, session_id: str, project_id: str, *, options: Options = None
    ) -> APIFuture[None]:
        """Move a session into a project."""
        session = segment(session_id, "session_id")
        request = types.AssignSessionProjectRequest(project_id=project_id)
        return self._ask(
            "assign_session_project", request=request, session_id=session, options=options
        )

    assign_session_project_async = awaited(assign_session_project)

    def export_session_trace(self, session_id: str, *, options: Options = None) -> APIFuture[str]:
        """The address of a session's trace, once the server has built it."""
        session = segment(session_id, "session_id")
        call = self._call("export_session_trace", session_id=session, options=options)
        return self._trace(call, f"session {session_id}")

    export_session_trace_async = awaited(export_session_trace)

    def export_run_trace(self, training_run_id: str, *, options: Options = None) -> APIFuture[str]:
        """The address of a run's trace, which ui.perfetto.dev opens. Ours; Tinker has none."""
        run_id = segment(training_run_id, "training_run_id")
        call = self._call("export_run_trace", run_id=run_id, options=options)
        return self._trace(call, f"run {training_run_id}")

    export_run_trace_async = awaited(export_run_trace)

    def _trace(self, call: Call, of: str) -> APIFuture[str]:
        async def export(waiting: Waiting) -> str:
            while True:
                answer = await self.holder.ask(call, types.TraceExportResponse, waiting)
                if answer.status == "ready" and answer.url:
                    return answer.url
                if answer.status != "pending":
                    raise RequestFailedError(
                        f"The trace of {of} could not be built: {answer.error}",
                        category="server",
                    )
                waiting.state, waiting.reason = "queued", "the server is building the trace"
                await asyncio.sleep(_TRACE_POLL_S)

        return self.holder.spawn(export, call.limits)

    def search_sessions(
        self, request: types.SessionSearchRequest, *, options: Options = None
    ) -> APIFuture[types.SessionSearchResponse]:
        """Sessions by owner, name, status or metadata. Experimental."""
        return self._ask("search_sessions", request=request, options=options)

    search_sessions_async = awaited(search_sessions)

    def get_sampler(
        self, sampler_id: str, *, options: Options = None
    ) -> APIFuture[types.GetSamplerResponse]:
        """The weights that a sampling session samples from."""
        return self._ask(
            "get_sampler", sampler_id=segment(sampler_id, "sampler_id"), options=options
        )

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
