"""Bad input at the native routes: status, field, reason and words of each answer; and any JSON at all."""

from __future__ import annotations

import base64
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.contract.gateway.test_native_collections import SPEC, filled
from tests.fakes.gateway_stack import Stack

F32 = base64.b64encode(bytes(4 * 8)).decode()
V = {"incarnation": "0" * 32, "number": 1}

DEEP: dict[str, Any] = {"exists": {"field": "lang"}}
for _ in range(40):
    DEEP = {"not": DEEP}

CREATE: list[tuple[dict[str, Any], str, str]] = [
    ({"name": None}, "name", "name: is missing; give a name for the collection"),
    ({"name": 7}, "name", "name: has to be a string, not an integer"),
    ({"name": "a/b"}, "name", "name: 'a/b' is no name"),
    ({"model": ["x"]}, "model", "model: has to be a string, not a list"),
    ({"token_dimension": "8"}, "token_dimension", "token_dimension: has to be an integer, not a string"),
    ({"token_dimension": -1}, "token_dimension", "token_dimension: has to be between 0 and 4294967295, not -1"),
    ({"model": None}, "token_dimension", "token_dimension is 0; give one, or a model"),
    ({"codec": "int2"}, "codec", "codec: has to be one of 'bf16', 'int8', 'int4', not 'int2'"),
    ({"codec": "CODEC_INT8"}, "codec", "codec: has to be one of 'bf16', 'int8', 'int4', not 'CODEC_INT8'"),
    ({"normalize": True}, "normalize", "normalize: has to be one of 'auto', 'never', 'require', not a boolean"),
    ({"fields": {"a": "string"}}, "fields", "fields: has to be a list, not an object"),
    ({"fields": ["lang"]}, "fields[0]", "fields[0]: has to be an object, not a string"),
    ({"fields": [{"name": "a"}]}, "fields[0].type", "fields[0].type: is missing; give the field's type"),
    ({"dimension": 3}, "dimension", "dimension: there is no such field; there are name, model,"),
]  # fmt: skip

UPSERT: list[tuple[dict[str, Any], str, str]] = [
    ({"documents": None}, "documents", "documents: is missing; give a list of documents"),
    ({"documents": []}, "documents", "documents: is an empty list; give at least one document"),
    ({"documents": "x"}, "documents", "documents: has to be a list, not a string"),
    ({"documents": [{"id": "a"}] * 65}, "documents", "documents: has 65 documents; at most 64 fit"),
    ({"truncate": True}, "truncate", "truncate: there is no such field; there are documents, truncation"),
    ({"truncation": True}, "truncation", "truncation: has to be an object, not a boolean"),
    ({"truncation": {"enabled": 1}}, "truncation.enabled", "truncation.enabled: has to be true or false"),
    ({"truncation": {"side": "up"}}, "truncation.side", "truncation.side: has to be one of 'right', 'left'"),
    ({"truncation": {"max_tokens": 0}}, "truncation.max_tokens", "truncation.max_tokens: has to be between 1"),
    ({"priority": "high"}, "priority", "priority: has to be one of 'interactive', 'bulk', not 'high'"),
]  # fmt: skip

