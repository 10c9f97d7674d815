"""Keys, tokens and the open mode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from rest_world import World

from tinkex.server.files.private import secret as secret_of
from tinkex.server.guard.auth import ISSUER


@pytest.mark.parametrize("key", ["", "tml-nobody", "secret", "eyJhbGciOiJIUzI1NiJ9.e30.x"])
async def test_a_wrong_credential_is_a_401_that_does_not_repeat_it(world: World, key: str) -> None:
    body = await world.call("GET", "/sessions", 401, key=key)
    assert not key or key not in body["detail"]


async def test_a_key_is_exchanged_for_a_token_that_acts_for_its_user(world: World) -> None:
    token = (await world.call("POST", "/auth/token", 200, json={}))["jwt"]
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["iss"] == ISSUER
    assert claims["sub"] == "tml:user:ann"
    assert 3000 < claims["exp"] - time.time() <= 3600
    assert (await world.call("GET", "/sessions", 200, key=token))["sessions"] == ["s"]


async def test_a_token_signed_by_someone_else_is_refused(world: World) -> None:
    claims = {"iss": ISSUER, "sub": "tml:user:ann", "exp": time.time() + 600}
    forged = jwt.encode(claims, b"x" * 32, algorithm="HS256")
    await world.call("GET", "/sessions", 401, key=forged)
    unsigned = jwt.encode(claims, None, algorithm="none")
    await world.call("GET", "/sessions", 401, key=unsigned)


async def test_an_expired_token_is_refused(world: World) -> None:
    secret = secret_of(world.store, world.shelf.folders.root, "jwt")
    claims = {"iss": ISSUER, "sub": "tml:user:ann", "exp": time.time() - 5}
    body = await world.call("GET", "/sessions", 401, key=jwt.encode(claims, secret, "HS256"))
    assert "expired" in body["detail"]


async def test_a_key_describes_itself(world: World) -> None:
    body = await world.call("GET", "/auth/apikey/me", 200)
    assert isinstance(body["key_id"], int)
    assert body["details"]["user_details"]["email"] == "ann@localhost"
    assert "tml-ann" not in str(body)


async def test_a_stored_key_can_revoke_itself_and_is_refused_at_once(world: World) -> None:
    world.store.accounts.add_key("tml-generated", "ann")
    await world.call("GET", "/sessions", 200, key="tml-generated")
    await world.call("DELETE", "/auth/apikey/me", 204, key="tml-generated")
    await world.call("GET", "/sessions", 401, key="tml-generated")


async def test_a_configured_key_cannot_be_revoked_by_a_call(world: World) -> None:
    await world.call("DELETE", "/auth/apikey/me", 403)
    await world.call("GET", "/sessions", 200)


async def test_without_keys_every_caller_is_the_local_user(open_server: Callable[..., Any]) -> None:
    async with open_server() as world:
        for key in ("tml-anything", ""):
            token = (await world.call("POST", "/auth/token", 200, key=key))["jwt"]
            claims = jwt.decode(token, options={"verify_signature": False})
            assert claims["sub"] == "tml:user:local"
        await world.call("GET", "/sessions", 401, key="not-a-key")


async def test_a_key_taken_out_of_the_configuration_stops_working(
    open_server: Callable[..., Any],
) -> None:
    async with open_server(("tml-one=ann", "tml-two=ann")) as world:
        await world.call("GET", "/sessions", 200, key="tml-two")
    async with open_server(("tml-one=ann",)) as world:
        await world.call("GET", "/sessions", 200, key="tml-one")
        await world.call("GET", "/sessions", 401, key="tml-two")


async def test_a_token_outlives_a_restart(open_server: Callable[..., Any]) -> None:
    async with open_server(("tml-one=ann",)) as world:
        token = (await world.call("POST", "/auth/token", 200, key="tml-one"))["jwt"]
    async with open_server(("tml-one=ann",)) as world:
        await world.call("GET", "/sessions", 200, key=token)


async def test_a_token_dies_with_its_key(world: World) -> None:
    made = world.store.accounts.add_key("tml-second", "ann")
    token = (await world.call("POST", "/auth/token", 200, key="tml-second"))["jwt"]
    again = (await world.call("POST", "/auth/token", 200, key=token))["jwt"]
    for credential in (token, again):
        await world.call("GET", "/sessions", 200, key=credential)
    world.store.accounts.revoke_key(made.key_id)
    world.app.state.dependencies.auth.forget()
    for credential in ("tml-second", token, again):
        body = await world.call("GET", "/sessions", 401, key=credential)
        assert "revoked" in body["detail"]
    await world.call("GET", "/sessions", 200, key="tml-ann")


async def test_a_token_without_a_key_needs_an_open_server(world: World) -> None:
    """Tokens of an open server, and of versions before keys were named in them."""
    secret = secret_of(world.store, world.shelf.folders.root, "jwt")
    claims = {"iss": ISSUER, "sub": "tml:user:ann", "exp": time.time() + 600}
    await world.call("GET", "/sessions", 401, key=jwt.encode(claims, secret, "HS256"))
