"""Upserts and deletions: from a batch of documents to one commit, with a status for each document.

Invariants: a document that fails, fails alone; of several with one id the last that could be stored counts;
nothing is stored of a request that fails as a whole before its commit, so it can be sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phasemesh.errors import InvalidArgument, PhasemeshError
from phasemesh.index.errors import InvalidDocument
from phasemesh.index.spec import Version
from phasemesh.retrieval.documents import Draft, draft_from_wire
from phasemesh.retrieval.encoding import EncodedText, TextEncoder
from phasemesh.retrieval.faults import mapped
from phasemesh.retrieval.filters import filter_from_wire
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.vectors import conditioned
from phasemesh.retrieval.work import Request
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import ItemError, Usage


class Ingest:
    """Writes to collections.

    Args:
        collections: to write to.
        encoder: of texts.
        max_documents: most documents in one request.
        max_tokens: most token vectors in one request of several documents, so that it is one commit.
    """

    def __init__(
        self, collections: Collections, encoder: TextEncoder, *, max_documents: int, max_tokens: int
    ) -> None:
        self._collections = collections
        self._encoder = encoder
        self._max_documents = max_documents
        self._max_tokens = max_tokens

    async def upsert(self, request: Request, wire: pb.UpsertDocumentsRequest) -> pb.UpsertDocumentsResponse:
        """Store the documents of `wire`.

        Raises:
            PhasemeshError: the request as a whole is at fault or can't be served now; nothing was stored.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        request.serve(opened.spec.model)
        check_count(len(wire.documents), self._max_documents, "documents")
        batch = await self._collections.run(lambda: _Batch.of(wire.documents, opened))
        await self._encode(request, wire, opened, batch)
        tokens = batch.tokens
        if tokens > self._max_tokens and len(batch.drafts) > 1:
            raise InvalidArgument(
                f"documents: have {tokens} token vectors together, and one commit takes {self._max_tokens}; "
                "send fewer documents at a time",
                reason="TOO_MANY_TOKENS",
                field="documents",
            )
        with request.clock.phase(names.PHASE_COMMIT):
            version = await self._collections.commit(lambda: batch.commit(opened))
        return pb.UpsertDocumentsResponse(
            version=version_to_wire(version),
            documents=batch.statuses(),
            stored=len(batch.stored),
            superseded=len(batch.superseded),
            usage=batch.usage,
            timings=request.timings(),
        )

    async def delete(self, request: Request, wire: pb.DeleteDocumentsRequest) -> pb.DeleteDocumentsResponse:
        """Delete the documents that `wire` names.

        Raises:
            PhasemeshError: the request is at fault or can't be served now; nothing was deleted.
        """
        opened = await self._collections.open(request.tenant, wire.collection)
        request.serve(opened.spec.model)
        if wire.HasField("filter"):
            if wire.ids:
                raise InvalidArgument(
                    "ids and filter are both given; give one", reason="AMBIGUOUS_SELECTION", field="filter"
                )
            condition = filter_from_wire(wire.filter, opened.spec)
            with request.clock.phase(names.PHASE_COMMIT):
                deleted = await self._collections.commit(lambda: opened.store.delete_where(condition))
        else:
            check_count(len(wire.ids), self._max_documents, "ids")
            with request.clock.phase(names.PHASE_COMMIT):
                deleted = await self._collections.commit(lambda: opened.store.delete(list(wire.ids)))
        return pb.DeleteDocumentsResponse(
            version=version_to_wire(deleted.version), deleted=deleted.deleted, missing_ids=deleted.missing
        )

    async def _encode(
        self, request: Request, wire: pb.UpsertDocumentsRequest, opened: Opened, batch: _Batch
    ) -> None:
        waiting = [position for position, draft in batch.drafts.items() if draft.to_encode]
        drafts = [batch.drafts[position] for position in waiting]
        encoded = await self._encoder.documents(
            request,
            opened.spec,
            [draft.document.text or "" for draft in drafts],
            [f"{draft.path}.text" for draft in drafts],
            wire.truncation,
            wire.priority,
        )
        results = dict(zip(waiting, encoded, strict=True))
        await self._collections.run(lambda: batch.take(results, opened))


