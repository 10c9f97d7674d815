"""Who looks at a page: a cookie made at login, and a token against forged forms.

The cookie holds a signed token of `Auth`, so it dies with its key. It is HttpOnly and goes to this
site only; every change needs the form token besides, which a page of another site cannot read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated

from fastapi import Depends, Request, Response

from tinkex.server.console.source import console_of
from tinkex.server.guard.auth import TOKEN_TTL_S, USER_ID, address_of, credential_of
from tinkex.server.guard.origin import check_same_site
from tinkex.server.http.bodies import PAGE_BYTES, let_go, reserve_answer
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.process.owner import is_owner
from tinkex.server.process.problems import ApiError
from tinkex.store import User

_FORM_SECRET = secrets.token_bytes(32)


def cookie_name(request: Request) -> str:
    """The cookie of this port: browsers send a cookie to every port of a host."""
    return f"tinkex_console_{request.url.port or 0}"


def _cookie(request: Request) -> str | None:
    return request.cookies.get(cookie_name(request)) or credential_of(request)


def put_off(request: Request, exc: Exception) -> Exception:
    """The failure to show a visitor: whoever brings wrong keys, again and again, is asked to wait.

    A visitor without any is only sent to the login.
    """
    brings_one = request.url.path.endswith(("/login", "/enter")) or _cookie(request)
    if not brings_one:
        return exc
    return console_of(request).failed_logins.put_off(exc, address_of(request))


async def visitor(request: Request) -> User:
    """FastAPI dependency: the user behind the cookie, or a 401 that the pages turn into a login.

    The request is counted among the visitor's, as the front door does where a key comes in a
    header.
    """
    console = console_of(request)
    user = await console.auth.user_of(_cookie(request))
    request.state.is_admin = await console.auth.is_admin(_cookie(request))
    request.state.is_owner = may_start(request)
    request.state.visitor = user
    request.scope[USER_ID] = user.user_id
    if console.quotas is not None:
        console.quotas.note(user)
        console.quotas.spend(user)
        await reserve_answer(request, PAGE_BYTES)
    return user


def begin_stream(request: Request) -> None:
    """Give back the room for a page: a stream may last for days, and holds none."""
    console = console_of(request)
    if console.quotas is not None:
        let_go(request.scope, dependencies_of(request).bodies)


async def may_look_on(request: Request) -> bool:
    """Whether the visitor of a stream is still let in: keys, users and logins end meanwhile."""
    try:
        await console_of(request).auth.user_of(_cookie(request))  # it asks every `CACHE_S`
    except ApiError:
        return False
    return True


async def admin_visitor(request: Request) -> User:
    """FastAPI dependency: the same for pages of administrators, or a 403."""
    parts = dependencies_of(request)
    await parts.auth.admin_of(_cookie(request))
    if request.method == "POST":
        parts.service.room.make_way(is_admin=True)
    return await visitor(request)


Visitor = Annotated[User, Depends(visitor)]
AdminVisitor = Annotated[User, Depends(admin_visitor)]


def may_start(request: Request) -> bool:
    """Whether this visitor is the person in whose name this server may start programs."""
    console = console_of(request)
    if console.launcher is None:
        return False
    if not console.launcher.needs_token:
        return console.source.is_local or bool(request.state.is_admin)
    # The first key makes it a server for several people.
    return console.auth.is_open and is_owner(request.cookies.get(owner_cookie(request)))


def owner_cookie(request: Request) -> str:
    """The cookie of the person who runs a server without keys."""
    return f"tinkex_owner_{request.url.port or 0}"


def form_token(request: Request) -> str:
    """The token that a form of this visitor must carry.

    Without keys everybody on this machine is the same user. The owner's forms have a token that
    nobody else is given: a page on another port of this host could send them otherwise, since the
    browser sends the owner's cookie to every port.
    """
    cookies = [_cookie(request) or "open", request.cookies.get(owner_cookie(request), "")]
    who = "\0".join(cookies).encode("utf-8", "replace")
    return hmac.new(_FORM_SECRET, who, hashlib.blake2b).hexdigest()[:40]


async def form_values(request: Request) -> dict[str, str]:
    """The fields of a form that is made at run time; at most 50 of them."""
    return {name: str(value) for name, value in (await request.form(max_fields=50)).items()}


async def check_form(request: Request) -> None:
    """Refuse a change that does not come from a page of ours.

    Raises:
        ApiError: 403.
    """
    given = request.headers.get("x-form-token", "")
    if not given and request.headers.get("content-type", "").startswith(
        "application/x-www-form-urlencoded"
    ):
        given = (await form_values(request)).get("form_token", "")
    # As bytes: texts are compared only when they are ASCII, and a stranger's need not be.
    if not hmac.compare_digest(given.encode("utf-8", "replace"), form_token(request).encode()):
        raise ApiError(403, "This form is not of this page, or is too old. Load it again.")


Changing = Annotated[None, Depends(check_form)]


async def log_in(request: Request, response: Response, key: str) -> None:
    """Take a key and leave a cookie.

    Raises:
        ApiError: 401, the key is not known; 403, a page of another site sent it.
    """
    check_same_site(request.headers, dependencies_of(request).config.public_url)
    parts = dependencies_of(request)
    token = await parts.auth.issue_token(key)
    user = await parts.auth.user_of(token)
    parts.administration.note_login(user.user_id, address_of(request), by="console")
    leave_cookie(request, response, token, max_age_s=TOKEN_TTL_S)


async def log_out(request: Request, response: Response) -> None:
    """Take the cookie back, and refuse it wherever it was copied to."""
    name = cookie_name(request)
    if token := request.cookies.get(name):
        await dependencies_of(request).auth.end_token(token)
    response.delete_cookie(name, path="/console")


def leave_cookie(
    request: Request, response: Response, token: str, *, max_age_s: int | None, name: str = ""
) -> None:
    """Let a browser in; with `max_age_s` None, for as long as it is open."""
    response.set_cookie(
        name or cookie_name(request),
        token,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        max_age=max_age_s,
        # The API reads keys from headers alone, so no browser need send the cookie there.
        path="/console",
    )
