"""The retry policies of contract 9, decided without a clock (R8, R13)."""

from __future__ import annotations

import asyncio
import email.utils

import pytest
from virtual_time import run_virtual

from tinkex.client.http.retry import (
    BaseRetry,
    BillingPause,
    RetryConfig,
    RetryHandler,
    WindowRetry,
    parse_retry_after_s,
)
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    BadRequestError,
    InternalServerError,
    PromiseLostError,
    RequestFailedError,
)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": email.utils.formatdate(1000 + 7, usegmt=True)}, 7.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "nan"}, None),
        ({}, None),
    ],
)
def test_each_form_of_retry_after_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after_s(headers, now=lambda: 1000.0) == seconds


def test_the_delay_doubles_up_to_ten_seconds_with_a_quarter_of_jitter() -> None:
    calm, wild = BaseRetry(uniform=lambda: 0.0), BaseRetry(uniform=lambda: 1.0)
    assert [calm.delay_s(n) for n in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert [wild.delay_s(n) for n in range(6)] == [0.375, 0.75, 1.5, 3.0, 6.0, 7.5]
    assert calm.delay_s(10_000) == 10.0


@pytest.mark.parametrize(("asked", "delay"), [("60", 60.0), ("61", 0.5), ("0", 0.5), ("-1", 0.5)])
def test_a_server_is_obeyed_for_at_most_a_minute(asked: str, delay: float) -> None:
    assert BaseRetry(uniform=lambda: 0.0).delay_s(0, {"retry-after": asked}) == delay


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
    ],
)
def test_x_should_retry_decides_first(status: int, header: str | None, wanted: bool) -> None:
    headers = {} if header is None else {"x-should-retry": header}
    assert BaseRetry().wants(status, headers) is wanted


def test_the_window_cuts_its_last_delay_and_then_gives_up() -> None:
    window = WindowRetry()
    assert [window.delay_s(n, 0.0) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert window.delay_s(9, 290.0) == 10.0
    assert window.delay_s(9, 300.0) is None


def test_the_window_retries_what_may_pass_by_itself() -> None:
    window = WindowRetry()
    assert window.wants(APITimeoutError())
    assert window.wants(InternalServerError("x", status_code=503))
    assert not window.wants(BadRequestError("x", status_code=400))
    assert not window.wants(RequestFailedError("x"))


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
        return await RetryHandler(RetryConfig(), max_in_flight=None).execute(flaky)

    assert run_virtual(main()) == "done"


def test_a_users_mistake_is_not_retried() -> None:
    async def wrong() -> None:
        raise RequestFailedError("no", category="user")

    async def main() -> None:
        with pytest.raises(RequestFailedError):
            await RetryHandler(RetryConfig(), max_in_flight=None).execute(wrong)

    run_virtual(main())


def test_samples_without_any_progress_fail_as_stuck() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> float:
        handler = RetryHandler(RetryConfig(progress_timeout=600), max_in_flight=None)
        calls = [asyncio.ensure_future(handler.execute(never)) for _ in range(3)]
        for call in calls:
            with pytest.raises(APIConnectionError, match="stuck"):
                await call
        return asyncio.get_running_loop().time()

    assert 600 <= run_virtual(main()) < 610


def test_progress_of_one_sample_keeps_the_others_alive() -> None:
    async def main() -> None:
        handler = RetryHandler(RetryConfig(progress_timeout=10), max_in_flight=None)

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
        handler = RetryHandler(RetryConfig(), max_in_flight=3)
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
