"""The gRPC face of retrieval: one method per RPC, each a line of work elsewhere."""

from __future__ import annotations

from typing import Any

import grpc

from phasemesh.retrieval.catalogue import CatalogueLines
from phasemesh.retrieval.explain import Explain
from phasemesh.retrieval.ingest import Ingest
from phasemesh.retrieval.listing import Listing
from phasemesh.retrieval.reads import Reads
from phasemesh.retrieval.rerank import Rerank
from phasemesh.retrieval.search import Search
from phasemesh.retrieval.versions import Versions
from phasemesh.retrieval.work import Requests
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1 import retrieval_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RetrievalServicer(retrieval_pb2_grpc.RetrievalServiceServicer):
    """Answers by raising leaves of the error tree; the status interceptor turns them into statuses."""

    def __init__(
        self,
        requests: Requests,
        catalogue: CatalogueLines,
        ingest: Ingest,
        reads: Reads,
        search: Search,
        rerank: Rerank,
        explain: Explain,
        listing: Listing,
        versions: Versions,
    ) -> None:
        self._listing = listing
        self._versions = versions
        self._requests = requests
        self._catalogue = catalogue
        self._ingest = ingest
        self._reads = reads
        self._search = search
        self._rerank = rerank
        self._explain = explain

    async def CreateCollection(  # noqa: N802  # gRPC's name
        self, request: pb.CreateCollectionRequest, context: Context
    ) -> pb.CreateCollectionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._catalogue.create(open_request, request)

    async def GetCollection(  # noqa: N802  # gRPC's name
        self, request: pb.GetCollectionRequest, context: Context
    ) -> pb.GetCollectionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._catalogue.get(open_request, request)

    async def ListCollections(  # noqa: N802  # gRPC's name
        self, request: pb.ListCollectionsRequest, context: Context
    ) -> pb.ListCollectionsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._catalogue.list(open_request, request)

    async def DeleteCollection(  # noqa: N802  # gRPC's name
        self, request: pb.DeleteCollectionRequest, context: Context
    ) -> pb.DeleteCollectionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._catalogue.delete(open_request, request)

    async def UpsertDocuments(  # noqa: N802  # gRPC's name
        self, request: pb.UpsertDocumentsRequest, context: Context
    ) -> pb.UpsertDocumentsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._ingest.upsert(open_request, request)

    async def DeleteDocuments(  # noqa: N802  # gRPC's name
        self, request: pb.DeleteDocumentsRequest, context: Context
    ) -> pb.DeleteDocumentsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._ingest.delete(open_request, request)

    async def GetDocuments(  # noqa: N802  # gRPC's name
        self, request: pb.GetDocumentsRequest, context: Context
    ) -> pb.GetDocumentsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._reads.get(open_request, request)

    async def CountDocuments(  # noqa: N802  # gRPC's name
        self, request: pb.CountDocumentsRequest, context: Context
    ) -> pb.CountDocumentsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._reads.count(open_request, request)

    async def Search(  # noqa: N802  # gRPC's name
        self, request: pb.SearchRequest, context: Context
    ) -> pb.SearchResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._search.search(open_request, request)

    async def ListDocuments(  # noqa: N802  # gRPC's name
        self, request: pb.ListDocumentsRequest, context: Context
    ) -> pb.ListDocumentsResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._listing.page(open_request, request)

    async def Rerank(  # noqa: N802  # gRPC's name
        self, request: pb.RerankRequest, context: Context
    ) -> pb.RerankResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._rerank.rerank(open_request, request)

    async def Explain(  # noqa: N802  # gRPC's name
        self, request: pb.ExplainRequest, context: Context
    ) -> pb.ExplainResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._explain.explain(open_request, request)

    async def CompactCollection(  # noqa: N802  # gRPC's name
        self, request: pb.CompactCollectionRequest, context: Context
    ) -> pb.CompactCollectionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._versions.compact(open_request, request)

    async def TagVersion(  # noqa: N802  # gRPC's name
        self, request: pb.TagVersionRequest, context: Context
    ) -> pb.TagVersionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._versions.tag(open_request, request)

    async def RestoreVersion(  # noqa: N802  # gRPC's name
        self, request: pb.RestoreVersionRequest, context: Context
    ) -> pb.RestoreVersionResponse:
        """See the contract."""
        with self._requests.open() as open_request:
            return await self._versions.restore(open_request, request)
