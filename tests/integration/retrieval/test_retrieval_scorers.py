"""Searches while scorers come, hang and die: complete, or an error, or partial on request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from phasemesh.errors import (
    DeadlineExceeded,
    Unavailable,
)
from phasemesh.retrieval.service import RetrievalRuntime
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import (
    corpus,
    hits,
    many,
)
from tests.unit.retrieval.stack import (
    DIM,
    Stack,
    given,
    stack,
    tensor,
)


async def test_two_scorers_answer_as_one_does_bit_for_bit(served: Stack, name: str) -> None:
    await served.create(name)
    stored = corpus(7, 140)
    await served.upsert(*(given(key, matrix) for key, matrix in stored.items()), name=name)
    query = np.random.default_rng(3).standard_normal((6, DIM)).astype(np.float32)
    one = served.scorers[0].target
    settings = served.settings.model_copy(
        update={"retrieval": served.settings.retrieval.model_copy(update={"scorers": (one,)})}
    )
    lone = RetrievalRuntime(settings, served.client, served.directory, served.metrics)
    request = pb.SearchRequest(collection=name, query=pb.Query(vectors=tensor(query)), k=1000)
    try:
        alone = await lone.servicer.Search(request, None)  # type: ignore[arg-type]  # it has no use for a context
    finally:
        await lone.close()
    both = await served("Search", request)
    assert [hit.SerializeToString() for hit in both.hits] == [hit.SerializeToString() for hit in alone.hits]
    assert both.coverage == alone.coverage


async def test_a_scorer_killed_during_a_search_loses_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        query, expected = await many(served, "c")
        victim, survivor = served.scorers
        victim.gated.gate.clear()
        search = asyncio.create_task(served.search(query, 1000))
        await victim.gated.entered.wait()
        await victim.kill()
        found = await search
        assert hits(found) == expected
        assert found.coverage.searched_fragments == found.coverage.fragments
        assert found.coverage.exact
        assert len(survivor.gated.searches) == 2
        # From now on the dead one is asked last.
        assert hits(await served.search(query, 1000)) == expected
        assert len(victim.gated.searches) == 1


async def test_a_scorer_that_hangs_is_left_within_the_deadline(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        query, expected = await many(served, "c")
        served.scorers[0].gated.gate.clear()
        found = await served.search(query, 1000, timeout_s=4.0)
        assert hits(found) == expected


async def test_without_scorers_a_search_is_unavailable_or_partial(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        query, _ = await many(served, "c")
        for scorer in served.scorers:
            await scorer.kill()
        with pytest.raises(Unavailable) as caught:
            await served.search(query, 5)
        assert caught.value.reason == "FRAGMENTS_UNAVAILABLE"
        partial = await served.search(query, 5, allow_partial=True)
        assert hits(partial) == []
        assert partial.coverage.fragments > 1
        assert partial.coverage.searched_fragments == 0
        assert not partial.coverage.exact


async def test_hung_scorers_end_at_the_deadline(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1) as served:
        query, _ = await many(served, "c")
        served.scorers[0].gated.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await served.search(query, 5, timeout_s=0.5)
        partial = await served.search(query, 5, timeout_s=2.0, allow_partial=True)
        assert partial.coverage.searched_fragments == 0
        assert partial.coverage.fragments > 1


async def test_a_drain_refuses_the_new_and_finishes_the_begun(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1) as served:
        query, expected = await many(served, "c")
        served.scorers[0].gated.gate.clear()
        search = asyncio.create_task(served.search(query, 1000))
        await served.scorers[0].gated.entered.wait()
        assert served.runtime.health().ok
        draining = asyncio.create_task(served.runtime.drain())
        with pytest.raises(Unavailable) as caught:
            await served.search(query)
        assert caught.value.reason == "DRAINING"
        assert not served.runtime.health().ok
        assert not draining.done()
        served.scorers[0].gated.gate.set()
        assert hits(await search) == expected
        await draining


async def test_a_restart_serves_the_same(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        query, expected = await many(served, "c")
        before = (await served("GetCollection", pb.GetCollectionRequest(collection="c"))).collection
    async with stack(tmp_path) as served:
        assert hits(await served.search(query, 1000)) == expected
        after = (await served("GetCollection", pb.GetCollectionRequest(collection="c"))).collection
        assert after == before
