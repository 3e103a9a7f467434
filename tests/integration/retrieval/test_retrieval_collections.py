"""Collections, their versions and their owners."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

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
from phasemesh.rpc.context import Caller
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import (
    FIELDS,
    get_request,
    hits,
    rounded,
    unit_rows,
)
from tests.unit.retrieval.stack import (
    DIM,
    HASH,
    MODEL,
    Stack,
    create_request,
    given,
    ranking,
    stack,
    tensor,
)


async def test_versions_are_exact_and_of_one_incarnation(served: Stack, name: str) -> None:
    await served.create(name)
    matrix = unit_rows(np.random.default_rng(1), 2)
    old = (await served.upsert(given("a", matrix), name=name)).version
    ahead = pb.Version(incarnation=old.incarnation, number=old.number + 5)
    with pytest.raises(Aborted) as early:
        await served.search(matrix, name=name, version=pb.ReadVersion(min_version=ahead))
    assert early.value.reason == "VERSION_NOT_REACHED"
    with pytest.raises(NotFound) as never:
        await served.search(matrix, name=name, version=pb.ReadVersion(at_version=ahead))
    assert never.value.reason == "VERSION_NOT_FOUND"
    await served("DeleteCollection", pb.DeleteCollectionRequest(collection=name))
    with pytest.raises(NotFound):
        await served.search(matrix, name=name)
    await served.create(name)
    assert hits(await served.search(matrix, name=name)) == []
    for read in (pb.ReadVersion(at_version=old), pb.ReadVersion(min_version=old)):
        with pytest.raises(FailedPrecondition) as caught:
            await served.search(matrix, name=name, version=read)
        assert caught.value.reason == "INCARNATION_MISMATCH"
        assert old.incarnation in caught.value.message
        with pytest.raises(FailedPrecondition):
            await served("GetDocuments", get_request(name, ["a"], version=read))
        with pytest.raises(FailedPrecondition):
            await served("CountDocuments", pb.CountDocumentsRequest(collection=name, version=read))


async def test_min_version_looks_for_another_processes_commit(tmp_path: Path) -> None:
    # Neither looks for the other's commits by itself in the time of this test.
    flags: Any = {"retrieval__refresh_ms": 3_600_000}
    async with (
        stack(tmp_path, **flags) as writer,
        stack(tmp_path, targets=[one.target for one in writer.scorers], **flags) as reader,
    ):
        await writer.create()
        matrix = unit_rows(np.random.default_rng(1), 2)
        assert hits(await reader.search(matrix)) == []
        version = (await writer.upsert(given("a", matrix))).version
        assert hits(await reader.search(matrix)) == []
        found = await reader.search(matrix, version=pb.ReadVersion(min_version=version))
        assert hits(found) == rounded(ranking(matrix, {"a": matrix}, 1))


async def test_collections_are_listed_by_name_in_pages(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1) as served:
        for name in ("b", "a", "c"):
            await served.create(name)
        await served.upsert(given("x", np.eye(3, DIM, dtype=np.float32)), name="c")
        first = await served("ListCollections", pb.ListCollectionsRequest(page_size=2))
        assert [collection.spec.name for collection in first.collections] == ["a", "b"]
        rest = await served(
            "ListCollections", pb.ListCollectionsRequest(page_size=2, page_token=first.next_page_token)
        )
        (last,) = rest.collections
        assert (last.spec.name, last.documents, last.tokens, last.fragments) == ("c", 1, 3, 1)
        assert rest.next_page_token == ""
        assert (await served("GetCollection", pb.GetCollectionRequest(collection="c"))).collection == last
        with pytest.raises(InvalidArgument, match="page token"):
            await served("ListCollections", pb.ListCollectionsRequest(page_token="?"))


@pytest.mark.parametrize(
    ("spec", "kind", "reason", "field"),
    [
        ({"name": "taken", "token_dimension": 4}, AlreadyExists, "COLLECTION_EXISTS", "spec.name"),
        ({"name": "", "token_dimension": 4}, InvalidArgument, "INVALID_NAME", "spec.name"),
        ({"name": "n"}, InvalidArgument, "DIMENSION_OUT_OF_RANGE", "spec.token_dimension"),
        ({"name": "n", "model": "nobody"}, NotFound, "MODEL_NOT_FOUND", "spec.model"),
        ({"name": "n", "model": "dense"}, FailedPrecondition, "VECTOR_KIND_NOT_SUPPORTED", "spec.model"),
        (
            {"name": "n", "model": MODEL, "recipe_hash": "f" * 32},
            FailedPrecondition,
            "RECIPE_MISMATCH",
            "spec.recipe_hash",
        ),
        (
            {"name": "n", "model": MODEL, "token_dimension": 5},
            InvalidArgument,
            "DIMENSION_MISMATCH",
            "spec.token_dimension",
        ),
        (
            {"name": "n", "token_dimension": 4, "recipe_hash": HASH},
            InvalidArgument,
            "MODEL_REQUIRED",
            "spec.recipe_hash",
        ),
        (
            {"name": "n", "token_dimension": 4, "codec": 9},
            InvalidArgument,
            "UNKNOWN_ENUM_VALUE",
            "spec.codec",
        ),
        (
            {"name": "n", "token_dimension": 4, "fields": [pb.FieldDeclaration(name="x")]},
            InvalidArgument,
            "UNKNOWN_ENUM_VALUE",
            "spec.fields[0].type",
        ),
        (
            {"name": "n", "token_dimension": 4, "fields": [FIELDS[0], FIELDS[0]]},
            InvalidArgument,
            "INVALID_SPEC",
            "spec",
        ),
    ],
)
async def test_bad_specs(
    served: Stack, spec: dict[str, Any], kind: type[PhasemeshError], reason: str, field: str
) -> None:
    with contextlib.suppress(AlreadyExists):
        await served.create("taken")
    with pytest.raises(kind) as caught:
        await served("CreateCollection", create_request(**spec))
    assert (caught.value.reason, caught.value.field) == (reason, field)


async def test_tenants_share_nothing(tmp_path: Path) -> None:
    keys = [{"name": "mesh", "key": "mesh-key-1234", "role": "mesh"}]
    async with stack(tmp_path, scorers=1, access__keys=keys) as served:
        one, two = (Caller(tenant, tenant, "caller") for tenant in ("one", "two"))
        matrix = unit_rows(np.random.default_rng(1), 2)
        for caller, key in ((one, "a"), (two, "b")):
            await served("CreateCollection", create_request("c", token_dimension=DIM), caller=caller)
            request = pb.UpsertDocumentsRequest(collection="c", documents=[given(key, matrix)])
            version = (await served("UpsertDocuments", request, caller=caller)).version
        search = pb.SearchRequest(collection="c", query=pb.Query(vectors=tensor(matrix)), k=5)
        assert [hit.id for hit in (await served("Search", search, caller=one)).hits] == ["a"]
        assert [hit.id for hit in (await served("Search", search, caller=two)).hits] == ["b"]
        search.version.at_version.CopyFrom(version)
        with pytest.raises(FailedPrecondition):
            await served("Search", search, caller=one)
        await served("DeleteCollection", pb.DeleteCollectionRequest(collection="c"), caller=one)
        assert [hit.id for hit in (await served("Search", search, caller=two)).hits] == ["b"]


async def test_a_deleted_collections_data_goes_after_the_grace_period(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1, retrieval__delete_grace_s=0) as served:
        await served.create()
        await served.upsert(given("a", np.eye(1, DIM, dtype=np.float32)))
        assert list(tmp_path.glob("data/*/*.lance"))
        await served("DeleteCollection", pb.DeleteCollectionRequest(collection="c"))
        assert await served.runtime._collections.sweep()
        assert not list(tmp_path.glob("data/*/*.lance"))
