"""Explain: which of a document's tokens each of the query's tokens matched, and how well.

Invariant: the alignment is the one that gives the document's score. For a document of several chunks that is
its best chunk's alone, because only that one counts in a search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import FailedPrecondition, NotFound
from phasemesh.index.schema import Part
from phasemesh.retrieval.handles import Collections, version_to_wire
from phasemesh.retrieval.query import Queries, check_id, check_query
from phasemesh.retrieval.rerank import RowScorer
from phasemesh.retrieval.specs import REDUCTION_TO_WIRE
from phasemesh.retrieval.work import Request
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb


class Explain:
    """Explains scores.

    Args:
        collections: of the documents.
        queries: to vectors.
        scorer: of rows.
    """

    def __init__(self, collections: Collections, queries: Queries, scorer: RowScorer) -> None:
        self._collections = collections
        self._queries = queries
        self._scorer = scorer

    async def explain(self, request: Request, wire: pb.ExplainRequest) -> pb.ExplainResponse:
        """Answer `wire`.

        Raises:
            PhasemeshError: it is at fault, the document isn't there or has no token vectors, or its score
                can't be had now.
        """
        check_id(wire.id, "id")
        with request.clock.phase(names.PHASE_PLAN):
            opened = await self._collections.open(request.tenant, wire.collection)
            request.serve(opened.spec.model)
            checked = check_query(wire.query, opened.spec)
            located = await self._collections.run(
                lambda: self._scorer.locate(opened, wire.version, [wire.id])
            )
        version = located.version
        if wire.id not in located.places:
            raise NotFound(
                f"there is no document {wire.id[:64]!r} in version {version.number}",
                reason="DOCUMENT_NOT_FOUND",
                field="id",
            )
        query = await self._queries.vectors(request, opened, version, checked, wire.truncation, spans=True)
        scores = await self._scorer.score(request, opened, located, query, align=True)
        if wire.id not in scores or not scores[wire.id].HasField("score"):
            raise FailedPrecondition(
                f"the document {wire.id[:64]!r} has no token vectors, so nothing of it matches",
                reason="EMPTY_DOCUMENT",
                field="id",
            )
        found = scores[wire.id]
        with request.clock.phase(names.PHASE_MERGE):
            documents, _ = await self._collections.run(
                lambda: opened.store.get([wire.id], version, frozenset({Part.TOKEN_SPANS}))
            )
            spans = documents[0].token_spans
            alignments = []
            for row, (best, similarity) in enumerate(
                zip(found.best_tokens, found.best_similarities, strict=True)
            ):
                alignment = pb.TokenAlignment(query_token=row, document_token=best, similarity=similarity)
                if query.spans is not None:
                    alignment.query_span_start, alignment.query_span_end = _span(query.spans, row)
                if spans is not None:
                    alignment.document_span_start, alignment.document_span_end = _span(spans, best)
                alignments.append(alignment)
        return pb.ExplainResponse(
            score=found.score,
            alignments=alignments,
            version=version_to_wire(version),
            reduction=REDUCTION_TO_WIRE[opened.spec.reduction],
            usage=query.usage,
            timings=request.timings(),
        )


def _span(spans: NDArray[np.integer[Any]], row: int) -> tuple[int, int]:
    return int(spans[row, 0]), int(spans[row, 1])
