"""Making, describing, listing and deleting collections."""

from __future__ import annotations

import base64
import binascii

from phasemesh.errors import InvalidArgument, PhasemeshError
from phasemesh.index.names import check_collection_name
from phasemesh.retrieval.encoding import TextEncoder
from phasemesh.retrieval.faults import index_faults
from phasemesh.retrieval.handles import Collections, describe
from phasemesh.retrieval.specs import spec_from_wire
from phasemesh.retrieval.work import Request
from phasemesh.v1 import retrieval_pb2 as pb

#: Collections in one page: unless told otherwise, and at most.
DEFAULT_PAGE = 100
MAX_PAGE = 1000

#: Where a spec has what other requests have at the top.
_FIELDS = {"collection": "spec.name", "model": "spec.model"}


class CatalogueLines:
    """Requests about collections as such.

    Args:
        collections: of all tenants.
        encoder: knows which models are served.
    """

    def __init__(self, collections: Collections, encoder: TextEncoder) -> None:
        self._collections = collections
        self._encoder = encoder

    async def create(self, request: Request, wire: pb.CreateCollectionRequest) -> pb.CreateCollectionResponse:
        """Make a collection, completed from the model that it names.

        Raises:
            PhasemeshError: the spec is at fault, its model isn't served, or the name is taken.
        """
        try:
            with index_faults():
                check_collection_name(wire.spec.name)
            model = self._encoder.find(wire.spec.model) if wire.spec.model else None
        except PhasemeshError as error:
            error.field = _FIELDS.get(error.field, error.field)
            raise
        spec = spec_from_wire(wire.spec, model)
        opened = await self._collections.create(request.tenant, spec)
        return pb.CreateCollectionResponse(collection=await self._collections.run(lambda: describe(opened)))

    async def get(self, request: Request, wire: pb.GetCollectionRequest) -> pb.GetCollectionResponse:
        """Describe a collection.

        Raises:
            NotFound: there is none of that name.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        return pb.GetCollectionResponse(collection=await self._collections.run(lambda: describe(opened)))

    async def list(self, request: Request, wire: pb.ListCollectionsRequest) -> pb.ListCollectionsResponse:
        """A page of collections, by name.

        Raises:
            InvalidArgument: the page's token isn't one of ours.
        """
        size = min(wire.page_size or DEFAULT_PAGE, MAX_PAGE)
        page, further = await self._collections.page(
            request.tenant, size=size, after=_name_of(wire.page_token)
        )
        return pb.ListCollectionsResponse(collections=page, next_page_token=_token_of(further))

    async def delete(self, request: Request, wire: pb.DeleteCollectionRequest) -> pb.DeleteCollectionResponse:
        """Delete a collection.

        Raises:
            NotFound: there is none of that name.
        """
        await self._collections.delete(request.tenant, wire.collection)
        return pb.DeleteCollectionResponse()


def _token_of(name: str | None) -> str:
    # Opaque, so that nobody builds on what is in it.
    return "" if name is None else base64.urlsafe_b64encode(name.encode()).decode()


def _name_of(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgument(
            "the page token isn't one of this service's; take it from the reply before, or leave it out",
            reason="INVALID_PAGE_TOKEN",
            field="page_token",
        ) from None
