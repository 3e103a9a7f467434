"""Searches over real gRPC: the real store, two real scorers, an encoder of words.

Expected rankings are float64 brute force over what was stored.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Value

from phasemesh.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    Unavailable,
    Unimplemented,
)
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import (
    FIELDS,
    GOOD_QUERY,
    corpus,
    equals,
    get_request,
    hits,
    rounded,
    spoiled_query,
    struct,
    unit_rows,
)
from tests.unit.retrieval.stack import (
    DIM,
    HASH,
    MODEL,
    Stack,
    given,
    ranking,
    tensor,
    text_matrix,
)


@pytest.mark.parametrize("count", [0, 1, 2, 9, 150])
async def test_search_is_float64_brute_force_in_order(served: Stack, name: str, count: int) -> None:
    await served.create(name)
    stored = corpus(count, count)
    for first in range(0, count, 50):
        batch = [given(key, matrix) for key, matrix in list(stored.items())[first : first + 50]]
        reply = await served.upsert(*batch, name=name)
        assert reply.stored == len(batch)
    query = unit_rows(np.random.default_rng(99), 5)
    with_vectors = sum(len(matrix) > 0 for matrix in stored.values())
    for k in (1, 1000, 1, 3):
        found = await served.search(query, k, name=name)
        assert hits(found) == rounded(ranking(query, stored, k))
        assert found.coverage.exact
        assert found.coverage.searched_fragments == found.coverage.fragments
        assert found.coverage.documents == with_vectors
        assert found.coverage.tokens == sum(map(len, stored.values()))
    if count == 150:
        assert found.coverage.fragments > 4
        assert all(scorer.value("phasemesh_scanned_documents_total") > 0 for scorer in served.scorers)


async def test_negative_only_similarities_still_rank(served: Stack, name: str) -> None:
    await served.create(name)
    query = unit_rows(np.random.default_rng(1), 1)
    noisy = [
        (-query + 0.1 * unit_rows(np.random.default_rng(seed), 1)).astype(np.float16) for seed in range(8)
    ]
    stored = {f"n{index}": matrix for index, matrix in enumerate(noisy)}
    await served.upsert(*(given(key, matrix) for key, matrix in stored.items()), name=name)
    documents = (await served("GetDocuments", get_request(name, list(stored)))).documents
    kept = {document.id: decode_tensor(document.token_vectors.vectors, field="v") for document in documents}
    found = hits(await served.search(query, 8, name=name))
    assert found == rounded(ranking(query, kept, 8))
    assert all(score < 0 for _, score in found)


async def test_text_is_encoded_by_role_and_found(served: Stack, name: str) -> None:
    collection = await served.create(name, model="alias")
    assert (collection.spec.model, collection.spec.recipe_hash) == (MODEL, HASH)
    assert collection.spec.token_dimension == DIM
    texts = {"a": "red apples ripen", "b": "green pears", "c": "grey stones roll"}
    reply = await served.upsert(*(pb.Document(id=key, text=text) for key, text in texts.items()), name=name)
    assert [status.tokens for status in reply.documents] == [4, 3, 4]
    assert reply.usage.tokens == 11
    found = await served.search("green pears", 3, name=name, projection=pb.Projection(text=True))
    stored = {key: text_matrix(text, "D") for key, text in texts.items()}
    assert hits(found) == rounded(ranking(text_matrix("green pears", "Q"), stored, 3))
    assert [hit.document.text for hit in found.hits] == [texts[hit.id] for hit in found.hits]
    assert found.hits[0].id == "b"
    read = (await served("GetDocuments", get_request(name, ["b"]))).documents[0].token_vectors
    assert np.array_equal(decode_tensor(read.vectors, field="v"), stored["b"])
    assert (list(read.span_starts), list(read.span_ends)) == ([0, 0, 6], [0, 5, 11])


def json_filter(value: dict[str, Any]) -> pb.Filter:
    """As protobuf's own JSON parser reads it."""
    return json_format.ParseDict(value, pb.Filter())


