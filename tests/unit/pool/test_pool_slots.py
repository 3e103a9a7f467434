import asyncio
import random

import pytest

from phasemesh.pool.protocol import PoolStats, ReplicaLost
from phasemesh.pool.slots import SlotTable


def table(*replica_ids: str) -> SlotTable:
    slots = SlotTable(replica_ids, random.Random(0))
    for replica_id in replica_ids:
        slots.set_ready(replica_id, True)
    return slots


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_takes_the_least_busy_replica_and_two_slots_of_each_at_most():
    slots = table("a", "b")
    got = [await slots.acquire() for _ in range(4)]
    assert sorted(got[:2]) == ["a", "b"]
    assert sorted(got) == ["a", "a", "b", "b"]
    fifth = asyncio.create_task(slots.acquire())
    await turn()
    assert not fifth.done()
    assert slots.total_in_flight == 4 == 2 * PoolStats.SLOTS_PER_REPLICA
    slots.release("b")
    assert await fifth == "b"


async def test_serves_waiters_in_order_of_arrival():
    slots = table("a")
    await slots.acquire()
    await slots.acquire()
    order: list[int] = []

    async def wait(i: int) -> None:
        await slots.acquire()
        order.append(i)

    tasks = [asyncio.create_task(wait(i)) for i in range(3)]
    await turn()
    for _ in range(3):
        slots.release("a")
        await turn()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_cancelled_waiter_takes_nothing():
    slots = table("a")
    await slots.acquire()
    await slots.acquire()
    waiter = asyncio.create_task(slots.acquire())
    await turn()
    waiter.cancel()
    await turn()
    slots.release("a")
    slots.release("a")
    assert slots.total_in_flight == 0


async def test_a_grant_that_crosses_a_cancellation_is_given_back():
    slots = table("a")
    await slots.acquire()
    await slots.acquire()
    waiter = asyncio.create_task(slots.acquire())
    await turn()
    slots.release("a")  # grants
    waiter.cancel()  # before the waiter could run
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert slots.in_flight("a") == 1


async def test_avoids_a_replica_only_while_another_is_ready():
    slots = table("a", "b")
    assert [await slots.acquire(avoid="a") for _ in range(2)] == ["b", "b"]
    waiting = asyncio.create_task(slots.acquire(avoid="a"))
    await turn()
    assert not waiting.done()  # b is full but ready: a stays avoided
    slots.set_ready("b", False)
    assert await waiting == "a"


async def test_waits_while_all_restart_and_ends_when_all_have_failed():
    slots = table("a", "b")
    slots.set_ready("a", False)
    slots.set_ready("b", False)
    waiting = asyncio.create_task(slots.acquire())
    await turn()
    assert not waiting.done()
    slots.fail("a")
    await turn()
    assert not waiting.done()
    slots.fail("b")
    with pytest.raises(ReplicaLost, match="every replica has failed"):
        await waiting
    with pytest.raises(ReplicaLost):
        await slots.acquire()


async def test_close_refuses_all():
    slots = table("a")
    slots.set_ready("a", False)
    waiting = asyncio.create_task(slots.acquire())
    await turn()
    slots.close("closed")
    with pytest.raises(ReplicaLost, match="closed"):
        await waiting


async def test_releasing_what_was_not_taken_is_a_bug():
    with pytest.raises(AssertionError):
        table("a").release("a")