DOCUMENT: list[tuple[Any, str, str]] = [
    ("x", "", ": has to be an object, not a string"),
    ({"text": "x"}, ".id", "is missing; give the document's id"),
    ({"id": 1}, ".id", "has to be a string, not an integer"),
    ({"id": ""}, ".id", "is empty"),
    ({"id": "a", "txt": "x"}, ".txt", "there is no such field; there are id, text, token_vectors, fields"),
    ({"id": "a", "text": ["x"]}, ".text", "has to be a string, not a list"),
    ({"id": "a", "fields": []}, ".fields", "has to be an object of declared fields, not a list"),
    ({"id": "a", "fields": {"lang": {}}}, ".fields.lang", "has to be a string, a number, a boolean, null or"),
    ({"id": "a", "fields": {"lang": [1]}}, ".fields.lang", "has to be a string, a number, a boolean, null or"),
    ({"id": "a", "fields": {"year": 2**53 + 1}}, ".fields.year", "2**53 or beyond"),
    ({"id": "a", "fields": {"author": "x"}}, ".fields", "'author' isn't declared"),
    ({"id": "a", "token_vectors": []}, ".token_vectors", "is an empty list; give at least one token vector"),
    ({"id": "a", "token_vectors": [[]]}, ".token_vectors[0]", "is an empty list; give the numbers"),
    ({"id": "a", "token_vectors": [1, 2]}, ".token_vectors[0]", "has to be a list of numbers, not an integer"),
    ({"id": "a", "token_vectors": [[1], [1, 2]]}, ".token_vectors[1]", "has 2 numbers and documents[0].token"),
    ({"id": "a", "token_vectors": [[1, "2"]]}, ".token_vectors[0][1]", "has to be a number, not a string"),
    ({"id": "a", "token_vectors": [[1, None]]}, ".token_vectors[0][1]", "has to be a number, not null"),
    ({"id": "a", "token_vectors": [[1, True]]}, ".token_vectors[0][1]", "has to be a number, not a boolean"),
    ({"id": "a", "token_vectors": [[1] * 7]}, ".token_vectors.vectors", "is of 7, not 8"),
    ({"id": "a", "token_vectors": [[1e300] * 8]}, ".token_vectors.vectors", "holds NaN or infinity"),
    ({"id": "a", "token_vectors": "x"}, ".token_vectors", "has to be lists of numbers or an object"),
    ({"id": "a", "token_vectors": {}}, ".token_vectors.vectors", "is missing; give the token vectors"),
    (
        {"id": "a", "token_vectors": {"vectors": [[1] * 8], "chunk_offsets": [-1]}},
        ".token_vectors.chunk_offsets[0]", "has to be between 0 and",
    ),
    (
        {"id": "a", "token_vectors": {"dtype": "int8", "shape": [1, 8], "data": F32}},
        ".token_vectors.dtype", "has to be one of 'float32', 'float16', 'bfloat16'",
    ),
    (
        {"id": "a", "token_vectors": {"dtype": "float32", "shape": [8], "data": F32}},
        ".token_vectors.shape", "has to be [tokens, dimension], not 1 sizes",
    ),
    (
        {"id": "a", "token_vectors": {"dtype": "float32", "shape": [0, 8], "data": F32}},
        ".token_vectors.shape[0]", "has to be between 1 and",
    ),
    (
        {"id": "a", "token_vectors": {"dtype": "float16", "shape": [1, 8], "data": F32}},
        ".token_vectors.data", "needs 16 bytes, there are 32",
    ),
    (
        {"id": "a", "token_vectors": {"dtype": "float32", "shape": [1, 8], "data": "ä!"}},
        ".token_vectors.data", "is not base64",
    ),
    ({"id": "a", "dense_vector": [[1]]}, ".dense_vector[0]", "has to be a number, not a list"),
    ({"id": "a", "dense_vector": 3}, ".dense_vector", "has to be lists of numbers or an object"),
]  # fmt: skip

