"""Reads of stored documents by id, and counts of them; always of one exact version."""

from __future__ import annotations

from phasemesh.retrieval.filters import filter_from_wire
from phasemesh.retrieval.handles import Collections, version_to_wire
from phasemesh.retrieval.ingest import check_count
from phasemesh.retrieval.projection import TEXT_AND_ALL_FIELDS, document_to_wire, wanted_parts
from phasemesh.retrieval.search import check_reply
from phasemesh.retrieval.work import Request
from phasemesh.v1 import retrieval_pb2 as pb


class Reads:
    """Reads documents.

    Args:
        collections: to read.
        max_documents: most ids in one request.
        max_message_bytes: largest reply.
    """

    def __init__(self, collections: Collections, *, max_documents: int, max_message_bytes: int) -> None:
        self._collections = collections
        self._max_documents = max_documents
        self._max_message_bytes = max_message_bytes

    async def get(self, request: Request, wire: pb.GetDocumentsRequest) -> pb.GetDocumentsResponse:
        """Documents by id, in the order of the request; an id that comes twice gives its document twice.

        Raises:
            PhasemeshError: the request is at fault.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        request.serve(opened.spec.model)
        check_count(len(wire.ids), self._max_documents, "ids")
        projection = wire.projection if wire.HasField("projection") else TEXT_AND_ALL_FIELDS
        wanted = wanted_parts(projection, opened.spec)

        def read() -> pb.GetDocumentsResponse:
            version = opened.resolve(wire.version)
            documents, missing = opened.store.get(list(wire.ids), version, wanted.parts)
            return pb.GetDocumentsResponse(
                documents=[document_to_wire(document, wanted) for document in documents],
                missing_ids=missing,
                version=version_to_wire(version),
            )

        reply = await self._collections.run(read)
        check_reply(reply.ByteSize(), self._max_message_bytes, "ask for fewer ids, or leave the vectors out")
        return reply

    async def count(self, request: Request, wire: pb.CountDocumentsRequest) -> pb.CountDocumentsResponse:
        """How many documents meet the filter; all, without one.

        Raises:
            PhasemeshError: the request is at fault.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        request.serve(opened.spec.model)
        condition = filter_from_wire(wire.filter, opened.spec) if wire.HasField("filter") else None

        def read() -> pb.CountDocumentsResponse:
            version = opened.resolve(wire.version)
            count = opened.store.count(version, condition)
            return pb.CountDocumentsResponse(documents=count, version=version_to_wire(version))

        return await self._collections.run(read)
