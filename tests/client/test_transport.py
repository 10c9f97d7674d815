"""One call: headers, base retries, redirects, torn connections, the breaker (R7, R8, R24)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hostile import json_reply
from virtual_time import run_virtual

from tinkex import errors
from tinkex.client.config import ClientConfig
from tinkex.client.credentials import TokenProvider
from tinkex.client.http.call import Call, status_error
from tinkex.client.http.http1 import ProtocolError, Reply
from tinkex.client.http.retry import RetryPolicy
from tinkex.client.http.transport import Transport
from tinkex.wire.requests import NO_FIELDS


class Recorded:
    """A backend that answers from a list and remembers what was sent."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[str, str, Mapping[str, str], bytes | None]] = []
        self.closed = 0

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        self.sent.append((method, url, dict(headers), body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed += 1


def call_through(
    backend: Recorded,
    call: Call,
    *,
    window: bool = False,
    seconds: list[float] | None = None,
    **settings: Any,
) -> tuple[Reply, float]:
    async def main() -> tuple[Reply, float]:
        config = ClientConfig(base_url="http://api.test/pre", api_key="tml-key", **settings)
        transport = Transport(
            config,
            TokenProvider("tml-key"),
            retry=RetryPolicy(
                max_retries=config.max_retries, window_s=config.retry_window_s, uniform=lambda: 0.0
            ),
            make_backend=lambda _: backend,
        )
        began = asyncio.get_running_loop().time()
        try:
            reply = await transport.call(call._replace(window=window))
        finally:
            if seconds is not None:
                seconds.append(asyncio.get_running_loop().time() - began)
        return reply, asyncio.get_running_loop().time()

    return run_virtual(main())


POST = Call(method="POST", path="optim_step", body=NO_FIELDS)
OK = json_reply({})


def test_every_header_of_the_contract_is_sent() -> None:
    backend = Recorded(OK)
    call_through(backend, POST)
    method, url, headers, body = backend.sent[0]
    assert (method, url, body) == ("POST", "http://api.test/pre/api/v1/optim_step", b"{}")
    assert headers["X-API-Key"] == "tml-key"
    assert headers["Accept"] == headers["Content-Type"] == "application/json"
    assert headers["User-Agent"] == "AsyncTinker/Python 0.36.0"
    assert headers["X-Stainless-Async"] == "async:asyncio"
    assert headers["x-stainless-retry-count"] == "0"
    assert headers["x-stainless-read-timeout"] == "60"
    assert headers["X-Idempotency-Key"].startswith("stainless-python-retry-")
    assert {"X-Stainless-OS", "X-Stainless-Arch", "X-Stainless-Runtime"} <= set(headers)


def test_a_get_has_neither_content_type_nor_idempotency_key() -> None:
    """R28: what an endpoint needs of query strings, as contract 1.1 writes them."""
    backend = Recorded(OK)
    query = {"limit": 20, "flag": True, "ids": ["a", True], "none": None, "empty": ""}
    call_through(backend, Call(method="GET", path="sessions", query=query))
    _, url, headers, _ = backend.sent[0]
    assert url.endswith("/sessions?limit=20&flag=true&ids=a%2Ctrue")
    assert not {"Content-Type", "X-Idempotency-Key"} & set(headers)


def test_the_users_headers_win() -> None:
    backend = Recorded(OK)
    call_through(backend, POST, headers={"User-Agent": "mine", "X-New": "1"})
    assert backend.sent[0][2]["User-Agent"] == "mine"
    assert backend.sent[0][2]["X-New"] == "1"


def test_a_header_is_the_same_in_any_case() -> None:
    """A key that was to be replaced must not travel on beside the other one."""
    backend = Recorded(OK)
    mine = {"x-api-key": "tml-other", "user-agent": "me/1", "X-TEAM": "a"}
    call_through(backend, POST._replace(headers={"x-team": "b", "accept": "text/x"}), headers=mine)
    sent = {name.lower(): value for name, value in backend.sent[0][2].items()}
    assert len(sent) == len(backend.sent[0][2])
    assert (sent["x-api-key"], sent["user-agent"]) == ("tml-other", "me/1")
    assert (sent["x-team"], sent["accept"]) == ("a", "text/x")


def test_headers_that_frame_a_message_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="content-length"):
        ClientConfig(base_url="http://a", api_key="k", headers={"content-length": "3"})


def test_retries_keep_the_idempotency_key_and_count_up() -> None:
    """R7, R8: 0.5 s, 1 s, then what the server asked for."""
    busy = json_reply({}, 429, **{"retry-after-ms": "3000"})
    backend = Recorded(ProtocolError("reset"), json_reply({}, 503), busy, OK)
    _, seconds = call_through(backend, POST)
    headers = [sent[2] for sent in backend.sent]
    assert len({h["X-Idempotency-Key"] for h in headers}) == 1
    assert [h["x-stainless-retry-count"] for h in headers] == ["0", "1", "2", "3"]
    assert seconds == 0.5 + 1.0 + 3.0


def test_retries_end_and_the_last_answer_is_the_error() -> None:
    backend = Recorded(*[json_reply({"detail": "down"}, 503)] * 3)
    with pytest.raises(errors.InternalServerError, match="503 on POST /api/v1/optim_step - down"):
        call_through(backend, POST, max_retries=2)
    backend = Recorded(json_reply({"detail": "no"}, 404))
    with pytest.raises(errors.NotFoundError, match="404 on GET /tinkex/v1/budgets - no"):
        call_through(backend, Call(method="GET", path="/tinkex/v1/budgets"))
    backend = Recorded(TimeoutError(), TimeoutError())
    with pytest.raises(errors.APITimeoutError, match="did not answer POST optim_step within 60 s"):
        call_through(backend, POST, max_retries=1)


@pytest.mark.parametrize(
    ("status", "kind", "builtin"),
    [
        (400, errors.BadRequestError, ValueError),
        (401, errors.AuthenticationError, PermissionError),
        (402, errors.BillingError, RuntimeError),
        (403, errors.PermissionDeniedError, PermissionError),
        (404, errors.NotFoundError, LookupError),
        (410, errors.APIStatusError, Exception),
        (422, errors.UnprocessableEntityError, ValueError),
    ],
)
def test_each_status_has_its_class_and_is_not_retried(
    status: int, kind: type[Exception], builtin: type[Exception]
) -> None:
    backend = Recorded(json_reply({"detail": "what is wrong"}, status, **{"x-request-id": "q7"}))
    with pytest.raises(kind, match="what is wrong") as caught:
        call_through(backend, POST)
    error: Any = caught.value
    assert isinstance(error, builtin)
    assert (error.status_code, error.request_id) == (status, "q7")
    assert error.body == {"detail": "what is wrong"}
    assert error.category == "user"


def test_a_server_that_never_answered_is_tried_for_fifteen_seconds() -> None:
    """It may be starting. One that is known to be there is waited for as long as the window is."""
    refused = [ConnectionRefusedError("refused")] * 400
    started: list[float] = []

    def tried(*answers: Reply | Exception) -> float:
        backend = Recorded(*answers)
        with pytest.raises(errors.APIConnectionError, match="refused"):
            call_through(backend, POST, window=True, seconds=started)
        return started[-1]

    assert tried(*refused) == 15
    assert tried(json_reply({}, 503), *refused) == 300


def test_an_error_tells_how_long_to_wait() -> None:
    backend = Recorded(json_reply({}, 429, **{"retry-after": "7"}))
    with pytest.raises(errors.RateLimitError) as caught:
        call_through(backend, POST, max_retries=0)
    assert caught.value.retry_after_ms == 7000


@pytest.mark.parametrize("asked", ["1e308", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_wish_that_no_clock_has_leaves_the_error_what_it_is(asked: str) -> None:
    with pytest.raises(errors.RateLimitError) as caught:
        call_through(Recorded(json_reply({}, 429, **{"retry-after": asked})), POST, max_retries=0)
    assert caught.value.category == "user"


def test_a_blank_400_is_a_torn_connection_until_the_budget_is_spent() -> None:
    """Contract 1.6."""
    blank = Reply(400, {"content-length": "0"}, b"")
    backend = Recorded(blank, OK)
    assert call_through(backend, POST)[0].ok
    backend = Recorded(*[blank] * 17)
    with pytest.raises(errors.BadRequestError):
        call_through(backend, POST, window=True)


def test_a_redirect_to_another_host_never_carries_the_credential() -> None:
    away = Reply(302, {"location": "https://storage.test/signed?x=1"}, b"")
    backend = Recorded(away, OK)
    call_through(backend, Call(method="GET", path="audit"))
    _, url, headers, _ = backend.sent[1]
    assert url == "https://storage.test/signed?x=1"
    assert set(headers) == {"Accept", "User-Agent"}


def test_a_redirect_on_the_same_host_keeps_method_body_and_key() -> None:
    moved = Reply(307, {"location": "/pre/api/v1/moved"}, b"")
    backend = Recorded(moved, OK)
    call_through(backend, POST)
    method, url, headers, body = backend.sent[1]
    assert (method, url, body) == ("POST", "http://api.test/pre/api/v1/moved", b"{}")
    assert headers["X-API-Key"] == "tml-key"


@pytest.mark.parametrize(
    "target", ["ftp://storage.test/x", "https:///x", "http://[::1/x", "http://storage.test:99999/x"]
)
def test_a_redirect_to_what_is_no_address_is_a_connection_error(target: str) -> None:
    backend = Recorded(Reply(302, {"location": target}, b""))
    with pytest.raises(errors.APIConnectionError, match="no HTTP address"):
        call_through(backend, Call(method="GET", path="x"), max_retries=0)


def test_endless_redirects_end() -> None:
    around = [Reply(302, {"location": "/again"}, b"") for _ in range(20)]
    with pytest.raises(errors.APIConnectionError, match="redirects"):
        call_through(Recorded(*around), Call(method="GET", path="x"), max_retries=0)


def test_names_with_odd_characters_are_encoded_and_colons_are_not() -> None:
    backend = Recorded(OK)
    call_through(
        backend, Call(method="GET", path="training_runs/s:train:0/checkpoints/weights/a b")
    )
    assert backend.sent[0][1].endswith("/training_runs/s:train:0/checkpoints/weights/a%20b")


def archive_of(
    *answers: Reply | Exception, waited: list[float] | None = None, **settings: Any
) -> Reply:
    async def main() -> Reply:
        config = ClientConfig(base_url="http://api.test", api_key="tml-key", **settings)
        backend = Recorded(*answers)
        transport = Transport(config, TokenProvider("tml-key"), make_backend=lambda _: backend)
        reply = await transport.archive(Call(method="GET", path="archive"))
        if waited is not None:
            waited.append(asyncio.get_running_loop().time())
        return reply

    return run_virtual(main())


def test_a_missing_key_is_called_missing_and_a_wrong_one_wrong() -> None:
    said = "This API key is unknown here or was revoked. Check TINKER_API_KEY."
    call, reply = Call(method="GET", path="x"), json_reply({"detail": said}, 401)
    wrong, missing = status_error(call, reply), status_error(call, reply, has_key=False)
    assert str(wrong).endswith(said), "what to do is said once"
    assert str(missing).endswith(
        "wants a key, and none was given. Set TINKER_API_KEY, or pass api_key."
    )


def test_a_route_is_told_as_the_call_it_is_in_python() -> None:
    said = "No checkpoint 'x' that you may use. List yours with GET /checkpoints."
    body = {"detail": said, "listing": "checkpoints"}
    error = status_error(Call(method="GET", path="x"), json_reply(body, 404))
    assert str(error).endswith("List yours with create_rest_client().list_user_checkpoints().")


def test_an_archive_is_the_address_of_its_redirect_once_it_is_built() -> None:
    away = Reply(302, {"location": "https://storage.test/a.tar"}, b"")
    reply = archive_of(json_reply({}, 503), json_reply({}, 503), away)
    assert reply.json()["url"] == "https://storage.test/a.tar"
    with pytest.raises(errors.APIStatusError):
        archive_of(json_reply({}, 503), away, max_retries=0)


def test_an_archive_is_asked_for_again_when_and_as_often_as_the_server_wants() -> None:
    away = Reply(302, {"location": "https://storage.test/a.tar"}, b"")
    with pytest.raises(errors.InternalServerError):
        archive_of(json_reply({}, 503, **{"x-should-retry": "false"}), away)
    waited: list[float] = []
    archive_of(
        json_reply({}, 503), json_reply({}, 503, **{"retry-after": "4"}), away, waited=waited
    )
    assert waited == [34.0]


def test_an_archive_that_ends_at_an_odd_time_is_given_as_it_is() -> None:
    odd = "1 Jan 99999999999999 00:00:00 GMT"
    away = Reply(302, {"location": "https://storage.test/a.tar", "expires": odd}, b"")
    assert archive_of(away).json()["expires"] == odd


def test_an_archive_fails_with_the_errors_of_every_other_call() -> None:
    with pytest.raises(errors.APIConnectionError, match="No connection to http://api.test"):
        archive_of(ProtocolError("reset"))
    with pytest.raises(errors.APITimeoutError, match="did not answer GET archive"):
        archive_of(TimeoutError())
    with pytest.raises(errors.NotFoundError):
        archive_of(json_reply({"detail": "no"}, 404))


def test_the_breaker_is_really_used_when_enabled() -> None:
    """R24."""
    down = [ProtocolError("reset")] * 5
    backend = Recorded(*down, OK)
    with pytest.raises(errors.CircuitOpenError):
        call_through(backend, POST, circuit_breaker=True, max_retries=5)
    assert len(backend.sent) == 5


def test_a_deprecation_note_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    note = {"x-deprecation-note": "use v2", "x-deprecation-level": "error"}
    backend = Recorded(json_reply({}, 503, **note), json_reply({}, 200, **note))
    call_through(backend, POST)
    assert [r.levelname for r in caplog.records if r.getMessage() == "use v2"] == ["ERROR"]


def test_every_error_survives_pickling() -> None:
    import pickle

    made = [
        errors.APIError("m", "POST x", body={"a": 1}),
        errors.APITimeoutError("slow", "POST x"),
        errors.APIConnectionError("gone"),
        errors.RequestFailedError("m", "r1", "user"),
        errors.PromiseLostError("m", request_id="r1"),
        errors.InvalidInputError("m", path="p"),
        errors.ResultTimeoutError("m"),
        errors.RegularizerError("m", name="kl"),
        errors.RegularizerTimeoutError("m", name="kl"),
        errors.HubError("m"),
        *(
            kind("m", status_code=status, body={"d": 1}, retry_after_ms=5, request_id="q")
            for status, kind in errors.STATUS_ERRORS.items()
        ),
    ]
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert copy.args == error.args
        assert copy.__dict__ == error.__dict__