SEARCH: list[tuple[dict[str, Any], str, str]] = [
    ({"query": None}, "query", "query: is missing; give a text, token vectors"),
    ({"query": 3}, "query", "query: has to be an object, not an integer"),
    ({"query": ""}, "query.text", "query.text has no words"),
    ({"query": {}}, "query", "query: has to have one of `text`, `vectors` and"),
    ({"query": {"text": "a", "vectors": [[1]]}}, "query", "query: has to have one of `text`, `vectors` and"),
    ({"query": {"text": "a", "id": "a"}}, "query", "query: has to have one of `text`, `vectors` and"),
    ({"query": {"id": 3}}, "query.id", "query.id: has to be a string"),
    ({"query": {"vectors": [[1, 2], [3]]}}, "query.vectors[1]", "query.vectors[1]: has 1 numbers and"),
    ({"query": {"vectors": [[1, 2]]}}, "query.vectors", "query.vectors: is of 2, not 8"),
    ({"k": 0}, "k", "k: has to be between 1 and 4294967295, not 0"),
    ({"k": 1001}, "k", "k is 1001; give 1 to 1000"),
    ({"k": True}, "k", "k: has to be an integer, not a boolean"),
    ({"k": 1.0}, "k", "k: has to be an integer, not a number with a fraction or exponent"),
    ({"filter": "lang"}, "filter", "filter: has to be an object, not a string"),
    ({"filter": {}}, "filter", "filter: has no condition; give one of equals, in, range"),
    ({"filter": {"equal": {}}}, "filter.equal", "filter.equal: there is no such field; there are equals, in"),
    ({"filter": {"exists": {"field": "a"}, "id_in": ["a"]}}, "filter", "filter: has 2 conditions; combine them"),
    ({"filter": {"in": []}}, "filter.in", "filter.in: has to be an object, not a list"),
    ({"filter": {"in": {"field": "lang"}}}, "filter.in.values", "filter.in.values: is missing"),
    ({"filter": {"in": {"field": "lang", "values": "a"}}}, "filter.in.values", "has to be a list, not a string"),
    ({"filter": {"all": {}}}, "filter.all", "filter.all: has to be a list, not an object"),
    ({"filter": {"any": [{"not": []}]}}, "filter.any[0].not", "filter.any[0].not: has to be an object"),
    ({"filter": {"range": {"field": "year", "from": 1}}}, "filter.range.from", "there is no such field"),
    ({"filter": {"range": {"field": "year", "above": {}}}}, "filter.range.above", "has to be a string, a number"),
    ({"filter": {"prefix": {"field": "lang"}}}, "filter.prefix.prefix", "filter.prefix.prefix: is missing"),
    ({"filter": {"id_in": ["a", 1]}}, "filter.id_in[1]", "filter.id_in[1]: has to be a string"),
    ({"filter": DEEP}, "filter" + ".not" * 32, "nests deeper than 32"),
    ({"filter": {"equals": {"value": 1}}}, "filter.equals.field", "filter.equals.field: is missing"),
    ({"filter": {"equals": {"field": "lang"}}}, "filter.equals.value", "filter.equals.value: is missing"),
    ({"filter": {"equals": {"field": "x", "value": 1}}}, "filter.equals.field", "'x' isn't declared"),
    ({"filtr": {}}, "filtr", "filtr: there is no such field"),
    ({"projection": {"fields": "text"}}, "projection.fields", "projection.fields: has to be a list"),
    ({"projection": {"encoding": "int8"}}, "projection.encoding", "has to be one of 'float32', 'float16'"),
    ({"version": {"at_version": 3}}, "version.at_version", "version.at_version: has to be an object"),
    ({"version": {"at_version": {"number": 3}}}, "version.at_version.incarnation", "is missing; give the ver"),
    ({"version": {"at_version": V, "min_version": V}}, "version", "has both `min_version` and `at_version`"),
    ({"version": {"at_version": {**V, "number": -1}}}, "version.at_version.number", "between 0 and 1844674407"),
    ({"candidates": "all"}, "candidates", "candidates: has to be one of 'exhaustive', 'pruned'"),
    ({"candidate_limit": 0}, "candidate_limit", "candidate_limit: has to be between 1 and"),
    ({"allow_partial": "yes"}, "allow_partial", "allow_partial: has to be true or false, not a string"),
    ({"dense_vector": []}, "dense_vector", "dense_vector: is an empty list"),
]  # fmt: skip

REST: list[tuple[str, dict[str, Any], str, str]] = [
    ("/articles/documents/get", {}, "ids", "ids: is missing; give ids of documents"),
    ("/articles/documents/get", {"ids": []}, "ids", "ids: is an empty list; give at least one id"),
    ("/articles/documents/get", {"ids": ["a", 1]}, "ids[1]", "ids[1]: has to be a string, not an integer"),
    ("/articles/documents/get", {"ids": ["a"] * 65}, "ids", "ids: has 65 ids; at most 64 fit"),
    ("/articles/documents/delete", {}, "ids", "ids: is missing; give ids of documents, or a `filter`"),
    (
        "/articles/documents/delete", {"ids": ["a"], "filter": {"equals": {"field": "a", "value": 1}}},
        "filter", "filter: was given along with `ids`; give one of them",
    ),
    ("/articles/documents/count", {"ids": []}, "ids", "ids: there is no such field; there are filter, version"),
]  # fmt: skip


async def refused(stack: Stack, path: str, body: Any, field: str, words: str, status: int = 400) -> None:
    reply = await stack.http.post(f"/v1/collections{path}", json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"code", "reason", "message", "field"}
    assert (error["code"], error["field"]) == ("INVALID_ARGUMENT", field)
    assert words in error["message"]


@pytest.mark.parametrize(("changes", "field", "words"), CREATE, ids=[case[2][:40] for case in CREATE])
async def test_create(stack: Stack, changes: dict[str, Any], field: str, words: str) -> None:
    await refused(stack, "", {**SPEC, **changes}, field, words)
    assert not stack.retrieval.kept


