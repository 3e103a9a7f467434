"""The fan-out on scorers that a test scripts: who is asked, who is asked next, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from phasemesh.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from phasemesh.retrieval.fanout import SUSPECT_S, FanOut, incomplete
from phasemesh.retrieval.leaves import Gathered, LeafQuery
from phasemesh.retrieval.plan import PlannedFragment
from phasemesh.retrieval.work import Request
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1 import scorer_pb2
from phasemesh.v1.common_pb2 import ItemError, PhaseTiming, Tensor, Timings

Script = Callable[[scorer_pb2.LeafSearchRequest], Any]
QUERY = LeafQuery(scorer_pb2.IndexRef(), Tensor(), 3, pb.CANDIDATE_SOURCE_EXHAUSTIVE)


def good(request: scorer_pb2.LeafSearchRequest) -> scorer_pb2.LeafSearchResponse:
    """One document of three tokens per fragment."""
    ids = [selection.fragment_id for selection in request.fragments]
    return scorer_pb2.LeafSearchResponse(
        hits=[scorer_pb2.LeafHit(id=f"f{one}", score=float(one), fragment_id=one) for one in ids],
        searched_fragments=ids,
        coverage=pb.Coverage(documents=len(ids), tokens=3 * len(ids), exact=True),
    )


def failing(error: PhasemeshError) -> Script:
    def fail(request: scorer_pb2.LeafSearchRequest) -> Any:
        raise error

    return fail


class Client:
    """Stands for the RPC client: scorers by name, each a script."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = scripts
        self.calls: list[tuple[str, list[int], float]] = []
        self.requests: list[scorer_pb2.LeafSearchRequest] = []

    async def call(self, target: str, stub: type, method: str, request: Any, *, timeout_s: float) -> Any:
        assert method == "LeafSearch"
        self.calls.append((target, [one.fragment_id for one in request.fragments], timeout_s))
        self.requests.append(request)
        outcome = self.scripts[target](request)
        return await outcome if asyncio.iscoroutine(outcome) else outcome

    @property
    def asked(self) -> list[tuple[str, list[int]]]:
        return [(target, ids) for target, ids, _ in self.calls]


class Clock:
    def __init__(self) -> None:
        self.s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.s

    async def sleep(self, seconds: float) -> None:
        self.s += seconds
        self.slept.append(seconds)


def fan_out(**scripts: Script) -> tuple[FanOut, Client, Clock]:
    client, clock = Client(scripts), Clock()
    return FanOut(client, now_s=clock, sleep=clock.sleep), client, clock  # type: ignore[arg-type]  # a client as far as it is used


def request(clock: Clock, seconds: float = 8.0) -> Request:
    return Request("default", clock.s + seconds, PhaseClock(), clock)


def fragment(number: int, scorers: str, replicas: int = 1) -> PlannedFragment:
    return PlannedFragment(number, None, tuple(scorers), replicas)


async def test_one_call_per_scorer_names_its_fragments_and_bitmaps() -> None:
    fan, client, clock = fan_out(a=good, b=good)
    plan = [
        fragment(1, "ab"),
        PlannedFragment(2, b"\x05", ("b", "a"), 1),
        fragment(3, "ab"),
    ]
    gathered = await fan.search(request(clock), plan, QUERY)
    assert client.asked == [("a", [1, 3]), ("b", [2])]
    assert client.requests[1].fragments[0].allowed_rows == b"\x05"
    assert not client.requests[0].fragments[0].HasField("allowed_rows")
    assert gathered.searched == {1, 2, 3}
    assert (gathered.documents, gathered.tokens, gathered.exact) == (3, 9, True)


@pytest.mark.parametrize("error", [Unavailable("x"), DeadlineExceeded("x"), Internal()])
async def test_fragments_of_a_failing_scorer_go_to_their_next_one(error: PhasemeshError) -> None:
    fan, client, clock = fan_out(a=failing(error), b=good, c=good)
    gathered = await fan.search(request(clock), [fragment(1, "abc"), fragment(2, "acb")], QUERY)
    assert client.asked == [("a", [1, 2]), ("b", [1]), ("c", [2])]
    assert gathered.searched == {1, 2}
    assert not gathered.lost


async def test_a_call_leaves_time_for_the_next_scorer() -> None:
    fan, client, clock = fan_out(a=failing(Unavailable("x")), b=good)
    await fan.search(request(clock, 8.0), [fragment(1, "ab")], QUERY)
    assert [timeout for *_, timeout in client.calls] == [4.0, 7.6]


