"""Rerank: scores of stored documents that are named by id.

Invariant: every id of a request is answered once for every time that it is named, as a hit, as missing or as
empty; scores are those of a search of the same version, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from phasemesh.errors import InvalidArgument
from phasemesh.index.spec import Version
from phasemesh.index.store import RowPlace
from phasemesh.retrieval.fanout import FanOut, incomplete
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.leaves import RowQuery
from phasemesh.retrieval.plan import PlannedFragment, plan_rows
from phasemesh.retrieval.projection import wanted_parts
from phasemesh.retrieval.query import Queries, QueryVectors, check_id, check_query, index_ref
from phasemesh.retrieval.search import check_reply, project
from phasemesh.retrieval.work import Request
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1 import scorer_pb2

#: Most ids of one request.
MAX_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Located:
    """Documents in one version, and who is asked for their scores.

    Attributes:
        version: exact.
        places: by id; ids that aren't in the version are absent.
        plan: fragments that hold a document with token vectors.
    """

    version: Version
    places: dict[str, RowPlace]
    plan: list[PlannedFragment]


class RowScorer:
    """Has stored documents scored by the scorers that hold them.

    Args:
        fan_out: to the scorers.
        scorers: names of all of them, which are their targets.
        replicas: scorers that each fragment is placed on.
    """

    def __init__(self, fan_out: FanOut, *, scorers: Sequence[str], replicas: int) -> None:
        self._fan_out = fan_out
        self._scorers = tuple(dict.fromkeys(scorers))
        self._replicas = replicas

    def locate(self, opened: Opened, wire: pb.ReadVersion, ids: Collection[str]) -> Located:
        """Where documents lie in the version that is to be read; blocks.

        Raises:
            PhasemeshError: the version is at fault.
        """
        version = opened.resolve(wire)
        places = opened.store.locate(list(ids), version)
        holding = {place.fragment_id for place in places.values() if place.tokens}
        return Located(
            version, places, plan_rows(opened.store, version, holding, self._scorers, self._replicas)
        )

    async def score(
        self, request: Request, opened: Opened, located: Located, query: QueryVectors, *, align: bool = False
    ) -> dict[str, scorer_pb2.LeafScore]:
        """What the scorers say of the documents that have token vectors, by id; all of them.

        Raises:
            PhasemeshError: the query is refused, a fragment can't be scored now, or the time is up.
        """
        filled = {name: place for name, place in located.places.items() if place.tokens}
        rows: dict[int, list[int]] = {}
        for place in filled.values():
            rows.setdefault(place.fragment_id, []).append(place.row)
        asked = RowQuery(
            index=index_ref(request.tenant, opened, located.version),
            query=query.tensor(),
            rows=rows,
            align=align,
            field=query.field,
        )
        scored = await self._fan_out.score(request, located.plan, asked)
        if scored.lost:
            raise incomplete(scored)
        return {name: scored.scores[place.fragment_id, place.row] for name, place in filled.items()}


class Rerank:
    """Answers reranks.

    Args:
        collections: of the documents.
        queries: to vectors.
        scorer: of rows.
        max_message_bytes: largest reply.
    """

    def __init__(
        self, collections: Collections, queries: Queries, scorer: RowScorer, *, max_message_bytes: int
    ) -> None:
        self._collections = collections
        self._queries = queries
        self._scorer = scorer
        self._max_message_bytes = max_message_bytes

    async def rerank(self, request: Request, wire: pb.RerankRequest) -> pb.RerankResponse:
        """Answer `wire`.

        Raises:
            PhasemeshError: it is at fault, or can't be answered completely now.
        """
        _check(wire)
        with request.clock.phase(names.PHASE_PLAN):
            opened = await self._collections.open(request.tenant, wire.collection)
            request.serve(opened.spec.model)
            wanted = wanted_parts(wire.projection, opened.spec) if wire.HasField("projection") else None
            checked = check_query(wire.query, opened.spec)
            located = await self._collections.run(
                lambda: self._scorer.locate(opened, wire.version, dict.fromkeys(wire.ids))
            )
        query = await self._queries.vectors(request, opened, located.version, checked, wire.truncation)
        scores = await self._scorer.score(request, opened, located, query)
        with request.clock.phase(names.PHASE_MERGE):
            ranked, missing, empty = _answers(wire.ids, located, scores)
            hits = [pb.Hit(id=name, score=score) for score, name in ranked]
            if wire.HasField("top_k"):
                hits = hits[: wire.top_k]
            if wanted is not None and hits:
                await project(hits, self._collections, opened, located.version, wanted)
        reply = pb.RerankResponse(
            hits=hits,
            missing_ids=missing,
            empty_ids=empty,
            version=version_to_wire(located.version),
            usage=query.usage,
            timings=request.timings(),
        )
        check_reply(reply.ByteSize(), self._max_message_bytes, "name fewer ids, or leave the vectors out")
        return reply


def _answers(
    ids: Iterable[str], located: Located, scores: dict[str, scorer_pb2.LeafScore]
) -> tuple[list[tuple[float, str]], list[str], list[str]]:
    """Scores with their ids, best first and equal ones by id; missing ids; ids of empty documents."""
    ranked: list[tuple[float, str]] = []
    missing: list[str] = []
    empty: list[str] = []
    for name in ids:
        if name not in located.places:
            missing.append(name)
        elif name in scores and scores[name].HasField("score"):
            ranked.append((scores[name].score, name))
        else:
            empty.append(name)
    ranked.sort(key=lambda hit: (-hit[0], hit[1]))
    return ranked, missing, empty


def _check(wire: pb.RerankRequest) -> None:
    if not wire.ids:
        raise InvalidArgument("ids is empty; give at least one", reason="EMPTY_LIST", field="ids")
    if len(wire.ids) > MAX_IDS:
        raise InvalidArgument(
            f"ids has {len(wire.ids)} entries and the limit is {MAX_IDS}; split the request",
            reason="TOO_MANY_DOCUMENTS",
            field="ids",
        )
    for position, name in enumerate(wire.ids):
        check_id(name, f"ids[{position}]")
    if wire.HasField("top_k") and not wire.top_k:
        raise InvalidArgument(
            "top_k is 0; give at least 1, or leave it out for all", reason="K_OUT_OF_RANGE", field="top_k"
        )