def check_count(count: int, limit: int, field_name: str) -> None:
    """Refuse an empty list and one over the limit.

    Raises:
        InvalidArgument: one of both.
    """
    if count == 0:
        raise InvalidArgument(
            f"{field_name} is empty; give at least one", reason="EMPTY_LIST", field=field_name
        )
    if count > limit:
        raise InvalidArgument(
            f"{field_name} has {count} entries and the limit is {limit}; split the request",
            reason="TOO_MANY_DOCUMENTS",
            field=field_name,
        )


@dataclass(slots=True)
class _Batch:
    """The documents of one request on their way, by position.

    Attributes:
        ids: of all of them.
        drafts: those that haven't failed.
        faults: those that have.
        stored: positions that were committed.
        superseded: positions that a later document with the same id replaced.
        usage: tokens consumed by encoding.
    """

    ids: list[str]
    drafts: dict[int, Draft] = field(default_factory=dict)
    faults: dict[int, PhasemeshError] = field(default_factory=dict)
    stored: frozenset[int] = frozenset()
    superseded: frozenset[int] = frozenset()
    usage: Usage = field(default_factory=Usage)

    @classmethod
    def of(cls, documents: Sequence[pb.Document], opened: Opened) -> _Batch:
        batch = cls([wire.id for wire in documents])
        for position, wire in enumerate(documents):
            try:
                draft = draft_from_wire(wire, f"documents[{position}]", opened.spec)
                _check(draft, opened)
            except PhasemeshError as error:
                batch.faults[position] = error
            else:
                batch.drafts[position] = draft
        return batch

    def take(self, results: Mapping[int, EncodedText | PhasemeshError], opened: Opened) -> None:
        """Put in what became of the texts, by position."""
        for position, result in results.items():
            try:
                self.drafts[position] = self._encoded(self.drafts[position], result, opened)
            except PhasemeshError as error:
                del self.drafts[position]
                self.faults[position] = error

    def _encoded(self, draft: Draft, result: EncodedText | PhasemeshError, opened: Opened) -> Draft:
        if isinstance(result, PhasemeshError):
            raise result
        self.usage.tokens += result.usage.tokens
        self.usage.truncated_inputs += result.usage.truncated_inputs
        vectors = conditioned(result.vectors, opened.spec.normalize, f"{draft.path}.text", scale=False)
        encoded = draft.encoded(vectors, result.spans, truncated=bool(result.usage.truncated_inputs))
        _check(encoded, opened)
        return encoded

    @property
    def tokens(self) -> int:
        """Token vectors of the documents that haven't failed."""
        return sum(len(draft.document.tokens) for draft in self.drafts.values())

    def commit(self, opened: Opened) -> Version:
        """Store what hasn't failed; returns the first version that holds it. Blocks."""
        positions = sorted(self.drafts)
        if not positions:
            return opened.store.latest()
        done = opened.store.upsert([self.drafts[position].document for position in positions])
        self.superseded = frozenset(positions[index] for index in done.superseded)
        self.stored = frozenset(positions) - self.superseded
        return done.version

    def statuses(self) -> list[pb.DocumentStatus]:
        """One for each document, in the order of the request."""
        return [self._status(position, document_id) for position, document_id in enumerate(self.ids)]

    def _status(self, position: int, document_id: str) -> pb.DocumentStatus:
        fault = self.faults.get(position)
        if fault is not None:
            return pb.DocumentStatus(
                id=document_id,
                error=ItemError(
                    code=fault.code, reason=fault.reason, message=fault.message, field=fault.field
                ),
            )
        draft = self.drafts[position]
        return pb.DocumentStatus(
            id=document_id,
            tokens=0 if position in self.superseded else len(draft.document.tokens),
            truncated=draft.truncated,
            superseded=position in self.superseded,
        )


def _check(draft: Draft, opened: Opened) -> None:
    # The store's own word, before anything is written, so that what it refuses fails alone.
    try:
        opened.store.check(draft.document)
    except InvalidDocument as failure:
        error = mapped(failure)
        assert error is not None
        error.field = draft.path
        raise error from failure
