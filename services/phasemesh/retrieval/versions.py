"""Requests about a collection's versions: compaction, tags, and going back."""

from __future__ import annotations

from phasemesh.errors import FailedPrecondition, InvalidArgument
from phasemesh.index.spec import Version
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.upkeep import Upkeep
from phasemesh.retrieval.work import Request
from phasemesh.v1 import retrieval_pb2 as pb

#: Longest wait for whoever maintains the collection just now, seconds.
MOST_WAIT_S = 30.0


class Versions:
    """Answers them.

    Args:
        collections: to work on.
        upkeep: compacts.
    """

    def __init__(self, collections: Collections, upkeep: Upkeep) -> None:
        self._collections = collections
        self._upkeep = upkeep

    async def compact(
        self, request: Request, wire: pb.CompactCollectionRequest
    ) -> pb.CompactCollectionResponse:
        """Merge small fragments and drop deleted rows.

        Raises:
            PhasemeshError: there is no such collection, or another maintains it.
        """
        opened = await self._opened(request, wire.collection)
        done = await self._collections.commit(lambda: self._upkeep.compact(opened.store, _wait_s(request)))
        return pb.CompactCollectionResponse(
            version=version_to_wire(done.version), fragments_before=done.before, fragments_after=done.after
        )

    async def tag(self, request: Request, wire: pb.TagVersionRequest) -> pb.TagVersionResponse:
        """Name a version; without one, and with `overwrite`, take the name away.

        Raises:
            PhasemeshError: the request is at fault, or another maintains the collection.
        """
        opened = await self._opened(request, wire.collection)
        tend = opened.store.maintenance
        if not wire.HasField("version"):
            if not wire.overwrite:
                raise _missing("version", "give the version to name, or set overwrite to take the tag away")
            await self._collections.commit(lambda: tend.untag(wire.tag, wait_s=_wait_s(request)))
        else:
            version = _version(opened, wire.version, "version")
            await self._collections.commit(
                lambda: tend.tag(wire.tag, version, move=wire.overwrite, wait_s=_wait_s(request))
            )
        return pb.TagVersionResponse()

    async def restore(self, request: Request, wire: pb.RestoreVersionRequest) -> pb.RestoreVersionResponse:
        """Make an earlier version the newest.

        Raises:
            PhasemeshError: the request is at fault, the newest version is another than expected, or another
                maintains the collection.
        """
        opened = await self._opened(request, wire.collection)
        which = wire.WhichOneof("target")
        if which is None:
            raise _missing("version", "give the version or the tag to go back to")
        if not wire.HasField("expected_version"):
            raise _missing("expected_version", "give the newest version that you know")
        target = wire.tag if which == "tag" else _version(opened, wire.version, "version")
        expected = _version(opened, wire.expected_version, "expected_version")
        version = await self._collections.commit(
            lambda: opened.store.maintenance.restore(target, expected, wait_s=_wait_s(request))
        )
        return pb.RestoreVersionResponse(version=version_to_wire(version))

    async def _opened(self, request: Request, name: str) -> Opened:
        opened = await self._collections.open(request.tenant, name)
        request.serve(opened.spec.model)
        return opened


def _wait_s(request: Request) -> float:
    # Half of what is left: the work itself takes time too.
    return min(MOST_WAIT_S, request.remaining_s() / 2)


def _version(opened: Opened, wire: pb.Version, field: str) -> Version:
    if wire.incarnation != opened.entry.incarnation:
        raise FailedPrecondition(
            f"{field} is of the incarnation {wire.incarnation[:64]!r}; the collection {opened.spec.name!r} "
            f"is {opened.entry.incarnation!r}",
            reason="INCARNATION_MISMATCH",
            field=field,
        )
    return Version(wire.incarnation, wire.number)


def _missing(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field} is missing; {what}", reason="MISSING_FIELD", field=field)