def nested_filter(depth: int) -> pb.Filter:
    condition = equals("lang", "de")
    for _ in range(depth - 1):
        outer = pb.Filter()
        getattr(outer, "not").CopyFrom(condition)
        condition = outer
    return condition


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (equals("lang", "de"), {"a", "c"}),
        (equals("year", 2001), {"b", "c"}),
        (equals("tags", "y"), {"a", "b"}),
        (equals("seen", "2024-01-01T00:00:00Z"), {"a"}),
        (pb.Filter(all=pb.FilterList(filters=[equals("lang", "de"), equals("year", 2001)])), {"c"}),
        (pb.Filter(any=pb.FilterList(filters=[equals("lang", "en"), equals("year", 2000)])), {"a", "b"}),
        (json_filter({"not": {"equals": {"field": "lang", "value": "de"}}}), {"b", "d"}),
        (json_filter({"in": {"field": "year", "values": [2000, "2001", 7]}}), {"a", "b", "c"}),
        (json_filter({"in": {"field": "year"}}), set()),
        (json_filter({"range": {"field": "year", "above": 2000}}), {"b", "c"}),
        (json_filter({"range": {"field": "year", "atLeast": 2000, "below": 2001}}), {"a"}),
        (json_filter({"range": {"field": "seen", "atMost": "2024-01-01T00:00:00Z"}}), {"a"}),
        (json_filter({"exists": {"field": "tags"}}), {"a", "b"}),
        (json_filter({"not": {"exists": {"field": "lang"}}}), {"d"}),
        (json_filter({"prefix": {"field": "tags", "prefix": "x"}}), {"a"}),
        (json_filter({"idIn": {"ids": ["d", "nobody"]}}), {"d"}),
        (pb.Filter(all=pb.FilterList(filters=[equals("lang", "de"), equals("lang", "en")])), set()),
        (equals("lang", "xx"), set()),
        (equals("lang", "de' OR '1'='1"), set()),
    ],
)
async def test_filter_restricts(served: Stack, condition: pb.Filter, expected: set[str]) -> None:
    name = "filtered"
    try:
        await served.create(name, fields=FIELDS)
    except AlreadyExists:
        pass
    else:
        rng = np.random.default_rng(3)
        rows = {
            "a": struct(lang="de", year=2000, tags=["x", "y"], seen=1_704_067_200_000_000),
            "b": struct(lang="en", year=2001, tags=["y"]),
            "c": struct(lang="de", year=2001),
            "d": struct(),
        }
        for key, fields in rows.items():
            await served.upsert(given(key, unit_rows(rng, 2), fields=fields), name=name)
    query = unit_rows(np.random.default_rng(1), 2)
    found = await served.search(query, 10, name=name, filter=condition)
    assert {hit.id for hit in found.hits} == expected
    unfiltered = dict(hits(await served.search(query, 10, name=name)))
    assert dict(hits(found)) == {key: unfiltered[key] for key in expected}
    assert found.coverage.documents == len(expected)
    counted = await served("CountDocuments", pb.CountDocumentsRequest(collection=name, filter=condition))
    assert counted.documents == len(expected)


@pytest.mark.parametrize(
    ("condition", "kind", "field"),
    [
        (equals("color", "red"), InvalidArgument, "filter.equals.field"),
        (equals("year", "nineteen"), InvalidArgument, "filter.equals.value"),
        (equals("year", 1.5), InvalidArgument, "filter.equals.value"),
        (equals("lang", None), InvalidArgument, "filter.equals.value"),
        (pb.Filter(), InvalidArgument, "filter"),
        (pb.Filter(all=pb.FilterList()), InvalidArgument, "filter.all.filters"),
        (
            pb.Filter(equals=pb.FieldEquals(field="lang", value=Value())),
            InvalidArgument,
            "filter.equals.value",
        ),
        (pb.Filter(exists=pb.FieldExists(field="x")), InvalidArgument, "filter.exists.field"),
        (pb.Filter(any=pb.FilterList()), InvalidArgument, "filter.any.filters"),
        (
            pb.Filter(all=pb.FilterList(filters=[equals("lang", "a"), pb.Filter()])),
            InvalidArgument,
            "filter.all.filters[1]",
        ),
        (
            json_filter({"not": {"prefix": {"field": "year", "prefix": "2"}}}),
            InvalidArgument,
            "filter.not.prefix.field",
        ),
        (json_filter({"range": {"field": "year"}}), InvalidArgument, "filter.range"),
        (json_filter({"range": {"field": "tags", "above": "a"}}), InvalidArgument, "filter.range.field"),
        (json_filter({"range": {"field": "year", "above": "x"}}), InvalidArgument, "filter.range.above"),
        (json_filter({"in": {"field": "year", "values": [1, None]}}), InvalidArgument, "filter.in.values[1]"),
        (nested_filter(17), InvalidArgument, "filter" + ".not" * 16),
        (nested_filter(60), InvalidArgument, "filter" + ".not" * 16),
        (pb.Filter(id_in=pb.IdIn(ids=["a"] * 10_001)), InvalidArgument, "filter"),
    ],
)
async def test_a_filter_that_cannot_be_met_is_refused(
    served: Stack, condition: pb.Filter, kind: type[PhasemeshError], field: str
) -> None:
    with contextlib.suppress(AlreadyExists):
        await served.create("refusing", fields=FIELDS)
    query = unit_rows(np.random.default_rng(1), 2)
    with pytest.raises(kind) as search:
        await served.search(query, 10, name="refusing", filter=condition)
    assert search.value.field == field
    with pytest.raises(kind):
        await served("CountDocuments", pb.CountDocumentsRequest(collection="refusing", filter=condition))


