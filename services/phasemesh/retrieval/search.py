"""Search: plan over a version's fragments, encode, fan out, merge, project.

Invariant: a reply covers every fragment of its version that may hold a hit, or says how many it lacks; a
filter is evaluated before anything is scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasemesh.errors import InvalidArgument, Unimplemented
from phasemesh.index.spec import Version
from phasemesh.retrieval.fanout import FanOut, incomplete
from phasemesh.retrieval.filters import filter_from_wire
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.leaves import Gathered, LeafQuery
from phasemesh.retrieval.merge import merge_hits
from phasemesh.retrieval.plan import PlannedFragment, plan_search
from phasemesh.retrieval.projection import Wanted, document_to_wire, wanted_parts
from phasemesh.retrieval.query import Queries, check_query, index_ref
from phasemesh.retrieval.work import Request
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb

_EXHAUSTIVE = pb.CANDIDATE_SOURCE_EXHAUSTIVE


class Search:
    """Answers searches.

    Args:
        collections: to search.
        queries: to vectors.
        fan_out: to the scorers.
        scorers: names of all of them, which are their targets.
        replicas: scorers that each fragment is placed on.
        max_k: most documents of one search.
        max_message_bytes: largest reply.
    """

    def __init__(
        self,
        collections: Collections,
        queries: Queries,
        fan_out: FanOut,
        *,
        scorers: Sequence[str],
        replicas: int,
        max_k: int,
        max_message_bytes: int,
    ) -> None:
        self._collections = collections
        self._queries = queries
        self._fan_out = fan_out
        self._scorers = tuple(dict.fromkeys(scorers))
        self._replicas = replicas
        self._max_k = max_k
        self._max_message_bytes = max_message_bytes

    async def search(self, request: Request, wire: pb.SearchRequest) -> pb.SearchResponse:
        """Answer `wire`.

        Raises:
            PhasemeshError: it is at fault, or can't be answered completely now.
        """
        self._check(wire)
        with request.clock.phase(names.PHASE_PLAN):
            opened = await self._collections.open(request.tenant, wire.collection)
            request.serve(opened.spec.model)
            wanted = wanted_parts(wire.projection, opened.spec) if wire.HasField("projection") else None
            # Checked before the plan is made, so that a wrong query costs nothing.
            checked = check_query(wire.query, opened.spec)
            version, plan = await self._collections.run(lambda: self._plan(opened, wire))
        query = await self._queries.vectors(request, opened, version, checked, wire.truncation)
        # A document that is the query is no hit of it; one more is asked for, in case it is found.
        self_id = checked.stored_id
        leaf_query = LeafQuery(
            index=index_ref(request.tenant, opened, version),
            query=query.tensor(),
            k=wire.k + (self_id is not None),
            candidates=_EXHAUSTIVE,
            field=query.field,
        )
        gathered = await self._fan_out.search(request, plan, leaf_query)
        if gathered.lost and not wire.allow_partial:
            raise incomplete(gathered)
        with request.clock.phase(names.PHASE_MERGE):
            found = [hit for hit in merge_hits(gathered.hits, leaf_query.k) if hit.id != self_id][: wire.k]
            hits = [pb.Hit(id=hit.id, score=hit.score) for hit in found]
            if wanted is not None and hits:
                await project(hits, self._collections, opened, version, wanted)
        reply = pb.SearchResponse(
            hits=hits,
            version=version_to_wire(version),
            coverage=_coverage(plan, gathered),
            usage=query.usage,
            timings=request.timings(),
        )
        check_reply(reply.ByteSize(), self._max_message_bytes, "lower k, or leave the vectors out")
        return reply

    def _check(self, wire: pb.SearchRequest) -> None:
        if not 1 <= wire.k <= self._max_k:
            raise InvalidArgument(
                f"k is {wire.k}; give 1 to {self._max_k}", reason="K_OUT_OF_RANGE", field="k"
            )
        if wire.candidates not in pb.CandidateSource.values():
            raise InvalidArgument(
                f"there is no source of candidates {wire.candidates}; use one of "
                f"{', '.join(pb.CandidateSource.keys())}",
                reason="UNKNOWN_ENUM_VALUE",
                field="candidates",
            )
        if wire.candidates not in (pb.CANDIDATE_SOURCE_UNSPECIFIED, _EXHAUSTIVE):
            raise Unimplemented(
                f"{pb.CandidateSource.Name(wire.candidates)} comes with a later release; use "
                "CANDIDATE_SOURCE_EXHAUSTIVE",
                field="candidates",
            )
        if wire.HasField("dense_vector"):
            raise Unimplemented(
                "dense candidates come with a later release; leave it out", field="dense_vector"
            )
        if wire.HasField("candidate_limit") and wire.candidate_limit < wire.k:
            raise InvalidArgument(
                f"candidate_limit is {wire.candidate_limit}, below k; give at least {wire.k}",
                reason="CANDIDATE_LIMIT_OUT_OF_RANGE",
                field="candidate_limit",
            )

    def _plan(self, opened: Opened, wire: pb.SearchRequest) -> tuple[Version, list[PlannedFragment]]:
        condition = filter_from_wire(wire.filter, opened.spec) if wire.HasField("filter") else None
        version = opened.resolve(wire.version)
        return version, plan_search(opened.store, version, condition, self._scorers, self._replicas)


async def project(
    hits: Sequence[pb.Hit], collections: Collections, opened: Opened, version: Version, wanted: Wanted
) -> None:
    """Add to each hit what is wanted of its document; `version` is the one that it was found in."""
    ids = [hit.id for hit in hits]
    documents, missing = await collections.run(lambda: opened.store.get(ids, version, wanted.parts))
    # The version is exact, so what was found in it is in it.
    assert not missing
    for hit, document in zip(hits, documents, strict=True):
        hit.document.CopyFrom(document_to_wire(document, wanted))


def check_reply(size_bytes: int, limit_bytes: int, advice: str) -> None:
    """Refuse what couldn't be sent.

    Raises:
        InvalidArgument: the reply is over the limit of a message.
    """
    if size_bytes > limit_bytes:
        raise InvalidArgument(
            f"the reply would have {size_bytes} bytes and a message holds {limit_bytes} "
            f"(rpc.max_message_bytes); {advice}",
            reason="REPLY_TOO_LARGE",
            field="projection",
        )


def _coverage(plan: Sequence[PlannedFragment], gathered: Gathered) -> pb.Coverage:
    return pb.Coverage(
        fragments=len(plan),
        searched_fragments=len(gathered.searched),
        documents=gathered.documents,
        tokens=gathered.tokens,
        candidates=_EXHAUSTIVE,
        exact=gathered.exact and not gathered.lost,
    )