async def test_fragments_are_handed_on_while_other_scorers_work() -> None:
    release = asyncio.Event()

    async def slow(message: scorer_pb2.LeafSearchRequest) -> Any:
        await release.wait()
        return good(message)

    def last(message: scorer_pb2.LeafSearchRequest) -> Any:
        release.set()
        return good(message)

    fan, _, clock = fan_out(a=slow, b=failing(Unavailable("x")), c=last)
    gathered = await fan.search(request(clock), [fragment(1, "abc"), fragment(2, "bca")], QUERY)
    assert gathered.searched == {1, 2}


async def test_what_a_scorer_does_not_mention_is_not_covered() -> None:
    def forgetful(message: scorer_pb2.LeafSearchRequest) -> Any:
        del message.fragments[1:]
        return good(message)

    fan, _, clock = fan_out(a=forgetful, b=good)
    gathered = await fan.search(request(clock), [fragment(1, "ab"), fragment(2, "ab")], QUERY)
    assert gathered.searched == {1, 2}
    fan, _, clock = fan_out(a=forgetful)
    gathered = await fan.search(request(clock), [fragment(1, "a"), fragment(2, "a")], QUERY)
    assert (gathered.searched, set(gathered.lost)) == ({1}, {2})
    error = incomplete(gathered)
    assert isinstance(error, Unavailable)
    assert "1 of 2 fragments" in error.message


async def test_failures_of_single_fragments() -> None:
    def partly(message: scorer_pb2.LeafSearchRequest) -> Any:
        reply = good(message)
        for retryable, number in ((True, 2), (False, 3)):
            reply.failures.add(
                fragment_id=number,
                error=ItemError(code=5, reason="GONE", message=f"no {number}"),
                retryable=retryable,
            )
            reply.searched_fragments.remove(number)
        del reply.hits[1:]
        return reply

    fan, client, clock = fan_out(a=partly, b=good)
    plan = [fragment(1, "ab"), fragment(2, "ab"), fragment(3, "ab")]
    gathered = await fan.search(request(clock), plan, QUERY)
    assert client.asked[1:] == [("b", [2])]
    assert (gathered.searched, set(gathered.lost)) == ({1, 2}, {3})
    error = incomplete(gathered)
    assert isinstance(error, NotFound)
    assert (error.reason, "no 3" in error.message) == ("GONE", True)


async def test_an_answer_for_other_fragments_is_not_taken() -> None:
    def confused(message: scorer_pb2.LeafSearchRequest) -> Any:
        message.fragments[0].fragment_id = 99
        return good(message)

    fan, _, clock = fan_out(a=confused, b=good)
    gathered = await fan.search(request(clock), [fragment(1, "ab")], QUERY)
    assert [hit.id for leaf in gathered.hits for hit in leaf] == ["f1"]
    fan, _, clock = fan_out(a=confused)
    gathered = await fan.search(request(clock), [fragment(1, "a")], QUERY)
    assert isinstance(incomplete(gathered), Internal)


async def test_overload_is_not_spread_beyond_the_replicas() -> None:
    busy = ResourceExhausted("busy", reason="QUEUE_FULL", retry_after_s=3.0)
    fan, client, clock = fan_out(a=failing(busy), b=failing(busy), c=good)
    gathered = await fan.search(request(clock), [fragment(1, "abc", replicas=2)], QUERY)
    assert client.asked == [("a", [1]), ("b", [1])]
    error = incomplete(gathered)
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 3.0)