@pytest.mark.parametrize(
    ("options", "kind", "reason", "field"),
    [
        ({"k": 0}, InvalidArgument, "K_OUT_OF_RANGE", "k"),
        ({"k": 1001}, InvalidArgument, "K_OUT_OF_RANGE", "k"),
        ({"query": spoiled_query(np.nan)}, InvalidArgument, "NOT_FINITE", "query.vectors"),
        ({"query": spoiled_query(np.inf)}, InvalidArgument, "NOT_FINITE", "query.vectors"),
        (
            {"query": np.zeros((1, DIM), np.float32)},
            InvalidArgument,
            "ZERO_VECTOR",
            "query.vectors",
        ),
        (
            {"query": np.ones((1, DIM - 1), np.float32)},
            InvalidArgument,
            "DIMENSION_MISMATCH",
            "query.vectors.shape",
        ),
        ({"query": np.zeros((0, DIM), np.float32)}, InvalidArgument, "EMPTY_QUERY", "query.vectors"),
        ({"query": ""}, InvalidArgument, "EMPTY_QUERY", "query"),
        ({"query": "text"}, FailedPrecondition, "NO_MODEL", "query.text"),
        ({"name": "nowhere"}, NotFound, "COLLECTION_NOT_FOUND", "collection"),
        ({"name": "../up"}, InvalidArgument, "INVALID_NAME", "collection"),
        (
            {"projection": pb.Projection(fields=["color"])},
            InvalidArgument,
            "UNKNOWN_FIELD",
            "projection.fields[0]",
        ),
        ({"candidates": pb.CANDIDATE_SOURCE_PRUNED}, Unimplemented, "UNIMPLEMENTED", "candidates"),
        ({"candidates": 77}, InvalidArgument, "UNKNOWN_ENUM_VALUE", "candidates"),
        ({"candidate_limit": 1, "k": 2}, InvalidArgument, "CANDIDATE_LIMIT_OUT_OF_RANGE", "candidate_limit"),
        ({"dense_vector": tensor(np.ones(2, np.float32))}, Unimplemented, "UNIMPLEMENTED", "dense_vector"),
    ],
)
async def test_bad_searches(
    served: Stack, options: dict[str, Any], kind: type[PhasemeshError], reason: str, field: str
) -> None:
    with contextlib.suppress(AlreadyExists):
        await served.create("plain")
    arguments = {"query": GOOD_QUERY, "name": "plain", **options}
    with pytest.raises(kind) as caught:
        await served.search(arguments.pop("query"), **arguments)
    assert (caught.value.reason, caught.value.field) == (reason, field)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("UpsertDocuments", pb.UpsertDocumentsRequest(collection="plain")),
        ("DeleteDocuments", pb.DeleteDocumentsRequest(collection="plain")),
        ("GetDocuments", pb.GetDocumentsRequest(collection="plain")),
        ("GetDocuments", pb.GetDocumentsRequest(collection="plain", ids=["x"] * 1001)),
    ],
)
async def test_empty_and_oversized_lists_are_refused(served: Stack, method: str, request_: Any) -> None:
    with contextlib.suppress(AlreadyExists):
        await served.create("plain")
    with pytest.raises(InvalidArgument) as caught:
        await served(method, request_)
    assert caught.value.reason in ("EMPTY_LIST", "TOO_MANY_DOCUMENTS")


async def test_deletion_by_filter(served: Stack, name: str) -> None:
    await served.create(name, fields=FIELDS)
    rng = np.random.default_rng(8)
    for number in range(9):
        fields = struct(year=2000 + number) if number % 3 else struct()
        await served.upsert(given(f"d{number}", unit_rows(rng, 2), fields=fields), name=name)
    old = json_filter({"range": {"field": "year", "below": 2005}})
    reply = await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, filter=old))
    assert (reply.deleted, list(reply.missing_ids)) == (3, [])
    found = await served.search(
        unit_rows(rng, 2), 20, name=name, version=pb.ReadVersion(min_version=reply.version)
    )
    assert {hit.id for hit in found.hits} == {"d0", "d3", "d5", "d6", "d7", "d8"}
    again = await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, filter=old))
    assert (again.deleted, again.version) == (0, reply.version)
    with pytest.raises(InvalidArgument) as both:
        await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, filter=old, ids=["d0"]))
    assert both.value.field == "filter"
    with pytest.raises(InvalidArgument) as empty:
        await served("DeleteDocuments", pb.DeleteDocumentsRequest(collection=name, filter=pb.Filter()))
    assert empty.value.reason == "INVALID_FILTER"
    count = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
    assert count.documents == 6


async def test_a_collection_whose_data_is_gone_hides_no_other(served: Stack, name: str) -> None:
    await served.create(name)
    await served.upsert(given("a", unit_rows(np.random.default_rng(1), 2)), name=name)
    found = await served("GetCollection", pb.GetCollectionRequest(collection=name))
    [data] = served.settings.data_dir.rglob(f"{found.collection.version.incarnation}.lance")
    # As after a restart: no handle of it is open.
    collections = served.runtime._collections
    collections._recent.clear()
    gc.collect()
    data.rename(data.with_suffix(".away"))
    try:
        with pytest.raises(Unavailable) as missing:
            await served.search(unit_rows(np.random.default_rng(1), 2), 3, name=name)
        assert missing.value.reason == "DATA_MISSING"
        listed = await served("ListCollections", pb.ListCollectionsRequest(page_size=1000))
        broken = [one for one in listed.collections if one.spec.name == name]
        assert len(broken) == 1
        assert not broken[0].HasField("version")
        assert not data.exists()
    finally:
        data.with_suffix(".away").rename(data)
    count = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
    assert count.documents == 1