@pytest.mark.parametrize(("changes", "field", "words"), UPSERT, ids=[case[2][:40] for case in UPSERT])
async def test_upsert(stack: Stack, changes: dict[str, Any], field: str, words: str) -> None:
    await filled(stack)
    body = {"documents": [{"id": "a", "text": "x"}], **changes}
    await refused(stack, "/articles/documents", body, field, words)


@pytest.mark.parametrize(
    ("document", "field", "words"), DOCUMENT, ids=[str(case[0])[:50] for case in DOCUMENT]
)
async def test_documents(stack: Stack, document: Any, field: str, words: str) -> None:
    await filled(stack)
    reply = await stack.http.post(
        "/v1/collections/articles/documents", json={"documents": [document, {"id": "good", "text": "fine"}]}
    )
    assert reply.status_code == 200, reply.text
    bad, good = reply.json()["documents"]
    assert bad["error"]["field"] == f"documents[0]{field}"
    assert words in bad["error"]["message"]
    assert bad["error"]["message"].startswith("documents[0]")
    assert good == {"id": "good", "tokens": 1, "truncated": False, "superseded": False}
    assert reply.json()["stored"] == 1


@pytest.mark.parametrize(("changes", "field", "words"), SEARCH, ids=[case[2][:40] for case in SEARCH])
async def test_search(stack: Stack, changes: dict[str, Any], field: str, words: str) -> None:
    await filled(stack)
    await refused(stack, "/articles/search", {"query": "water", **changes}, field, words)


@pytest.mark.parametrize(("path", "body", "field", "words"), REST, ids=[case[3][:40] for case in REST])
async def test_the_rest(stack: Stack, path: str, body: Any, field: str, words: str) -> None:
    await filled(stack)
    await refused(stack, path, body, field, words)


async def test_what_is_not_an_object(stack: Stack) -> None:
    for sent in (b"", b"[]", b"{", b'{"query": NaN}', b'{"k": 1e999}'):
        reply = await stack.http.post("/v1/collections/articles/search", content=sent)
        assert (reply.status_code, reply.json()["error"]["reason"]) == (400, "INVALID_JSON")
    surrogate = b'{"documents": [{"id": "a", "text": "\\ud800"}]}'
    reply = await stack.http.post("/v1/collections/articles/documents", content=surrogate)
    assert (reply.status_code, reply.json()["error"]["field"]) == (400, "documents[0].text")
    pages = await stack.http.get("/v1/collections?page_size=many")
    assert (pages.status_code, pages.json()["error"]["field"]) == (400, "page_size")


async def test_statuses_of_the_service_pass_on(stack: Stack) -> None:
    await filled(stack)
    again = await stack.http.post("/v1/collections", json=SPEC)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "ALREADY_EXISTS")
    assert again.json()["error"]["field"] == "name"
    later = await stack.http.post(
        "/v1/collections/articles/documents/delete", json={"filter": {"equals": {"field": "a", "value": 1}}}
    )
    assert (later.status_code, later.json()["error"]["code"]) == (501, "UNIMPLEMENTED")
    unknown = await stack.http.post("/v1/collections/nobody/search", json={"query": "x"})
    assert (unknown.status_code, unknown.json()["error"]["reason"]) == (404, "COLLECTION_NOT_FOUND")
    wrong = await stack.http.put("/v1/collections/articles", json={})
    assert (wrong.status_code, wrong.json()["error"]["reason"]) == (405, "METHOD_NOT_ALLOWED")


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(max_size=9)  # fmt: skip
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    "query", "text", "vectors", "k", "filter", "equals", "in", "range", "not", "all", "any", "values", "field", "value", "projection", "fields", "version",
    "at_version", "number", "incarnation", "documents", "id", "token_vectors", "dtype", "shape", "data",
    "chunk_offsets", "ids", "name", "type", "model", "token_dimension", "truncation", "enabled",
)  # fmt: skip
SHAPED = st.recursive(
    ANY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
PATHS = ("", "/c/documents", "/c/documents/get", "/c/documents/delete", "/c/documents/count", "/c/search")


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(KEYS), SHAPED, max_size=4) | ANY)
async def test_any_json(shared_stack: Stack, path: str, body: Any) -> None:
    reply = await shared_stack.http.post(f"/v1/collections{path}", json=body)
    assert reply.status_code in (200, 400, 404, 409, 501), reply.text
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"code", "reason", "message", "field"}
