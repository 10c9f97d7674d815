"""Holding back: the account's rate limiter, byte budgets, the circuit breaker (R14, R24)."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import run_virtual

from tinkex.client.http.breaker import BreakerState, CircuitBreaker
from tinkex.client.http.limits import ByteSemaphore, RateLimiter, SampleGate
from tinkex.errors import CircuitOpenError, ConfigError


def test_a_longer_wait_is_never_shortened_by_a_later_one() -> None:
    now = [0.0]
    limiter = RateLimiter(clock=lambda: now[0])
    limiter.hold(10)
    now[0] = 1.0
    limiter.hold(2)
    assert limiter.delay_s == 9.0
    limiter.hold(20)
    assert limiter.delay_s == 20.0


def test_clients_of_one_account_share_a_limiter_and_others_do_not() -> None:
    """R14: one per (base URL, API key) for the whole process."""
    first = RateLimiter.of("http://limits.test", "tml-a")
    assert RateLimiter.of("http://limits.test", "tml-a") is first
    assert RateLimiter.of("http://limits.test", "tml-b") is not first
    assert RateLimiter.of("http://other.test", "tml-a") is not first
    assert "tml-a" not in repr(list(RateLimiter._shared))


def test_waiters_sleep_until_the_limiter_lets_go_even_when_it_is_extended() -> None:
    async def main() -> float:
        limiter = RateLimiter()
        limiter.hold(5)
        asyncio.get_running_loop().call_later(4, limiter.hold, 10)
        await limiter.wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(14)


def test_a_byte_budget_may_go_below_zero_once_and_then_blocks_in_order() -> None:
    async def main() -> list[str]:
        budget = ByteSemaphore(100)
        order: list[str] = []

        async def use(name: str, size: int) -> None:
            async with budget.hold(size):
                order.append(name)
                await asyncio.sleep(1)

        await asyncio.gather(use("huge", 500), use("large", 300), use("small", 1))
        assert budget.balance == 100
        return order

    assert run_virtual(main()) == ["huge", "large", "small"]


def test_a_cancelled_waiter_gives_its_turn_back() -> None:
    async def main() -> None:
        budget = ByteSemaphore(0)
        await budget.acquire(10)
        lost = asyncio.ensure_future(budget.acquire(5))
        next_one = asyncio.ensure_future(budget.acquire(5))
        await asyncio.sleep(0)
        lost.cancel()
        budget.release(10)
        await next_one
        assert budget.balance == -5

    run_virtual(main())


def test_after_a_429_only_ten_samples_are_submitted_at_a_time() -> None:
    """Contract 6.3: the recent-backoff period."""

    async def most_at_once(*, held: bool) -> int:
        gate = SampleGate(RateLimiter(), 10_000_000)
        if held:
            gate.hold_back(100, None)
        running = most = 0

        async def submit() -> None:
            nonlocal running, most
            async with gate.admit(10):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1

        await asyncio.gather(*(submit() for _ in range(100)))
        return most

    assert run_virtual(most_at_once(held=False)) == 100
    assert run_virtual(most_at_once(held=True)) == 10


def test_the_breaker_opens_tries_again_and_closes() -> None:
    """R24: closed, open, half-open."""
    now = [0.0]
    breaker = CircuitBreaker("host", failure_threshold=3, open_s=10, clock=lambda: now[0])
    for _ in range(3):
        breaker.before_call()
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(CircuitOpenError, match="host failed 3 times in a row"):
        breaker.before_call()
    now[0] = 10.0
    breaker.before_call()
    with pytest.raises(CircuitOpenError):
        breaker.before_call()  # one trial at a time
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    now[0] = 20.0
    breaker.before_call()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_a_cancelled_trial_frees_its_place() -> None:
    now = [0.0]
    breaker = CircuitBreaker("host", failure_threshold=1, open_s=1, clock=lambda: now[0])
    breaker.failed()
    now[0] = 1.0
    breaker.before_call()
    with pytest.raises(CircuitOpenError):
        breaker.before_call()  # one trial at a time
    breaker.gave_no_answer()
    breaker.before_call()
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_senseless_breaker_is_refused() -> None:
    with pytest.raises(ConfigError, match="failure_threshold"):
        CircuitBreaker("host", failure_threshold=0)
