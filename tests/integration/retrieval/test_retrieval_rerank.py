"""Rerank by stored ids and queries by stored id through real scorers: against float64 brute force and Search."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasemesh.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    Unavailable,
)
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import corpus, hits, many, rounded
from tests.unit.retrieval.stack import DIM, MODEL, Stack, given, ranking, stack, tensor, text_matrix

QUERY = np.random.default_rng(11).standard_normal((5, DIM)).astype(np.float32)


def asking(name: str, ids: list[str], query: pb.Query | None = None, **options: Any) -> pb.RerankRequest:
    query = pb.Query(vectors=tensor(QUERY)) if query is None else query
    return pb.RerankRequest(collection=name, query=query, ids=ids, **options)


async def filled(served: Stack, name: str, count: int = 140, **spec: Any) -> dict[str, Any]:
    spec.setdefault("normalize", pb.NORMALIZE_POLICY_NEVER)
    await served.create(name, **spec)
    stored = corpus(7, count)
    await served.upsert(*(given(key, matrix) for key, matrix in stored.items()), name=name)
    return stored


async def test_scores_equal_brute_force_and_those_of_search(served: Stack, name: str) -> None:
    stored = await filled(served, name)
    assert (await served("GetCollection", pb.GetCollectionRequest(collection=name))).collection.fragments > 2
    rng = np.random.default_rng(1)
    ids = [str(one) for one in rng.permutation(sorted(stored))]
    reply = await served("Rerank", asking(name, ids))
    expected = ranking(QUERY, stored, len(stored))
    assert [hit.id for hit in reply.hits] == [key for key, _ in expected]
    assert [hit.score for hit in reply.hits] == pytest.approx([score for _, score in expected], rel=1e-6)
    assert list(reply.empty_ids) == [key for key in ids if not len(stored[key])]
    assert list(reply.missing_ids) == []
    found = await served.search(QUERY, 1000, name=name)
    assert hits(reply) == hits(found)
    assert reply.version == found.version


async def test_every_id_is_answered_as_often_as_it_is_named(served: Stack, name: str) -> None:
    stored = await filled(served, name, 20)
    ids = ["d001", "nobody", "d003", "d001", "nobody", "d000", "d003", "", "nul\0byte", "o'brien"]
    with pytest.raises(InvalidArgument) as caught:
        await served("Rerank", asking(name, ids))
    assert caught.value.field == "ids[7]"
    ids.remove("")
    reply = await served("Rerank", asking(name, ids))
    assert sorted(hit.id for hit in reply.hits) == ["d000", "d001", "d001"]
    assert hits(reply) == rounded(
        sorted(
            ranking(QUERY, {key: stored[key] for key in ("d000", "d001")}, 2)
            + ranking(QUERY, {"d001": stored["d001"]}, 1),
            key=lambda hit: (-hit[1], hit[0]),
        )
    )
    assert list(reply.missing_ids) == ["nobody", "nobody", "nul\0byte", "o'brien"]
    assert list(reply.empty_ids) == ["d003", "d003"]
    assert len(reply.hits) + len(reply.missing_ids) + len(reply.empty_ids) == len(ids)


async def test_ids_with_characters_of_meaning(served: Stack, name: str) -> None:
    await served.create(name)
    names = ["o'brien", "nul\0byte", "%", '"', "a;b--", "ünïcode 🜚", "x" * 512]
    await served.upsert(*(given(one, np.eye(1, DIM)) for one in names), name=name)
    reply = await served("Rerank", asking(name, names))
    assert sorted(hit.id for hit in reply.hits) == sorted(names)


async def test_top_k_and_projection(served: Stack, name: str) -> None:
    stored = await filled(served, name, 30)
    reply = await served(
        "Rerank",
        asking(
            name, ["d002", "d000", "d000", "d001", "d003", "no"], top_k=2, projection=pb.Projection(text=True)
        ),
    )
    expected = ranking(QUERY, {key: stored[key] for key in ("d000", "d001", "d002")}, 3)
    flat = [expected[0][0], *[expected[0][0]] * (expected[0][0] == "d000"), expected[1][0]][:2]
    assert [hit.id for hit in reply.hits] == flat
    assert [hit.document.id for hit in reply.hits] == flat
    assert (list(reply.empty_ids), list(reply.missing_ids)) == (["d003"], ["no"])
    all_of_them = await served("Rerank", asking(name, ["d002", "d000"], top_k=99))
    assert len(all_of_them.hits) == 2


async def test_versions(served: Stack, name: str) -> None:
    await served.create(name, normalize=pb.NORMALIZE_POLICY_NEVER)
    first = await served.upsert(given("a", np.eye(1, DIM)), given("b", np.eye(1, DIM)), name=name)
    await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, ids=["a"]))
    last = await served.upsert(given("b", 2 * np.eye(1, DIM)), name=name)
    query = pb.Query(vectors=tensor(np.eye(1, DIM, dtype=np.float32)))
    then = await served(
        "Rerank", asking(name, ["a", "b"], query, version=pb.ReadVersion(at_version=first.version))
    )
    assert (hits(then), list(then.missing_ids)) == ([("a", 1.0), ("b", 1.0)], [])
    now = await served(
        "Rerank", asking(name, ["a", "b"], query, version=pb.ReadVersion(min_version=last.version))
    )
    assert (hits(now), list(now.missing_ids)) == ([("b", 2.0)], ["a"])
    assert now.version == last.version
    stale = pb.Version(incarnation="0" * 32, number=1)
    with pytest.raises(FailedPrecondition) as caught:
        await served("Rerank", asking(name, ["a"], query, version=pb.ReadVersion(at_version=stale)))
    assert caught.value.reason == "INCARNATION_MISMATCH"


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"ids": []}, "ids", "EMPTY_LIST"),
        ({"ids": ["x"] * 10_001}, "ids", "TOO_MANY_DOCUMENTS"),
        ({"ids": ["x", "y" * 513]}, "ids[1]", "INVALID_ID"),
        ({"ids": ["x"], "top_k": 0}, "top_k", "K_OUT_OF_RANGE"),
        ({"ids": ["x"], "query": pb.Query()}, "query", "EMPTY_QUERY"),
        ({"ids": ["x"], "query": pb.Query(id="")}, "query.id", "INVALID_ID"),
        (
            {"ids": ["x"], "query": pb.Query(vectors=tensor(np.eye(2, DIM + 1)))},
            "query.vectors.shape",
            "DIMENSION_MISMATCH",
        ),
        (
            {"ids": ["x"], "query": pb.Query(vectors=tensor(np.full((1, DIM), np.nan)))},
            "query.vectors",
            "NOT_FINITE",
        ),
    ],
)
async def test_hostile_requests_name_the_field(
    served: Stack, name: str, options: dict[str, Any], field: str, reason: str
) -> None:
    await served.create(name)
    with pytest.raises(InvalidArgument) as caught:
        await served("Rerank", asking(name, **options))
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert "10000" in caught.value.message or len(options["ids"]) < 10_000


async def test_ten_thousand_ids_are_taken(served: Stack, name: str) -> None:
    await filled(served, name, 20)
    reply = await served("Rerank", asking(name, ["d001"] * 5_000 + [f"n{i}" for i in range(5_000)]))
    assert (len(reply.hits), len(reply.missing_ids)) == (5_000, 5_000)


async def test_a_collection_without_documents(served: Stack, name: str) -> None:
    await served.create(name)
    reply = await served("Rerank", asking(name, ["a"]))
    assert (hits(reply), list(reply.missing_ids)) == ([], ["a"])


async def test_a_text_is_encoded(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL)
    texts = {"a": "water boils", "b": "river", "c": "  "}
    await served.upsert(*(pb.Document(id=key, text=text) for key, text in texts.items()), name=name)
    reply = await served("Rerank", asking(name, list(texts), pb.Query(text="water river")))
    matrices = {key: text_matrix(text, "D") for key, text in texts.items() if text.strip()}
    assert [hit.id for hit in reply.hits] == [
        key for key, _ in ranking(text_matrix("water river", "Q"), matrices, 9)
    ]
    assert list(reply.empty_ids) == ["c"]
    assert reply.usage.tokens == 3
    assert reply.timings.phases


async def test_a_stored_document_is_the_query(served: Stack, name: str) -> None:
    stored = await filled(served, name)
    query = pb.Query(id="d001")
    reply = await served("Rerank", asking(name, sorted(stored), query))
    expected = ranking(stored["d001"], stored, 999)
    assert [hit.id for hit in reply.hits] == [key for key, _ in expected]
    assert "d001" in [hit.id for hit in reply.hits]
    for k in (3, 1000):
        found = await served("Search", pb.SearchRequest(collection=name, query=query, k=k))
        others = {key: matrix for key, matrix in stored.items() if key != "d001"}
        best = ranking(stored["d001"], others, k)
        assert [hit.id for hit in found.hits] == [key for key, _ in best]
        assert len(found.hits) == min(k, sum(1 for matrix in others.values() if len(matrix)))
    by_vectors = await served.search(stored["d001"], 1000, name=name)
    assert {hit.id: hit.score for hit in by_vectors.hits} == {hit.id: hit.score for hit in reply.hits}


@pytest.mark.parametrize("method", ["Search", "Rerank", "Explain"])
async def test_a_stored_query_that_is_missing_or_empty(served: Stack, name: str, method: str) -> None:
    await filled(served, name, 8)

    async def ask(document_id: str) -> PhasemeshError:
        query = pb.Query(id=document_id)
        request: Any = {
            "Search": pb.SearchRequest(collection=name, query=query, k=1),
            "Rerank": asking(name, ["d001"], query),
            "Explain": pb.ExplainRequest(collection=name, query=query, id="d001"),
        }[method]
        with pytest.raises(PhasemeshError) as caught:
            await served(method, request)
        return caught.value

    missing, empty = await ask("nobody"), await ask("d003")
    assert (type(missing), missing.reason, missing.field) == (NotFound, "DOCUMENT_NOT_FOUND", "query.id")
    assert (type(empty), empty.reason, empty.field) == (FailedPrecondition, "EMPTY_DOCUMENT", "query.id")


async def test_a_scorer_killed_during_a_rerank_loses_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path) as served:
        query, expected = await many(served, "c")
        victim, survivor = served.scorers
        victim.gated.gate.clear()
        request = asking("c", [key for key, _ in expected], pb.Query(vectors=tensor(query)))
        rerank = asyncio.create_task(served("Rerank", request))
        await victim.gated.entered.wait()
        await victim.kill()
        assert hits(await rerank) == expected
        assert len(survivor.gated.scorings) == 2
        assert hits(await served("Rerank", request)) == expected
        assert len(victim.gated.scorings) == 1
        await survivor.kill()
        with pytest.raises(Unavailable) as caught:
            await served("Rerank", request)
        assert caught.value.reason == "FRAGMENTS_UNAVAILABLE"
        # What needs no scorer is answered without.
        nothing = await served("Rerank", asking("c", ["nobody"]))
        assert list(nothing.missing_ids) == ["nobody"]


async def test_tenants_are_apart(served: Stack, name: str) -> None:
    await filled(served, name, 8)
    with pytest.raises(NotFound):
        await served("Rerank", asking(f"{name}-of-another", ["d001"]))
