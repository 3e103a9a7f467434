"""LeafSearch: the best documents of the fragments that a request names, of all of them and no others.

A search's fragments are dealt out to as many units as there are threads, so that one search alone uses them
all and the exact final scoring isn't repeated per fragment. A unit that fails is run again fragment by
fragment, so that one bad fragment doesn't take its neighbours along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from phasemesh.index.leaf import LeafQuery, LeafResult, LeafSource, leaf_search, leaf_searches
from phasemesh.index.scanner import Scanner
from phasemesh.index.spec import Version
from phasemesh.scorer.admission import Claim, Shared, Unit, scan_work
from phasemesh.scorer.fragments import Asked, Found, Fragments
from phasemesh.scorer.requests import check_candidates, check_distinct, index_of, k_of, query_of
from phasemesh.scorer.work import Job, Workshop
from phasemesh.telemetry import names
from phasemesh.v1 import scorer_pb2 as pb
from phasemesh.v1.retrieval_pb2 import CANDIDATE_SOURCE_EXHAUSTIVE, Coverage


async def search(
    shop: Workshop, fragments: Fragments, job: Job, request: pb.LeafSearchRequest
) -> pb.LeafSearchResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request is at fault, the version isn't there, or there is no room for the search.
    """
    index = index_of(request.index)
    k = k_of(request)
    check_candidates(request.candidates)
    query = query_of(request.query if request.HasField("query") else None, index.dim)
    asked = [
        Asked(
            selection.fragment_id,
            f"fragments[{i}]",
            allowed=selection.allowed_rows if selection.HasField("allowed_rows") else None,
        )
        for i, selection in enumerate(request.fragments)
    ]
    check_distinct([one.fragment_id for one in asked], "fragments[{}].fragment_id")

    start_ns = job.clock.now_ns()
    found = await fragments.lookup(index, asked)
    tokens = sum(one.tokens for one in found if isinstance(one, Found))
    with shop.queue.admit(scan_work(tokens, len(query)), deadline_s=job.deadline_s) as claim:
        async with fragments.sources(found) as looked:
            loaded_ns = job.clock.now_ns()
            job.clock.note(names.PHASE_LOAD, start_ns, loaded_ns, {names.FRAGMENTS: len(asked)})
            sources = [one for one in looked if isinstance(one, LeafSource)]
            failures = {one.fragment_id: one for one in looked if isinstance(one, pb.FragmentFailure)}
            results: list[LeafResult] = []
            wanted = LeafQuery(query, k, index.reduction)
            # The same rows of the same fragments: what is visible follows from the version alone.
            version = None if any(one.allowed is not None for one in asked) else index.version
            groups = deal(sources, shop.queue.threads)
            while groups:
                units = [_unit(shop.scanner, group, wanted, version) for group in groups]
                done = zip(groups, await claim.run(units), strict=True)
                groups = []
                for group, result in done:
                    if isinstance(result, LeafResult):
                        results.append(result)
                    elif len(group) > 1:
                        groups += [[source] for source in group]
                    else:
                        failed = group[0].fragment_id
                        failures[failed] = fragments.failed(failed, result)
            documents = sum(result.documents for result in results)
            scanned = sum(result.tokens for result in results)
            scored(shop, job, claim, loaded_ns, documents=documents, tokens=scanned)
    hits = sorted((hit for result in results for hit in result.hits), key=lambda hit: (-hit.score, hit.id))
    searched = [one.fragment_id for one in asked if one.fragment_id not in failures]
    reply = pb.LeafSearchResponse(
        hits=[
            pb.LeafHit(id=hit.id, score=hit.score, fragment_id=hit.fragment_id, row=hit.row)
            for hit in hits[:k]
        ],
        searched_fragments=searched,
        failures=[failures[one.fragment_id] for one in asked if one.fragment_id in failures],
        coverage=Coverage(
            fragments=len(asked),
            searched_fragments=len(searched),
            documents=documents,
            tokens=scanned,
            candidates=CANDIDATE_SOURCE_EXHAUSTIVE,
            # Of what was searched; what wasn't is counted.
            exact=all(result.exact for result in results),
        ),
    )
    reply.timings.CopyFrom(job.timings())
    return reply


def deal(sources: Sequence[LeafSource], hands: int) -> list[list[LeafSource]]:
    """Deal `sources` out to at most `hands` groups of about as many token vectors each; none is empty."""
    groups: list[list[LeafSource]] = [[] for _ in range(min(hands, len(sources)))]
    sizes = [0] * len(groups)
    for source in sorted(sources, key=lambda source: -len(source.segment.tokens)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(source)
        # One more than its vectors: fragments without any would otherwise all lie in one group.
        sizes[smallest] += len(source.segment.tokens) + 1
    return groups


def visible_tokens(source: LeafSource) -> int:
    """Token vectors of a fragment's rows that may be seen."""
    if source.visible is None:
        return len(source.segment.tokens)
    return int(source.segment.row_lengths[source.visible].sum())


def scored(
    shop: Workshop, job: Job, claim: Claim[object], loaded_ns: int, *, documents: int, tokens: int
) -> None:
    """Note the phases since loading ended at `loaded_ns`, and what was scored."""
    now_ns = job.clock.now_ns()
    began_ns = claim.began_ns or loaded_ns
    job.clock.note(names.PHASE_SCORE_QUEUE, loaded_ns, began_ns)
    job.clock.note(names.PHASE_MAXSIM, began_ns, now_ns, {names.TOKENS: tokens, names.DOCUMENTS: documents})
    shop.metrics.scanned_tokens.inc(tokens)
    shop.metrics.scanned_documents.inc(documents)


def _unit(
    scanner: Scanner, group: Sequence[LeafSource], query: LeafQuery, version: Version | None
) -> Unit[LeafResult]:
    work = scan_work(sum(visible_tokens(source) for source in group), len(query.vectors))
    shared = None
    if version is not None:
        key = (version, tuple(source.fragment_id for source in group))
        shared = Shared(key, query, partial(_search_all, scanner, group))
    return Unit(work, partial(_search, scanner, group, query), shared)


def _search(
    scanner: Scanner, group: Sequence[LeafSource], query: LeafQuery, checkpoint: Callable[[], None]
) -> LeafResult:
    return leaf_search(group, query.vectors, query.k, query.reduction, scanner=scanner, checkpoint=checkpoint)


def _search_all(
    scanner: Scanner,
    group: Sequence[LeafSource],
    queries: Sequence[LeafQuery],
    checkpoint: Callable[[], None],
) -> list[LeafResult | Exception]:
    return leaf_searches(group, queries, scanner=scanner, checkpoint=checkpoint)
