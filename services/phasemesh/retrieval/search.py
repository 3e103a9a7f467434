"""Search: plan over a version's fragments, encode, fan out, merge, project.

Invariant: a reply covers every fragment of its version that may hold a hit, or says how many it lacks; a
filter is evaluated before anything is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import FailedPrecondition, InvalidArgument, Unimplemented
from phasemesh.index.spec import CollectionSpec, Version
from phasemesh.retrieval.encoding import TextEncoder
from phasemesh.retrieval.fanout import FanOut, Gathered, LeafQuery, incomplete
from phasemesh.retrieval.filters import equality_filter
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.merge import merge_hits
from phasemesh.retrieval.plan import PlannedFragment, plan_search
from phasemesh.retrieval.projection import Wanted, document_to_wire, wanted_parts
from phasemesh.retrieval.specs import CODEC_TO_WIRE, REDUCTION_TO_WIRE
from phasemesh.retrieval.vectors import conditioned, matrix_from_wire
from phasemesh.retrieval.work import Request
from phasemesh.rpc.codec import encode_tensor
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1 import scorer_pb2
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_FLOAT16, VECTOR_ENCODING_FLOAT32, Usage

_EXHAUSTIVE = pb.CANDIDATE_SOURCE_EXHAUSTIVE


class Search:
    """Answers searches.

    Args:
        collections: to search.
        encoder: of query texts.
        fan_out: to the scorers.
        scorers: names of all of them, which are their targets.
        replicas: scorers that each fragment is placed on.
        max_k: most documents of one search.
        max_message_bytes: largest reply.
    """

    def __init__(
        self,
        collections: Collections,
        encoder: TextEncoder,
        fan_out: FanOut,
        *,
        scorers: Sequence[str],
        replicas: int,
        max_k: int,
        max_message_bytes: int,
    ) -> None:
        self._collections = collections
        self._encoder = encoder
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
            given = _given_query(wire.query, opened.spec)
            version, plan = await self._collections.run(lambda: self._plan(opened, wire))
        if given is None:
            encoded = await self._encoder.query(request, opened.spec, wire.query.text, wire.truncation)
            query = conditioned(encoded.vectors, opened.spec.normalize, "query.text", scale=False)
            usage = encoded.usage
        else:
            query, usage = given, Usage()
        if not len(query):
            raise _empty_query("query.text", "the model gives no token vectors for this text; give another")
        gathered = await self._fan_out.search(
            request, plan, _leaf_query(request, opened, version, query, wire.k)
        )
        if gathered.lost and not wire.allow_partial:
            raise incomplete(gathered)
        with request.clock.phase(names.PHASE_MERGE):
            hits = [pb.Hit(id=hit.id, score=hit.score) for hit in merge_hits(gathered.hits, wire.k)]
            if wanted is not None and hits:
                await self._project(hits, opened, version, wanted)
        reply = pb.SearchResponse(
            hits=hits,
            version=version_to_wire(version),
            coverage=_coverage(plan, gathered),
            usage=usage,
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
        equals = equality_filter(wire.filter, opened.spec) if wire.HasField("filter") else None
        version = opened.resolve(wire.version)
        return version, plan_search(opened.store, version, equals, self._scorers, self._replicas)

    async def _project(self, hits: list[pb.Hit], opened: Opened, version: Version, wanted: Wanted) -> None:
        ids = [hit.id for hit in hits]
        documents, missing = await self._collections.run(lambda: opened.store.get(ids, version, wanted.parts))
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


def _given_query(wire: pb.Query, spec: CollectionSpec) -> NDArray[Any] | None:
    """The query's matrix, checked; None where it is a text that the collection's model can encode."""
    kind = wire.WhichOneof("content")
    if kind == "vectors":
        shape = list(wire.vectors.shape)
        if len(shape) == 2 and shape[0] == 0:
            raise _empty_query("query.vectors", "the query has no vectors; give at least one")
        return conditioned(
            matrix_from_wire(wire.vectors, spec, "query.vectors"), spec.normalize, "query.vectors"
        )
    if kind is None or not wire.text.strip():
        raise _empty_query("query", "the query is empty; give a text or vectors")
    if not spec.model:
        raise FailedPrecondition(
            "the collection has no model to encode a text with; give query.vectors",
            reason="NO_MODEL",
            field="query.text",
        )
    return None


def _leaf_query(request: Request, opened: Opened, version: Version, query: NDArray[Any], k: int) -> LeafQuery:
    spec = opened.spec
    return LeafQuery(
        index=scorer_pb2.IndexRef(
            tenant=request.tenant,
            version=version_to_wire(version),
            codec=CODEC_TO_WIRE[spec.codec],
            token_dimension=spec.token_dim,
            reduction=REDUCTION_TO_WIRE[spec.reduction],
        ),
        query=encode_tensor(
            query, VECTOR_ENCODING_FLOAT16 if query.dtype == np.float16 else VECTOR_ENCODING_FLOAT32
        ),
        k=k,
        candidates=_EXHAUSTIVE,
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


def _empty_query(field: str, words: str) -> InvalidArgument:
    return InvalidArgument(words, reason="EMPTY_QUERY", field=field)
