"""The retry policies of contract 9, decided without a clock (R8, R13)."""

from __future__ import annotations

import asyncio
import email.utils
import pickle
from typing import Any

import pytest
from virtual_time import run_virtual

from tinkex.client.http.http1 import Reply
from tinkex.client.http.limits import RateLimiter, SampleGate
from tinkex.client.http.retry import (
    BillingPause,
    CallRetry,
    Outage,
    RetryPolicy,
    parse_retry_after_s,
)
from tinkex.client.sampling.sample_retry import RetryConfig, SampleRetry
from tinkex.client.session.polling import PollRetry
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    ClientClosedError,
    ConfigError,
    InvalidInputError,
    PromiseLostError,
    RequestFailedError,
    ResultTimeoutError,
    status_error_class,
)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": email.utils.formatdate(1000 + 7, usegmt=True)}, 7.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": email.utils.formatdate(990, usegmt=True)}, 0.0),
        ({"retry-after": "1e308"}, 366 * 86_400.0),
        ({"retry-after": "Mon, 01 Jan 99999 00:00:00 GMT"}, None),
        ({"retry-after": "1 Jan 999999999999999999999 0:0:0 GMT"}, None),
        ({}, None),
    ],
)
def test_each_form_of_retry_after_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after_s(headers, now=lambda: 1000.0) == seconds


