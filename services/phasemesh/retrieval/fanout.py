"""A planned search or scoring carried out: one call per scorer, its fragments handed on when it fails.

Invariant: coverage is counted fragment by fragment, from what scorers say they answered for. An answer that
lacks one is an error unless the caller accepts partial answers, and then the reply says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from phasemesh.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PermissionDenied,
    PhasemeshError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    from_code,
)
from phasemesh.retrieval.leaves import Gathered, LeafQuery, RowQuery, ScoreCall, Scored, SearchCall
from phasemesh.retrieval.plan import PlannedFragment
from phasemesh.retrieval.work import Request
from phasemesh.rpc.client import RpcClient
from phasemesh.v1.scorer_pb2_grpc import ScorerServiceStub

#: How long a scorer that failed is asked last, seconds.
SUSPECT_S = 2.0
#: Share of the time left that one attempt may take while there are scorers to hand on to, and otherwise: some
#: is kept back for the merge, or for a partial answer.
_ATTEMPT_SHARE = 0.5
_LAST_SHARE = 0.95
#: A scorer that takes longer than this and misses its deadline counts as failed, seconds.
_HUNG_S = 1.0
_RETRY_AFTER_S = 1.0
#: Reasons of a peer that isn't there, or soon won't be.
_UNREACHABLE = ("PEER_UNREACHABLE", "DRAINING")
#: While no scorer at all can be reached for a fragment, all of them are asked again after each of these
#: seconds: one that was started again listens before our channel knows, which tries every 2 s at the least.
_PATIENCE_S = (0.1, 0.2, 0.4, 0.8, 1.0)

_log = logging.getLogger(__name__)


class LeafCall(Protocol):
    """What is asked of scorers about fragments, and what becomes of their answers."""

    @property
    def method(self) -> str:
        """Of the ScorerService."""

    @property
    def query_field(self) -> str:
        """The query's path in the caller's request."""

    def message(self, fragments: Sequence[PlannedFragment]) -> Message:
        """What one scorer is asked about some of the fragments."""

    def take(self, reply: Any, asked: Sequence[PlannedFragment]) -> dict[int, PhasemeshError]:
        """Add a reply to what was gathered; returns fragments that it doesn't cover, each with the reason.

        Raises:
            ValueError: It answers something that wasn't asked; nothing of it was added.
        """


@dataclass(frozen=True, slots=True)
class _Answer:
    reply: Any
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Way:
    """One fragment's way through its scorers."""

    fragment: PlannedFragment
    left: list[str]
    tried: int = 0


