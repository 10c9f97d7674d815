"""What administrators see and do: all users' sessions, runs and keys, and an end to any of it.

The REST routes (`/tinkex/v1/admin/...`) and the console's pages both call this. Every act leaves a
line in the audit log of the user it concerns, with the administrator's name in `by`. Whether the
caller is an administrator is asked by the routes; nothing here looks at credentials.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tinkex.server.administration.remembered import Remembered
from tinkex.server.fairness.pauses import LIFTED
from tinkex.server.guard.auth import Auth, is_configured, new_key
from tinkex.server.guard.quotas import COUNTED, QUOTAS, Quotas, check_names
from tinkex.server.process.problems import ApiError
from tinkex.server.service.run_deletion import delete_run
from tinkex.server.service.service import Service
from tinkex.server.work.futures import Outcome
from tinkex.store import (
    ApiKey,
    AuditEntry,
    DeletedRun,
    Model,
    Session,
    SessionQuery,
    Store,
    UsedBy,
    User,
)
from tinkex.types.account.administration import AdminRun, AdminUsage, AdminUser, KeyRole

USAGE_S = 30.0
THROUGHPUT_S = 4.0
"""How long what was added up over many rows is told again."""
NOBODY = ""
"""The owner of audit lines that concern no user."""


class Administration:
    def __init__(self, service: Service, auth: Auth, quotas: Quotas) -> None:
        self._service = service
        self._store: Store = service.store
        self._auth = auth
        self._quotas = quotas
        self._usage = Remembered(USAGE_S)
        self._throughput = Remembered(THROUGHPUT_S)

    # ------------------------------------------------------------------------ what there is

    async def users(
        self, limit: int, offset: int = 0, *, search: str = ""
    ) -> tuple[list[AdminUser], int]:
        """A page of all users with what each of them holds, and how many users there are.

        With `search` only those whose id has it as a part. The number of questions to the database
        does not depend on how many users there are.
        """
        find = self._store.accounts.users
        found, total = await self._store.call(find, limit, offset, search=search)
        return await self._told(found), total

    async def user(self, user: User) -> AdminUser:
        return (await self._told([user]))[0]

    async def _told(self, users: Sequence[User]) -> list[AdminUser]:
        names, under_way = [user.user_id for user in users], self._under_way()
        counted, keys = await self._store.call(self._held, names)
        kept, told = self._service.kept, []
        pauses, now = self._service.open_work.pauses, time.time()
        for user in users:
            user_id = user.user_id
            num_queued, num_running = under_way.get(user_id, (0, 0))
            left_s = pauses.left_s(user_id)
            roles = [key.role for key in keys if key.user_id == user_id]
            told.append(
                AdminUser(
                    user_id=user_id,
                    name=user.name,
                    created_at=_moment(user.created_at),
                    disabled_at=None if user.disabled_at is None else _moment(user.disabled_at),
                    paused_until=_moment(now + left_s) if left_s else None,
                    pause_reason=pauses.reason(user_id),
                    is_admin="admin" in roles,
                    num_keys=len(roles),
                    num_sessions=counted["sessions"].get(user_id, 0),
                    num_models=counted["models"].get(user_id, 0),
                    disk_bytes=counted["disk_bytes"].get(user_id, 0),
                    num_queued=num_queued,
                    num_running=num_running,
                    result_bytes=kept.bytes_of(user_id),
                    quotas=self._quotas.limits(user),
                    own_quotas=user.quotas,
                )
            )
        return told

    def _held(self, user_ids: Sequence[str]) -> tuple[dict[str, dict[str, int]], list[ApiKey]]:
        """Amounts by name that the database counts of some users, and their valid keys. Blocks."""
        counted = {name: self._quotas.counts(user_ids, name) for name in COUNTED}
        keys = self._store.accounts.keys(user_ids)
        return counted, [key for key in keys if key.revoked_at is None]

    def _under_way(self) -> dict[str, tuple[int, int]]:
        """How many requests of each user wait, and how many a worker holds."""
        counts = self._service.samples.under_way()
        for lane in self._service.lanes:
            waiting, running = counts.get(lane.model.user_id, (0, 0))
            waiting += lane.num_waiting - lane.num_running
            counts[lane.model.user_id] = waiting, running + lane.num_running
        return counts

    async def known_user(self, user_id: str) -> User:
        """
        Raises:
            ApiError: 404.
        """
        user = await self._store.call(self._store.accounts.get_user, user_id)
        if user is None:
            raise ApiError(
                404, f"There is no user {user_id[:200]!r}. List them with `tinkex admin users`."
            )
        return user

    async def sessions(
        self, limit: int, *, user_id: str | None = None, active_only: bool = True
    ) -> list[Session]:
        """Of everybody, or of one user; newest first."""
        query = SessionQuery(
            user_ids=None if user_id is None else [user_id],
            status_types=["active"] if active_only else None,
        )
        return await self._store.call(self._store.sessions.search, query, limit)

    async def runs(
        self, limit: int, offset: int = 0, *, user_id: str | None = None, busy_only: bool = False
    ) -> tuple[list[AdminRun], int]:
        """Of everybody, or of one user, newest first; or only those with work under way."""
        if busy_only:
            lanes = [lane for lane in self._service.lanes if lane.num_waiting]
            models = [x.model for x in lanes if user_id in (None, x.model.user_id)]
            models.sort(key=lambda model: model.created_at, reverse=True)
            return [self._run(x) for x in models[offset : offset + limit]], len(models)
        models, total = await self._store.call(self._store.models.page, user_id, limit, offset)
        return [self._run(model) for model in models], total

    def _run(self, model: Model) -> AdminRun:
        lane = self._service.find_lane(model.model_id)
        num_running = lane.num_running if lane else 0
        return AdminRun(
            run_id=model.model_id,
            user_id=model.user_id,
            session_id=model.session_id,
            base_model=model.base_model,
            created_at=_moment(model.created_at),
            last_request_time=_moment(model.last_request_time),
            num_queued=lane.num_waiting - num_running if lane else 0,
            num_running=num_running,
            doing=lane.doing if lane else "",
        )

    async def audit(
        self, limit: int, offset: int = 0, *, user_id: str | None = None, event: str | None = None
    ) -> list[AuditEntry]:
        """Lines of everybody, or of one user, whose event starts with `event`; newest first."""
        page = self._store.audit.page
        return await self._store.call(page, limit, offset, user_id=user_id, prefix=event)

    # ------------------------------------------------------------------------ an end to it

    async def stop_session(self, admin: User, session_id: str, reason: str = "") -> int:
        """End a session and all its work; gives how many requests were ended.

        Its runs and checkpoints stay, and what its client asks next is answered with 410.

        Raises:
            ApiError: 404.
        """
        session = await self._store.call(self._store.sessions.get, session_id)
        if session is None:
            raise ApiError(404, f"There is no session {session_id[:200]!r}.")
        outcome = _ended(admin, "The session", reason)
        status = {"type": "cancelled", "detail": outcome.error}
        await self._store.call(self._store.sessions.finish, session_id, status)
        self._service.sessions.forget(session_id)
        num_ended = self._service.samples.stop(outcome, session_id=session_id)
        lanes = [lane for lane in self._service.lanes if lane.model.session_id == session_id]
        num_ended += sum(lane.stop(outcome) for lane in lanes)
        details = {"session_id": session_id, "reason": reason, "num_ended": num_ended}
        self._record(admin, session.user_id, "session_stopped", details)
        return num_ended

    async def stop_run(self, admin: User, run_id: str, reason: str = "") -> int:
        """End what a run has queued and running; the run itself stays, and its client goes on.

        Raises:
            ApiError: 404.
        """
        model = await self._known_run(run_id)
        lane = self._service.find_lane(run_id)
        num_ended = lane.stop(_ended(admin, "The request", reason)) if lane else 0
        details = {"run_id": run_id, "reason": reason, "num_ended": num_ended}
        self._record(admin, model.user_id, "run_stopped", details)
        return num_ended

    async def delete_run(self, admin: User, run_id: str) -> DeletedRun:
        """Delete a run of any user for good.

        Raises:
            ApiError: 404; 400 while it trains.
            InvalidInputError: It has a published checkpoint.
        """
        model = await self._known_run(run_id)
        return await delete_run(self._service, model, {"by": admin.user_id})

    async def _known_run(self, run_id: str) -> Model:
        model = await self._store.call(self._store.models.get, run_id)
        if model is None:
            raise ApiError(404, f"There is no run {run_id[:200]!r}.")
        return model

    async def stop_user(self, admin: User, user_id: str, reason: str = "") -> int:
        """End everything a user has queued and running; gives how many requests that was."""
        await self.known_user(user_id)
        return self._stop_all(admin, user_id, reason, "user_stopped")

    def _stop_all(self, admin: User, user_id: str, reason: str, event: str) -> int:
        outcome = _ended(admin, "The request", reason)
        num_ended = self._service.samples.stop(outcome, user_id=user_id)
        lanes = [lane for lane in self._service.lanes if lane.model.user_id == user_id]
        num_ended += sum(lane.stop(outcome) for lane in lanes)
        self._record(admin, user_id, event, {"reason": reason, "num_ended": num_ended})
        return num_ended

    # ------------------------------------------------------------------------ users and keys

    async def disable(self, admin: User, user_id: str, reason: str = "") -> int:
        """Refuse a user from now on and end their work; what they stored is kept.

        Raises:
            ApiError: 400 for oneself, 404.
        """
        if user_id == admin.user_id:
            raise ApiError(400, "You cannot disable yourself; ask another administrator.")
        await self.known_user(user_id)
        await self._store.call(self._store.accounts.disable, user_id, time.time())
        self._auth.forget()
        return self._stop_all(admin, user_id, reason, "user_disabled")

    async def enable(self, admin: User, user_id: str) -> None:
        await self.known_user(user_id)
        await self._store.call(self._store.accounts.disable, user_id, None)
        self._auth.forget()
        self._record(admin, user_id, "user_enabled", {})

    async def lift_pause(self, admin: User, user_id: str) -> None:
        """Forget what is held against a user whose work ended workers; it runs again at once."""
        await self.known_user(user_id)
        if self._service.open_work.pauses.lift(user_id):
            self._record(admin, user_id, LIFTED, {})

    async def set_quotas(
        self, admin: User, user_id: str, changes: dict[str, float | None]
    ) -> AdminUser:
        """Change limits of one user; None goes back to the server's own.

        Raises:
            ApiError: 400 for a name that is no limit, 404.
        """
        check_names(changes)
        user = await self.known_user(user_id)
        merged = {**user.quotas, **changes}
        kept = {n: float(v) for n, v in merged.items() if v is not None and n in QUOTAS}
        await self._store.call(self._store.accounts.set_quotas, user_id, kept)
        self._auth.forget()
        self._quotas.forget(user_id)
        changed = await self.known_user(user_id)
        self._quotas.note(changed)
        self._record(admin, user_id, "user_quotas_set", {"quotas": dict(changes)})
        return await self.user(changed)

    async def keys(self, user_id: str | None = None) -> list[ApiKey]:
        """Every key, or those of a user, revoked ones too, in the order they were made."""
        accounts = self._store.accounts
        if user_id is None:
            return await self._store.call(accounts.all_keys)
        return await self._store.call(accounts.keys, [user_id])

    async def newest_keys(self, limit: int, search: str = "") -> tuple[list[ApiKey], int]:
        """Valid keys, newest first, and how many there are; of users whose id has `search`."""
        return await self._store.call(self._store.accounts.newest_keys, limit, search=search)

    # ------------------------------------------------------------------------ what was used

    async def usage(self, by: UsedBy, hours: int, limit: int) -> list[AdminUsage]:
        """Usage of each user, key or run in the last hours; most time of the device first.

        Added up over all rows of the time, and told again for half a minute.
        """
        key = (by, hours, limit)
        return await self._usage.of(key, lambda: self._used(by, hours, limit))

    async def _used(self, by: UsedBy, hours: int, limit: int) -> list[AdminUsage]:
        start = time.time() - hours * 3600
        usage = await self._store.call(self._store.usage.used, by, start, limit)
        numbers = [one.key_id for one in usage if one.key_id]
        keys = await self._store.call(self._store.accounts.keys_numbered, numbers)
        names = {key.key_id: key.name for key in keys}
        return [
            AdminUsage(
                user_id=one.user_id,
                key_id=one.key_id or None,
                key_name=names.get(one.key_id),
                run_id=one.model_id or None,
                counts=one.counts,
            )
            for one in usage
        ]

    async def tokens(self) -> tuple[float, dict[str, float]]:
        """A moment, and the tokens of its hour and the one before by kind.

        Two looks at it give a throughput.
        """
        return await self._throughput.of((), self._tokens)

    async def _tokens(self) -> tuple[float, dict[str, float]]:
        now = time.time()
        return now, await self._store.call(self._store.usage.tokens, now - 3600)

    async def add_key(
        self,
        admin: User,
        user_id: str,
        *,
        name: str = "",
        role: KeyRole = "user",
        requests_per_minute: float = 0.0,
    ) -> tuple[str, ApiKey]:
        """Make a key for a user, who is made when new; gives the key, which is not kept.

        Raises:
            ApiError: 400 for a name with spaces around it, 403 on a server without keys.
        """
        if user_id != user_id.strip():
            raise ApiError(400, "A user needs a name without spaces around it.", path="user_id")
        if self._auth.is_open:
            raise ApiError(
                403,
                "This server is open: its first key closes it for callers without one, you "
                "included. Make it on its machine: `tinkex keys add --user NAME --admin`.",
            )
        key = new_key()
        await self._store.call(self._store.accounts.ensure_user, user_id)
        row = await self._store.call(
            self._store.accounts.add_key,
            key,
            user_id,
            name=name,
            role=role,
            requests_per_minute=requests_per_minute,
        )
        details = {"key_id": row.key_id, "name": row.name, "role": role}
        details |= {"requests_per_minute": requests_per_minute} if requests_per_minute else {}
        self._record(admin, user_id, "key_added", details)
        return key, row

    async def revoke_key(self, admin: User, key_id: int) -> None:
        """
        Raises:
            ApiError: 404, or 403 for a key of the server's configuration.
        """
        key = await self._store.call(self._store.accounts.get_key, key_id)
        if key is None or key.revoked_at is not None:
            raise ApiError(404, f"No valid key has the number {key_id}.")
        if is_configured(key):
            raise ApiError(
                403,
                f"Key {key_id} stands in the server's configuration and would be back after a "
                "restart. Remove it there.",
            )
        await self._store.call(self._store.accounts.revoke_key, key_id)
        self._auth.forget()
        details = {"key_id": key_id, "name": key.name}
        self._record(admin, key.user_id, "key_revoked", details)

    # ------------------------------------------------------------------------ the audit log

    def note_login(self, user_id: str, address: str, *, by: str) -> None:
        """Record a login: a key exchanged for a token, or the console opened."""
        self._store.audit.record(user_id, "login", {"by": by, "address": address})

    def _record(self, admin: User, user_id: str, event: str, details: dict[str, Any]) -> None:
        self._store.audit.record(user_id, event, {"by": admin.user_id, **details})


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _ended(admin: User, what: str, reason: str) -> Outcome:
    """The outcome for a client whose work was ended: it must not try the same again."""
    error = f"{what} was ended by an administrator ({admin.user_id})"
    return Outcome(error=f"{error}: {reason}." if reason else f"{error}.", category="user")
