"""Places at a worker are shared fairly, never lost and never doubled."""

from __future__ import annotations

import asyncio

from tinkex.server.fairness.gate import MAX_REMEMBERED, FairGate


async def test_a_newcomer_waits_for_one_request_not_for_the_whole_queue() -> None:
    gate, order = FairGate(1), []

    async def work(user: str) -> None:
        async with gate.slot(user, 10):
            order.append(user)
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(work("greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    late = asyncio.create_task(work("late"))
    await asyncio.gather(*greedy, late)
    assert order.index("late") <= 3
    assert len(order) == 101


async def test_users_share_by_cost_not_by_count() -> None:
    gate, spent = FairGate(1), {"small": 0, "large": 0}

    async def work(user: str, cost: int) -> None:
        async with gate.slot(user, cost):
            spent[user] += cost
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work("small", 1)) for _ in range(400)]
    tasks += [asyncio.create_task(work("large", 10)) for _ in range(40)]
    for _ in range(330):
        await asyncio.sleep(0)
    assert 0.6 < spent["small"] / spent["large"] < 1.6
    await asyncio.gather(*tasks)


async def test_one_users_requests_keep_their_order() -> None:
    gate, order = FairGate(2), []

    async def work(number: int) -> None:
        async with gate.slot("ada"):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(20)))
    assert order == list(range(20))


async def test_places_come_back_whatever_is_cancelled() -> None:
    gate = FairGate(2)

    async def work() -> None:
        async with gate.slot("ada"):
            await asyncio.sleep(10)

    tasks = [asyncio.create_task(work()) for _ in range(10)]
    await asyncio.sleep(0.01)
    for task in tasks[::-1]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.num_waiting == 0
    await asyncio.wait_for(asyncio.gather(gate.acquire("a"), gate.acquire("b")), 60)


async def test_it_says_about_how_many_are_ahead() -> None:
    gate = FairGate(1)
    await gate.acquire("ada")
    waiting = [asyncio.create_task(gate.acquire(user)) for user in ["bob"] * 5 + ["eve"] * 2]
    await asyncio.sleep(0)
    assert gate.ahead_of("eve") == 3
    assert gate.ahead_of("bob") == 6
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_waits_is_served_however_many_users_come_meanwhile() -> None:
    """The eighth slot is for users who hold few: they pass one who holds many and waits."""
    gate = FairGate(8)
    for _ in range(7):
        await gate.acquire("greedy")
    waiting = asyncio.create_task(gate.acquire("greedy"))
    await asyncio.sleep(0)
    for number in range(2 * MAX_REMEMBERED + 2):
        newcomer = f"user-{number // 2}"
        await gate.acquire(newcomer, cost=10.0)
        gate.release(newcomer)
    assert gate.num_waiting == 1
    gate.release("greedy")
    await asyncio.wait_for(waiting, 60)