class FanOut:
    """Asks scorers; remembers which of them failed lately and how many calls each has in flight.

    Args:
        client: for the calls.
        now_s: monotonic seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        client: RpcClient,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._now_s = now_s
        self._sleep = sleep
        self._suspect_until_s: dict[str, float] = {}
        self._in_flight: Counter[str] = Counter()

    async def search(self, request: Request, plan: Sequence[PlannedFragment], query: LeafQuery) -> Gathered:
        """What all fragments of `plan` hold.

        Raises:
            PhasemeshError: the query itself is refused, or the time is up.
        """
        call = SearchCall(query)
        call.gathered.lost = await self.run(request, plan, call)
        assert call.gathered.searched | call.gathered.lost.keys() == {one.fragment_id for one in plan}
        return call.gathered

    async def score(self, request: Request, plan: Sequence[PlannedFragment], query: RowQuery) -> Scored:
        """Scores of rows; `plan` has the fragments that hold them.

        Raises:
            PhasemeshError: the query itself is refused, or the time is up.
        """
        call = ScoreCall(query)
        call.scored.lost = await self.run(request, plan, call)
        return call.scored

    async def run(
        self, request: Request, plan: Sequence[PlannedFragment], call: LeafCall
    ) -> dict[int, PhasemeshError]:
        """Ask for all fragments of `plan`; returns those that no scorer answered for, with the last reason.

        Raises:
            PhasemeshError: the query itself is refused, or the time is up.
        """
        lost: dict[int, PhasemeshError] = {}
        ways = {fragment.fragment_id: _Way(fragment, self._order(fragment)) for fragment in plan}
        running: dict[asyncio.Task[_Answer | PhasemeshError], tuple[str, list[_Way]]] = {}
        slowest: _Answer | None = None
        pauses = iter(_PATIENCE_S)

        def launch(wanted: Iterable[_Way]) -> None:
            for scorer, theirs in _by_scorer(wanted).items():
                task = asyncio.create_task(self._ask(request, scorer, theirs, call))
                running[task] = scorer, theirs

        try:
            launch(ways.values())
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                again: list[_Way] = []
                for task in done:
                    scorer, theirs = running.pop(task)
                    outcome = task.result()
                    if isinstance(outcome, PhasemeshError):
                        faults = dict.fromkeys((way.fragment.fragment_id for way in theirs), outcome)
                    else:
                        faults = _take(call, outcome.reply, theirs, scorer)
                        if slowest is None or outcome.end_ns > slowest.end_ns:
                            slowest = outcome
                    for fragment_id, fault in faults.items():
                        way = ways[fragment_id]
                        if _next(way, fault):
                            again.append(way)
                        else:
                            lost[fragment_id] = fault
                launch(again)
                if not running and any(_unreachable(fault) for fault in lost.values()):
                    launch(await self._once_more(request, ways, lost, next(pauses, None)))
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
        if slowest is not None:
            # Scorers work side by side; the one that was waited for says where the time went.
            request.note_reply(slowest.reply.timings, slowest.start_ns, slowest.end_ns)
        return lost

    async def _once_more(
        self,
        request: Request,
        ways: Mapping[int, _Way],
        lost: dict[int, PhasemeshError],
        pause_s: float | None,
    ) -> list[_Way]:
        """Ways of lost fragments that no scorer could be reached for, after a pause; none without time."""
        if pause_s is None or request.remaining_s() * _ATTEMPT_SHARE < pause_s:
            return []
        await self._sleep(pause_s)
        again = [fragment_id for fragment_id, fault in lost.items() if _unreachable(fault)]
        for fragment_id in again:
            del lost[fragment_id]
            ways[fragment_id].left = self._order(ways[fragment_id].fragment)
        return [ways[fragment_id] for fragment_id in again]

    def _order(self, fragment: PlannedFragment) -> list[str]:
        placed, others = fragment.scorers[: fragment.replicas], fragment.scorers[fragment.replicas :]
        # Sorting is stable: among equally busy replicas the placement's order stays.
        ordered = [*sorted(placed, key=self._in_flight.__getitem__), *others]
        now_s = self._now_s()
        return sorted(ordered, key=lambda scorer: self._suspect_until_s.get(scorer, now_s) > now_s)

    async def _ask(
        self, request: Request, scorer: str, ways: Sequence[_Way], call: LeafCall
    ) -> _Answer | PhasemeshError:
        message = call.message([way.fragment for way in ways])
        left_s = request.remaining_s()
        share = _ATTEMPT_SHARE if all(way.left for way in ways) else _LAST_SHARE
        timeout_s = left_s * share
        start_ns = request.clock.now_ns()
        self._in_flight[scorer] += 1
        try:
            reply = await self._client.call(
                scorer, ScorerServiceStub, call.method, message, timeout_s=timeout_s
            )
        except (Unauthenticated, PermissionDenied) as error:
            internal = Internal()
            _log.error(
                "a scorer refused this service's key; set the same access.keys on both",
                extra={"scorer": scorer, "error_id": internal.error_id, "reason": error.reason},
            )
            raise internal from error
        except InvalidArgument as error:
            if error.field == "query" or error.field.startswith("query."):
                error.field = error.field.replace("query", call.query_field, 1)
            raise
        except PhasemeshError as error:
            if isinstance(error, Unavailable) or (
                isinstance(error, DeadlineExceeded) and timeout_s > _HUNG_S
            ):
                self._suspect_until_s[scorer] = self._now_s() + SUSPECT_S
            _log.warning("scorer failed", extra={"scorer": scorer, "reason": error.reason})
            return error
        finally:
            self._in_flight[scorer] -= 1
        self._suspect_until_s.pop(scorer, None)
        return _Answer(reply, start_ns, request.clock.now_ns())


def incomplete(gathered: Gathered | Scored) -> PhasemeshError:
    """The error of a search or scoring that lost fragments and may not be partial."""
    lost, total = len(gathered.lost), len(gathered.lost) + len(gathered.searched)
    first = min(gathered.lost)
    fault = gathered.lost[first]
    words = f"{lost} of {total} fragments could not be searched; fragment {first}: {fault.message}"
    if isinstance(fault, ResourceExhausted | DeadlineExceeded):
        return from_code(fault.code, words, reason=fault.reason, retry_after_s=fault.retry_after_s)
    if isinstance(fault, Internal):
        return fault
    if not fault.retryable:
        return from_code(fault.code, words, reason=fault.reason, field=fault.field)
    return Unavailable(
        words, reason="FRAGMENTS_UNAVAILABLE", retry_after_s=fault.retry_after_s or _RETRY_AFTER_S
    )


def _by_scorer(ways: Iterable[_Way]) -> Mapping[str, list[_Way]]:
    grouped: dict[str, list[_Way]] = {}
    for way in ways:
        grouped.setdefault(way.left.pop(0), []).append(way)
        way.tried += 1
    return grouped


def _next(way: _Way, fault: PhasemeshError) -> bool:
    """Whether another scorer may do better."""
    if not way.left:
        return False
    if isinstance(fault, ResourceExhausted):
        # Replicas have the segment too. The others would first have to load it, which spreads an overload.
        return way.tried < way.fragment.replicas
    return isinstance(fault, Unavailable | DeadlineExceeded | Internal)


def _unreachable(fault: PhasemeshError) -> bool:
    """Whether nothing was there to answer, which may be over in a moment."""
    return isinstance(fault, Unavailable) and fault.reason in _UNREACHABLE


def _take(call: LeafCall, reply: Any, ways: Sequence[_Way], scorer: str) -> dict[int, PhasemeshError]:
    """Add a reply; returns the fragments that it doesn't cover, each with the reason."""
    try:
        return call.take(reply, [way.fragment for way in ways])
    except ValueError as error:
        internal = Internal()
        _log.error(
            "a scorer answered for what it wasn't asked for",
            extra={"scorer": scorer, "error_id": internal.error_id, "reason": str(error)},
        )
        return dict.fromkeys((way.fragment.fragment_id for way in ways), internal)
