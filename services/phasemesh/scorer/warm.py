"""WarmFragments and GetLoad: what a scorer holds, brought about and told."""

from __future__ import annotations

from phasemesh.errors import ResourceExhausted
from phasemesh.index.leaf import LeafSource
from phasemesh.scorer.fragments import Asked, Fragments
from phasemesh.scorer.requests import check_distinct, index_of
from phasemesh.scorer.work import Job, Workshop
from phasemesh.telemetry import names
from phasemesh.v1 import scorer_pb2 as pb


async def warm(fragments: Fragments, job: Job, request: pb.WarmFragmentsRequest) -> pb.WarmFragmentsResponse:
    """Load the segments that `request` names, deriving what isn't in the cache folder.

    A segment that finds no room in memory is in the folder afterwards, and is told as a failure with the
    reason NO_ROOM that a later try may mend.

    Raises:
        PhasemeshError: the request is at fault, or the version isn't there.
    """
    index = index_of(request.index)
    check_distinct(request.fragment_ids, "fragment_ids[{}]")
    asked = [Asked(fragment_id, f"fragment_ids[{i}]") for i, fragment_id in enumerate(request.fragment_ids)]
    reply = pb.WarmFragmentsResponse()
    with job.clock.phase(names.PHASE_LOAD, **{names.FRAGMENTS: len(asked)}):
        found = await fragments.lookup(index, asked)
        # One at a time: a lease over all of them would keep every one but the first few from finding room.
        for one in found:
            async with fragments.sources([one]) as (source,):
                if isinstance(source, LeafSource):
                    if fragments.is_resident(source):
                        reply.resident_fragments.append(source.fragment_id)
                    else:
                        reply.failures.append(fragments.failed(source.fragment_id, _no_room()))
                else:
                    reply.failures.append(source)
    return reply


async def load(shop: Workshop, fragments: Fragments) -> pb.GetLoadResponse:
    """How full and how busy the scorer is."""
    size = await fragments.size()
    return pb.GetLoadResponse(
        resident_bytes=size.resident_bytes,
        capacity_bytes=size.capacity_bytes,
        cached_bytes=size.cached_bytes,
        queued_scan_work=shop.queue.queued_work,
        running_searches=shop.queue.running_claims,
        resident_segments=size.resident_segments,
        kernel=shop.scanner.name,
        kernel_warning=shop.scanner.warning,
    )


def _no_room() -> ResourceExhausted:
    return ResourceExhausted(
        "the segment is in the cache folder, but found no room in memory (scorer.capacity_bytes);"
        " searches read it from the folder",
        reason="NO_ROOM",
    )
