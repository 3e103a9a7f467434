"""Pages through a collection's documents, and the cursor from one page to the next.

Invariants: a cursor is bound to the collection, the version and the filter of its first page, and one that
isn't ours is refused; so all pages of a listing are of one version, whatever is written meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass

from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound
from phasemesh.index.errors import VersionGone
from phasemesh.index.listing import ListPosition
from phasemesh.index.spec import Version
from phasemesh.retrieval.filters import filter_from_wire
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.projection import TEXT_AND_ALL_FIELDS, Wanted, document_to_wire, wanted_parts
from phasemesh.retrieval.search import check_reply
from phasemesh.retrieval.work import Request
from phasemesh.v1 import retrieval_pb2 as pb

#: Documents of one page unless told otherwise.
DEFAULT_PAGE = 100
#: Documents that are read at a time where vectors are wanted: a page may hold fewer than were asked for.
_VECTORS_AT_A_TIME = 32
#: Bytes of a reply beside its documents.
_OVERHEAD_BYTES = 4096
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a listing goes on.

    Attributes:
        collection: its name.
        version: that all pages read.
        position: after the last document given.
        condition: digest of the filter.
    """

    collection: str
    version: Version
    position: ListPosition
    condition: str

    def token(self) -> str:
        """The cursor as callers carry it: opaque, so that nobody builds on what is in it."""
        parts = [
            self.collection, self.version.incarnation, self.version.number,
            self.position.fragment_id, self.position.row, self.condition,
        ]  # fmt: skip
        content = json.dumps(parts, separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(_digest(content) + content).decode()

    @classmethod
    def of(cls, token: str) -> Cursor:
        """The cursor that `token` made.

        Raises:
            InvalidArgument: it isn't one of this service's.
        """
        try:
            raw = base64.b64decode(token, altchars=b"-_", validate=True)
            digest, content = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
            if digest != _digest(content):
                raise ValueError
            collection, incarnation, number, fragment_id, row, condition = json.loads(content)
        except (binascii.Error, ValueError):
            raise _fault(
                "the page token isn't one of this service's; take it from the reply before, or leave it out",
                "INVALID_PAGE_TOKEN",
            ) from None
        return cls(collection, Version(incarnation, number), ListPosition(fragment_id, row), condition)


class Listing:
    """Lists documents.

    Args:
        collections: to read.
        max_documents: most documents of one page.
        max_message_bytes: largest reply.
    """

    def __init__(self, collections: Collections, *, max_documents: int, max_message_bytes: int) -> None:
        self._collections = collections
        self._max_documents = max_documents
        self._max_message_bytes = max_message_bytes

    async def page(self, request: Request, wire: pb.ListDocumentsRequest) -> pb.ListDocumentsResponse:
        """A page of documents, in the order in which they are stored.

        It holds fewer than were asked for at the end, and where more wouldn't fit into a reply.

        Raises:
            PhasemeshError: the request is at fault.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        request.serve(opened.spec.model)
        projection = wire.projection if wire.HasField("projection") else TEXT_AND_ALL_FIELDS
        wanted = wanted_parts(projection, opened.spec)
        size = min(wire.page_size or DEFAULT_PAGE, self._max_documents)
        reply = await self._collections.run(lambda: self._read(opened, wire, wanted, size))
        check_reply(reply.ByteSize(), self._max_message_bytes, "leave the vectors out")
        return reply

    def _read(
        self, opened: Opened, wire: pb.ListDocumentsRequest, wanted: Wanted, size: int
    ) -> pb.ListDocumentsResponse:
        condition = filter_from_wire(wire.filter, opened.spec) if wire.HasField("filter") else None
        cursor = _first(opened, wire)
        version, position = cursor.version, cursor.position
        reply = pb.ListDocumentsResponse(version=version_to_wire(version))
        room = self._max_message_bytes - _OVERHEAD_BYTES
        at_a_time = _VECTORS_AT_A_TIME if wire.projection.token_vectors else size
        while len(reply.documents) < size:
            most = min(at_a_time, size - len(reply.documents))
            listed = opened.store.list_page(version, position, most, wanted.parts, condition)
            for one in listed:
                document = document_to_wire(one.document, wanted)
                room -= document.ByteSize()
                if room < 0 and reply.documents:
                    break
                reply.documents.append(document)
                position = one.after
            if room < 0 or len(listed) < most:
                break
        if opened.store.any_from(version, position, condition):
            further = Cursor(cursor.collection, version, position, cursor.condition)
            reply.next_page_token = further.token()
        return reply


def _first(opened: Opened, wire: pb.ListDocumentsRequest) -> Cursor:
    """Where the page begins; blocks."""
    condition = _condition(wire)
    if not wire.page_token:
        return Cursor(opened.spec.name, opened.resolve(wire.version), ListPosition(), condition)
    cursor = Cursor.of(wire.page_token)
    if cursor.collection != opened.spec.name:
        raise _fault(
            f"the page token is of the collection {cursor.collection!r}, not {opened.spec.name!r}; take it "
            "from the reply before",
            "PAGE_TOKEN_MISMATCH",
        )
    if cursor.version.incarnation != opened.entry.incarnation:
        raise FailedPrecondition(
            f"the collection {opened.spec.name!r} was made anew since the page token was given; begin with "
            "the first page",
            reason="INCARNATION_MISMATCH",
            field="page_token",
        )
    if cursor.condition != condition:
        raise _fault(
            "the page token is of a listing with another filter; give the filter of the first page",
            "PAGE_TOKEN_MISMATCH",
        )
    which = wire.version.WhichOneof("read")
    if which == "at_version" and wire.version.at_version != version_to_wire(cursor.version):
        raise _fault(
            f"the page token is of version {cursor.version.number} and at_version is "
            f"{wire.version.at_version.number}; give a version on the first page only",
            "PAGE_TOKEN_MISMATCH",
        )
    try:
        opened.store.resolve(at_version=cursor.version)
    except VersionGone:
        raise NotFound(
            f"version {cursor.version.number}, which the page token is of, is no longer kept; begin with "
            "the first page, and tag a version that is to be listed for long",
            reason="VERSION_NOT_FOUND",
            field="page_token",
        ) from None
    return cursor


def _condition(wire: pb.ListDocumentsRequest) -> str:
    if not wire.HasField("filter"):
        return ""
    return _digest(wire.filter.SerializeToString(deterministic=True)).hex()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _fault(message: str, reason: str) -> InvalidArgument:
    return InvalidArgument(message, reason=reason, field="page_token")