def test_the_delay_doubles_up_to_ten_seconds_with_a_quarter_of_jitter() -> None:
    calm, wild = RetryPolicy(uniform=lambda: 0.0), RetryPolicy(uniform=lambda: 1.0)
    assert [calm.delay_s(n) for n in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert [wild.delay_s(n) for n in range(6)] == [0.375, 0.75, 1.5, 3.0, 6.0, 7.5]
    assert calm.delay_s(10_000) == 10.0


@pytest.mark.parametrize(("asked", "delay"), [("60", 60.0), ("90", 60.0), ("0", 0.5), ("-1", 0.5)])
def test_a_server_is_obeyed_for_at_most_a_minute(asked: str, delay: float) -> None:
    """One that asks for more is not asked again after half a second."""
    assert RetryPolicy(uniform=lambda: 0.0).delay_s(0, {"retry-after": asked}) == delay
    limiter = RateLimiter(clock=lambda: 0.0)
    SampleGate(limiter, 1000).hold_back(10, float(asked))
    assert limiter.delay_s == (delay if float(asked) > 0 else 1.0)
    poll = PollRetry(BillingPause())
    refused = Reply(429, {"retry-after": asked}, b"")
    assert poll.delay_s(refused) == (delay if float(asked) > 0 else 1.0)


def refusal(
    status: int | None, should_retry: str | None = None, retry_after: str | None = None
) -> Any:
    if status is None:
        return APIConnectionError("gone")
    said = {"x-should-retry": should_retry, "retry-after": retry_after}
    headers = {name: text for name, text in said.items() if text is not None}
    return status_error_class(status)("no", status_code=status, headers=headers)


@pytest.mark.parametrize(
    ("status", "header", "wanted"),
    [
        (408, None, True),
        (409, None, True),
        (429, None, True),
        (500, None, True),
        (400, None, False),
        (401, None, False),
        (410, None, False),
        (400, "true", True),
        (500, "false", False),
        (500, "perhaps", True),
        (400, "True", True),
        (500, " FALSE ", False),
    ],
)
def test_x_should_retry_decides_first(status: int, header: str | None, wanted: bool) -> None:
    assert refusal(status, header).retryable is wanted


def test_rounds_are_up_to_half_a_minute_apart() -> None:
    assert [RetryPolicy().round_delay_s(n) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def delays(
    *statuses: int | None,
    should_retry: str | None = None,
    retry_after: str | None = None,
    **options: Any,
) -> list[float | None]:
    """What one call waits after each of these, in order; None is no answer at all."""

    async def main() -> list[float | None]:
        policy = RetryPolicy(quick_retries=2, window_s=60.0, uniform=lambda: 0.0)
        retry = CallRetry(policy, BillingPause(10.0), **options)
        found = []
        for status in statuses:
            found.append(retry.delay_s(refusal(status, should_retry, retry_after)))
            if found[-1] is None:
                break
            await asyncio.sleep(found[-1])
        return found

    return run_virtual(main())


def test_a_call_makes_quick_tries_then_rounds_of_them_until_its_window_ends() -> None:
    assert delays(*[503] * 9)[:9] == [0.5, 1.0, 1.0, 0.5, 1.0, 2.0, 0.5, 1.0, 4.0]
    waited = delays(*[None] * 40)
    assert (waited[-1], sum(waited[:-1])) == (None, 60.0), "the last pause ends with the window"
    assert delays(503, None, 503, window=False) == [0.5, 1.0, None]
    assert delays(503, 503, quick_retries=0) == [1.0, 2.0]
    assert delays(503, quick_retries=0, window=False) == [None]


def test_each_pause_of_a_call_is_as_long_as_the_server_asks() -> None:
    assert delays(*[429] * 4, retry_after="7") == [7.0, 7.0, 7.0, 7.0]
    assert delays(429, 503, quick_retries=0, retry_after="7") == [7.0, 7.0], "between rounds, too"


def test_max_retries_bounds_the_tries_of_a_call_whatever_is_left_of_its_window() -> None:
    assert delays(503, max_retries=0) == delays(None, max_retries=0) == [None]
    assert delays(402, max_retries=0) == [None]
    assert delays(*[503] * 9, max_retries=4) == [0.5, 1.0, 1.0, 0.5, None]


def test_a_server_that_says_do_not_retry_is_believed_for_the_whole_window() -> None:
    assert delays(503, should_retry="false") == delays(429, should_retry="false") == [None]
    assert delays(400, 400, 400, should_retry="true") == [0.5, 1.0, None]


def test_a_call_is_not_repeated_where_that_cannot_help() -> None:
    assert delays(400) == delays(404) == delays(410) == [None]


def test_402_is_a_pause_while_there_is_patience() -> None:
    assert delays(402, 402, 402) == [5.0, 5.0, None]
    assert delays(402, window=False) == [None]
    assert delays(402, should_retry="false") == [None], "the server knows better"


def test_a_sample_waits_at_its_gate_instead() -> None:
    assert delays(402, waits_itself=True) == delays(429, waits_itself=True) == [None]
    assert delays(503, waits_itself=True) == [0.5]


def test_a_poll_is_repeated_without_end_unless_it_is_refused_as_wrong() -> None:
    retry = PollRetry(BillingPause(10.0, clock=lambda: 0.0))
    assert [retry.delay_s(None) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    replies = {status: Reply(status, {}, b"") for status in (400, 402, 404, 429, 500)}
    assert [retry.delay_s(replies[status]) for status in (500, 429, 402)] == [0.0, 1.0, 5.0]
    assert [retry.delay_s(replies[400]) for _ in range(4)] == [0.0, 0.0, 0.0, None]
    retry.answered()
    assert retry.delay_s(replies[400]) == 0.0
    assert retry.delay_s(replies[404]) is None


def test_a_billing_pause_ends_after_its_limit_and_starts_anew_after_a_quiet_time() -> None:
    now = [0.0]
    pause = BillingPause(100.0, clock=lambda: now[0])
    answers = []
    for now[0] in (0.0, 50.0, 99.0, 100.0, 120.0):
        answers.append(pause.delay_s())
    assert answers == [5.0, 5.0, 5.0, None, None]
    now[0] = 120.0 + 301.0
    assert pause.delay_s() == 5.0


def test_a_sample_is_retried_without_a_count_until_it_succeeds() -> None:
    tries = 0

    async def flaky() -> str:
        nonlocal tries
        tries += 1
        if tries < 30:
            raise APIConnectionError("gone") if tries % 2 else PromiseLostError("gone")
        return "done"

    async def main() -> str:
        return await SampleRetry(RetryConfig(), max_in_flight=None).execute(flaky)

    assert run_virtual(main()) == "done"


def tries_of(error: Exception, config: RetryConfig, **options: Any) -> int:
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise error

    async def main() -> None:
        with pytest.raises(type(error)):
            await SampleRetry(config, max_in_flight=None, **options).execute(fail)

    run_virtual(main())
    return tries


def test_a_sample_that_the_server_failed_is_tried_three_times_more() -> None:
    assert tries_of(RequestFailedError("broke", category="server"), RetryConfig()) == 4
    assert tries_of(RequestFailedError("broke", category="user"), RetryConfig()) == 1


def test_the_tries_of_a_sample_can_be_counted() -> None:
    lost = PromiseLostError("gone")
    assert tries_of(lost, RetryConfig(max_retries=0)) == 1
    assert tries_of(lost, RetryConfig(max_retries=5)) == 6
    assert tries_of(lost, RetryConfig(), max_retries=2) == 3, "that of the client"
    assert tries_of(RequestFailedError("", category="server"), RetryConfig(max_retries=5)) == 6
    with pytest.raises(ValueError, match="max_retries must be at least 0, got -1"):
        RetryConfig(max_retries=-1)
    for wrong in ("3", 1.5, True):
        with pytest.raises(ConfigError, match=f"max_retries must be a whole number, got {wrong!r}"):
            RetryConfig(max_retries=wrong)  # type: ignore[arg-type]


def test_a_sample_is_not_tried_again_where_that_cannot_help() -> None:
    """Although `retryable_exceptions` has the class of the first."""
    assert tries_of(APIConnectionError("certificate", category="user"), RetryConfig()) == 1
    assert tries_of(refusal(429, "false"), RetryConfig()) == 1


def test_every_error_says_whether_it_may_pass() -> None:
    assert [refusal(s).retryable for s in (400, 402, 403, 408, 409, 422, 429, 500)] == [
        *(False, False, False),
        *(True, True),
        *(False, True, True),
    ]
    assert PromiseLostError("").retryable
    assert APIConnectionError().retryable
    assert APITimeoutError().retryable
    assert not APIConnectionError(category="user").retryable
    assert RequestFailedError("", category="server").retryable
    assert not RequestFailedError("", category="user").retryable
    for kind in (ConfigError, InvalidInputError, ResultTimeoutError, ClientClosedError):
        assert not kind("no").retryable
    assert pickle.loads(pickle.dumps(refusal(429, "false"))).retryable is False


def test_samples_without_any_progress_fail_as_stuck() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> float:
        handler = SampleRetry(RetryConfig(progress_timeout=600), max_in_flight=None)
        calls = [asyncio.ensure_future(handler.execute(never)) for _ in range(3)]
        for call in calls:
            with pytest.raises(APIConnectionError, match="stuck"):
                await call
        return asyncio.get_running_loop().time()

    assert 600 <= run_virtual(main()) < 610


def test_progress_of_one_sample_keeps_the_others_alive() -> None:
    async def main() -> None:
        handler = SampleRetry(RetryConfig(progress_timeout=10), max_in_flight=None)

        async def slow() -> str:
            await asyncio.sleep(35)
            return "slow"

        waiting = asyncio.ensure_future(handler.execute(slow))
        for _ in range(4):
            await handler.execute(lambda: asyncio.sleep(8))
        assert await waiting == "slow"

    run_virtual(main())


def test_the_handler_holds_the_number_in_flight() -> None:
    async def main() -> int:
        handler = SampleRetry(RetryConfig(), max_in_flight=3)
        running = most = 0

        async def count() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1

        await asyncio.gather(*(handler.execute(count) for _ in range(10)))
        return most

    assert run_virtual(main()) == 3


def test_retry_delays_of_samples_stay_within_their_bounds() -> None:
    config = RetryConfig()
    assert config.delay_s(0, lambda: 0.5) == 0.5
    assert config.delay_s(0, lambda: 0.0) == 0.375
    assert config.delay_s(50, lambda: 1.0) == 10.0


def test_a_server_that_does_not_answer_is_told_of_and_so_is_its_return(caplog) -> None:
    now = [0.0]
    outage = Outage("http://api.test", clock=lambda: now[0])
    for moment in (0.0, 1.0, 4.0, 30.0, 65.0, 70.0):
        now[0] = moment
        outage.failed(ConnectionError("refused"))
    outage.over()
    outage.over()
    assert [record.getMessage() for record in caplog.records] == [
        "Still trying, for 4 s now: refused",
        "Still trying, for 65 s now: refused",
        "http://api.test goes on, after 70 s.",
    ]


def test_a_server_that_hiccups_is_not_worth_a_word(caplog) -> None:
    outage = Outage("http://api.test", clock=lambda: 1.0)
    outage.failed(ConnectionError("reset"))
    outage.over()
    assert caplog.records == []


def test_a_retry_config_takes_no_bound_and_refuses_none_at_all():
    """The official SDK's own way to say "as many as there are"."""
    assert RetryConfig(max_connections=None).max_connections is None
    with pytest.raises(ValueError, match="max_connections must be at least 1, got 0"):
        RetryConfig(max_connections=0)
