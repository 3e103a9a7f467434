"""Listing, tags, restore, compaction and cleanup over real gRPC, with real scorers, against brute force."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from phasemesh.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PhasemeshError,
)
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_FLOAT16
from tests.unit.retrieval.material import FIELDS, equals, hits, struct, unit_rows
from tests.unit.retrieval.stack import Stack, given, ranking, stack


async def ids(served: Stack, collection: str, **request: object) -> tuple[list[list[str]], set[int]]:
    """Ids page by page, and the numbers of the versions that were read."""
    pages, numbers, token = [], set(), ""
    while True:
        reply = await served(
            "ListDocuments",
            pb.ListDocumentsRequest(collection=collection, page_token=token, **request),  # type: ignore[arg-type]
        )
        pages.append([document.id for document in reply.documents])
        numbers.add(reply.version.number)
        token = reply.next_page_token
        if not token:
            return pages, numbers


async def test_pages_are_of_one_version_whatever_is_written(served: Stack, name: str) -> None:
    await served.create(name, fields=FIELDS)
    random = np.random.default_rng(2)
    matrices = {f"d{n}": unit_rows(random, 2) for n in range(7)}
    for n, (document_id, matrix) in enumerate(matrices.items()):
        await served.upsert(
            given(document_id, matrix, fields=struct(lang="en" if n % 2 else "de")), name=name
        )
    first = await served("ListDocuments", pb.ListDocumentsRequest(collection=name, page_size=3))
    await served.upsert(given("late", unit_rows(random, 2)), name=name)
    await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, ids=["d5"]))
    await served("CompactCollection", pb.CompactCollectionRequest(collection=name))
    rest = await served(
        "ListDocuments", pb.ListDocumentsRequest(collection=name, page_token=first.next_page_token)
    )
    assert [one.id for one in (*first.documents, *rest.documents)] == list(matrices)
    assert rest.version == first.version
    assert rest.next_page_token == ""
    pages, numbers = await ids(served, name, page_size=2, filter=equals("lang", "en"))
    assert pages == [["d1", "d3"]]  # d5 is gone
    assert len(numbers) == 1
    # A page token may be used twice, with the version of its first page, and other vectors wanted.
    projection = pb.Projection(token_vectors=True, encoding=VECTOR_ENCODING_FLOAT16)
    again = await served(
        "ListDocuments",
        pb.ListDocumentsRequest(
            collection=name, page_token=first.next_page_token, projection=projection,
            version=pb.ReadVersion(at_version=first.version),
        ),
    )  # fmt: skip
    stored = np.frombuffer(again.documents[0].token_vectors.vectors.data, np.float16)
    np.testing.assert_array_equal(stored, matrices["d3"].astype(np.float16).ravel())


async def test_a_page_token_is_checked(served: Stack, name: str) -> None:
    await served.create(name, fields=FIELDS)
    other = f"{name[:90]}-2"
    await served.create(other)
    random = np.random.default_rng(3)
    for n in range(3):
        await served.upsert(given(f"d{n}", unit_rows(random, 2)), name=name)
    first = await served("ListDocuments", pb.ListDocumentsRequest(collection=name, page_size=1))
    token = first.next_page_token

    async def refused(kind: type[PhasemeshError], reason: str, **request: object) -> None:
        asked = {"collection": name, "page_token": token} | request
        with pytest.raises(kind) as caught:
            await served("ListDocuments", pb.ListDocumentsRequest(**asked))  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.field) == (reason, "page_token")

    for garbage in ("x", "ä", token[:-4], "A" + token[1:], token[:20] + "B" + token[21:], "e30="):
        if garbage != token:
            await refused(InvalidArgument, "INVALID_PAGE_TOKEN", page_token=garbage)
    await refused(InvalidArgument, "PAGE_TOKEN_MISMATCH", collection=other)
    await refused(InvalidArgument, "PAGE_TOKEN_MISMATCH", filter=equals("lang", "en"))
    newer = pb.Version(incarnation=first.version.incarnation, number=first.version.number + 1)
    await refused(InvalidArgument, "PAGE_TOKEN_MISMATCH", version=pb.ReadVersion(at_version=newer))
    await served("DeleteCollection", pb.DeleteCollectionRequest(collection=name))
    await served.create(name)
    await refused(FailedPrecondition, "INCARNATION_MISMATCH")


async def test_a_restored_version_is_searched_at_once(served: Stack, name: str) -> None:
    await served.create(name)
    random = np.random.default_rng(4)
    matrices = {f"d{n}": unit_rows(random, 3) for n in range(6)}
    query = unit_rows(random, 4)
    old = (await served.upsert(*(given(one, rows) for one, rows in matrices.items()), name=name)).version
    await served.search(query, name=name)
    tag = pb.TagVersionRequest(collection=name, tag="good", version=old)
    await served("TagVersion", tag)
    with pytest.raises(AlreadyExists) as twice:
        await served("TagVersion", tag)
    assert (twice.value.reason, twice.value.field) == ("TAG_EXISTS", "tag")
    deleted = await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, ids=["d0", "d3"]))
    head = (await served.upsert(given("bad", unit_rows(random, 3)), name=name)).version
    for stale in (old, deleted.version):
        with pytest.raises(Aborted) as moved:
            await served(
                "RestoreVersion",
                pb.RestoreVersionRequest(collection=name, tag="good", expected_version=stale),
            )
        assert (moved.value.reason, moved.value.field) == ("VERSION_MOVED", "expected_version")
    derived = [scorer.value("phasemesh_segment_derivations_total") for scorer in served.scorers]
    done = await served(
        "RestoreVersion", pb.RestoreVersionRequest(collection=name, tag="good", expected_version=head)
    )
    assert done.version.number == head.number + 1
    found = await served.search(query, k=10, name=name)
    assert found.version == done.version
    assert [one for one, _ in hits(found)] == [one for one, _ in ranking(query, matrices, 10)]
    # The restored fragments have the data files that were served before.
    assert [scorer.value("phasemesh_segment_derivations_total") for scorer in served.scorers] == derived
    for request, reason in (
        (
            pb.RestoreVersionRequest(collection=name, tag="none", expected_version=done.version),
            "TAG_NOT_FOUND",
        ),
        (pb.TagVersionRequest(collection=name, tag="none", overwrite=True), "TAG_NOT_FOUND"),
    ):
        with pytest.raises(NotFound) as missing:
            await served(type(request).__name__.removesuffix("Request"), request)
        assert missing.value.reason == reason
    for wrong, field in (
        (pb.RestoreVersionRequest(collection=name, version=old), "expected_version"),
        (pb.RestoreVersionRequest(collection=name, expected_version=old), "version"),
        (pb.TagVersionRequest(collection=name, tag="x"), "version"),
        (pb.TagVersionRequest(collection=name, tag="../x", version=old), "tag"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await served(type(wrong).__name__.removesuffix("Request"), wrong)
        assert caught.value.field == field
    await served("TagVersion", pb.TagVersionRequest(collection=name, tag="good", overwrite=True))


async def test_results_are_the_same_before_and_after_a_compaction(served: Stack, name: str) -> None:
    await served.create(name)
    random = np.random.default_rng(5)
    matrices = {}
    for n in range(12):
        matrices[f"d{n}"] = unit_rows(random, 1 + n % 4)
        await served.upsert(given(f"d{n}", matrices[f"d{n}"]), name=name)
    await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, ids=["d2", "d7"]))
    del matrices["d2"], matrices["d7"]
    query = unit_rows(random, 5)
    before = await served.search(query, k=20, name=name)
    done = await served("CompactCollection", pb.CompactCollectionRequest(collection=name))
    assert done.fragments_before > done.fragments_after == 1
    after = await served.search(query, k=20, name=name)
    assert after.version == done.version
    assert after.coverage.fragments == 1
    assert [(hit.id, hit.score) for hit in after.hits] == [(hit.id, hit.score) for hit in before.hits]
    exact = ranking(query, matrices, 20)
    assert [one for one, _ in hits(after)] == [one for one, _ in exact]
    # The version before is still there, with the fragments that it had.
    old = await served.search(query, k=20, name=name, version=pb.ReadVersion(at_version=before.version))
    assert [(hit.id, hit.score) for hit in old.hits] == [(hit.id, hit.score) for hit in before.hits]


async def test_commits_are_compacted_in_the_background_and_old_versions_go(tmp_path: Path) -> None:
    flags = {"retrieval__compact_fragments": 3, "retrieval__cleanup_interval_s": 0.05}
    async with stack(tmp_path, **flags) as served:
        await served.create()
        random = np.random.default_rng(6)
        matrices = {f"d{n}": unit_rows(random, 2) for n in range(20)}
        for document_id, rows in matrices.items():
            await served.upsert(given(document_id, rows))
        async with asyncio.timeout(30):
            while True:
                found = await served("GetCollection", pb.GetCollectionRequest(collection="c"))
                if found.collection.fragments <= 3 and served.metrics.registry.get_sample_value(
                    "phasemesh_cleanups_total", {"outcome": "done"}
                ):
                    break
                await asyncio.sleep(0.02)
        query = unit_rows(random, 3)
        best = hits(await served.search(query, k=20))
        assert [one for one, _ in best] == [one for one, _ in ranking(query, matrices, 20)]
        registry = served.metrics.registry
        assert (registry.get_sample_value("phasemesh_compactions_total", {"outcome": "merged"}) or 0) >= 1
        assert (registry.get_sample_value("phasemesh_compacted_fragments_total") or 0) >= 4
        assert registry.get_sample_value("phasemesh_compactions_total", {"outcome": "failed"}) == 0
        # Everything is younger than an hour, so nothing was removed.
        assert registry.get_sample_value("phasemesh_removed_versions_total") == 0