async def test_a_refused_query_is_the_callers_and_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def forever(message: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def refusing(message: Any) -> Any:
        raise InvalidArgument("too large", reason="VALUE_TOO_LARGE", field="query")

    fan, _, clock = fan_out(a=forever, b=refusing)
    with pytest.raises(InvalidArgument) as caught:
        await fan.search(request(clock), [fragment(1, "ab"), fragment(2, "ba")], QUERY)
    assert caught.value.field == "query.vectors"
    assert cancelled.is_set()


async def test_a_refused_key_is_no_fault_of_the_caller() -> None:
    fan, client, clock = fan_out(a=failing(Unauthenticated("who?")), b=good)
    with pytest.raises(Internal):
        await fan.search(request(clock), [fragment(1, "ab")], QUERY)
    assert len(client.calls) == 1


async def test_a_scorer_that_failed_is_asked_last_for_a_while() -> None:
    fan, client, clock = fan_out(a=failing(Unavailable("x")), b=good)
    await fan.search(request(clock), [fragment(1, "ab")], QUERY)
    client.scripts["a"] = good
    client.calls.clear()
    await fan.search(request(clock), [fragment(1, "ab")], QUERY)
    assert client.asked == [("b", [1])]
    clock.s += SUSPECT_S
    await fan.search(request(clock), [fragment(1, "ab")], QUERY)
    assert client.asked == [("b", [1]), ("a", [1])]


async def test_among_replicas_the_least_busy_is_asked() -> None:
    release = asyncio.Event()

    async def slow(message: Any) -> Any:
        await release.wait()
        return good(message)

    fan, client, clock = fan_out(a=slow, b=good, c=good)
    first = asyncio.create_task(fan.search(request(clock), [fragment(1, "abc", replicas=2)], QUERY))
    while not client.calls:
        await asyncio.sleep(0)
    await fan.search(request(clock), [fragment(1, "abc", replicas=2)], QUERY)
    # Not c, which doesn't have it, however idle.
    assert client.asked == [("a", [1]), ("b", [1])]
    release.set()
    await first


async def test_times_are_those_of_the_scorer_that_was_waited_for() -> None:
    quick_done = asyncio.Event()

    def timed(name: str) -> Timings:
        return Timings(total_ns=10, phases=[PhaseTiming(phase=name, duration_ns=10)])

    def quick(message: Any) -> Any:
        quick_done.set()
        reply = good(message)
        reply.timings.CopyFrom(timed("quick"))
        return reply

    async def slow(message: Any) -> Any:
        await quick_done.wait()
        await asyncio.sleep(0)
        reply = good(message)
        reply.timings.CopyFrom(timed("slow"))
        return reply

    fan, _, clock = fan_out(a=slow, b=quick)
    asking = request(clock)
    await fan.search(asking, [fragment(1, "ab"), fragment(2, "ba")], QUERY)
    assert [phase.phase for phase in asking.timings().phases] == ["slow"]


async def test_an_empty_plan_asks_nobody() -> None:
    fan, client, clock = fan_out()
    gathered = await fan.search(request(clock), [], QUERY)
    assert gathered == Gathered()
    assert client.calls == []


UNREACHABLE = Unavailable("the service can't be reached now", reason="PEER_UNREACHABLE")


def after(calls: int, then: Script, error: PhasemeshError = UNREACHABLE) -> Script:
    """Fails that often, then does what `then` does."""
    left = [calls]

    def script(request: scorer_pb2.LeafSearchRequest) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return then(request)

    return script


async def test_scorers_that_are_all_out_of_reach_are_asked_again_for_a_moment() -> None:
    # One was killed, the other has been started again and isn't connected yet.
    fan, _, clock = fan_out(a=after(9, good), b=after(2, good))
    gathered = await fan.search(request(clock), [fragment(1, "ab"), fragment(2, "ba")], QUERY)
    assert gathered.searched == {1, 2}
    assert not gathered.lost
    assert clock.slept == [0.1]


async def test_scorers_that_stay_out_of_reach_are_given_up_soon() -> None:
    fan, _, clock = fan_out(a=failing(UNREACHABLE), b=failing(UNREACHABLE))
    gathered = await fan.search(request(clock, 60.0), [fragment(1, "ab")], QUERY)
    assert list(gathered.lost) == [1]
    assert 2 <= sum(clock.slept) <= 3
    assert isinstance(incomplete(gathered), Unavailable)


async def test_no_time_is_spent_on_waiting_that_the_call_does_not_have() -> None:
    fan, _, clock = fan_out(a=failing(UNREACHABLE))
    await fan.search(request(clock, 0.5), [fragment(1, "a")], QUERY)
    assert sum(clock.slept) < 0.5


@pytest.mark.parametrize("error", [Unavailable("x"), Internal(), ResourceExhausted("x")])
async def test_scorers_that_answer_with_a_fault_are_not_asked_again(error: PhasemeshError) -> None:
    fan, client, clock = fan_out(a=failing(error))
    await fan.search(request(clock), [fragment(1, "a")], QUERY)
    assert len(client.calls) == 1
    assert not clock.slept


async def test_only_fragments_without_an_answer_are_asked_for_again() -> None:
    fan, client, clock = fan_out(a=after(1, good), b=good)
    gathered = await fan.search(request(clock), [fragment(1, "a"), fragment(2, "b")], QUERY)
    assert client.asked == [("a", [1]), ("b", [2]), ("a", [1])]
    assert gathered.searched == {1, 2}
    assert gathered.documents == 2
