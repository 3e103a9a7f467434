"""The native dialect from end to end: collections, documents, search, versions, against brute force."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from phasemesh.errors import Cancelled, ResourceExhausted, Unauthenticated
from phasemesh.gateway.dialects.native import schema
from tests.contract.gateway.conftest import CALLER_KEY, MESH_KEY
from tests.contract.gateway.test_disconnect import PATIENCE_S, raw
from tests.fakes.gateway_stack import Stack, running_gateway
from tests.fakes.retrieval_service import SEARCH_PHASES_NS, maxsim, word_matrix

SPEC = {
    "name": "articles",
    "model": "words",
    "codec": "bf16",
    "fields": [{"name": "lang", "type": "string"}, {"name": "year", "type": "int64"}],
}
TEXTS = {
    "a": "water boils at a hundred degrees",
    "b": "the river froze overnight",
    "c": "water and river",
    "d": "",
}


async def send(stack: Stack, verb: str, path: str, body: Any = None, status: int = 200) -> Any:
    reply = await stack.http.request(verb, f"/v1/collections{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def filled(stack: Stack) -> dict[str, Any]:
    await send(stack, "POST", "", SPEC)
    documents = [
        {"id": key, "text": text, "fields": {"lang": "en" if key < "c" else "de", "year": 2000}}
        for key, text in TEXTS.items()
    ]
    reply: dict[str, Any] = await send(stack, "POST", "/articles/documents", {"documents": documents})
    return reply


def brute_force(query: np.ndarray[Any, Any], texts: dict[str, str] = TEXTS) -> list[tuple[str, float]]:
    scores = {key: maxsim(query, word_matrix(text)) for key, text in texts.items() if text}
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


async def test_the_life_of_a_collection(stack: Stack) -> None:
    made = await send(stack, "POST", "", SPEC)
    assert made["collection"]["spec"] == {
        **SPEC,
        "recipe_hash": "",
        "token_dimension": 8,
        "normalize": "auto",
        "reduction": "sum",
        "dense_dimension": 0,
    }
    assert made["collection"]["create_time"] == "2025-06-15T15:06:40Z"
    assert await send(stack, "GET", "/articles") == made
    await send(stack, "POST", "", {"name": "bare", "token_dimension": 3})
    names = [item["spec"]["name"] for item in (await send(stack, "GET", ""))["collections"]]
    assert names == ["articles", "bare"]
    first = await send(stack, "GET", "?page_size=1")
    assert (len(first["collections"]), first["next_page_token"]) == (1, "articles")
    second = await send(stack, "GET", "?page_size=1&page_token=articles")
    assert (second["collections"][0]["spec"]["name"], second["next_page_token"]) == ("bare", "")
    assert await send(stack, "DELETE", "/articles") == {}
    gone = await send(stack, "GET", "/articles", status=404)
    assert gone == {
        "error": {
            "code": "NOT_FOUND",
            "reason": "COLLECTION_NOT_FOUND",
            "message": "collection: there is no 'articles'",
            "field": "collection",
        }
    }


async def test_search_from_text_equals_brute_force(stack: Stack) -> None:
    await filled(stack)
    body = {"query": "water river", "k": 2, "projection": {"text": True, "fields": ["year"]}}
    found = await send(stack, "POST", "/articles/search", body)
    expected = brute_force(word_matrix("water river"))[:2]
    assert [hit["id"] for hit in found["hits"]] == [key for key, _ in expected]
    assert [hit["score"] for hit in found["hits"]] == pytest.approx(
        [score for _, score in expected], rel=1e-6
    )
    assert found["hits"][0]["document"] == {"id": "c", "text": TEXTS["c"], "fields": {"year": 2000}}
    assert found["coverage"] == {
        "fragments": 1,
        "searched_fragments": 1,
        "documents": 3,
        "tokens": 13,
        "candidates": "exhaustive",
        "exact": True,
    }
    assert found["usage"] == {"tokens": 2, "truncated_inputs": 0}
    assert {phase["phase"]: phase["duration_ns"] for phase in found["timings"]["phases"]} == SEARCH_PHASES_NS


async def test_ten_hits_without_k_and_ids_alone_without_projection(stack: Stack) -> None:
    await filled(stack)
    found = await send(stack, "POST", "/articles/search", {"query": {"text": "water"}})
    assert stack.retrieval.calls[-1][1].k == 10
    assert [set(hit) for hit in found["hits"]] == [{"id", "score"}] * 3


@pytest.mark.parametrize("packed", ["float32", "float16", "bfloat16", None])
async def test_a_query_of_vectors_in_every_form(stack: Stack, packed: str | None) -> None:
    await filled(stack)
    query = word_matrix("boils overnight").astype(np.float32)
    if packed is None:
        vectors: Any = query.tolist()
    else:
        if packed == "bfloat16":
            data = (query.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            query = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(2, 8)
        else:
            data = query.astype(packed).tobytes()
        vectors = {"dtype": packed, "shape": [2, 8], "data": base64.b64encode(data).decode()}
    found = await send(stack, "POST", "/articles/search", {"query": {"vectors": vectors}})
    expected = brute_force(query.astype(np.float16))
    assert [hit["id"] for hit in found["hits"]] == [key for key, _ in expected]
    assert [hit["score"] for hit in found["hits"]] == pytest.approx(
        [score for _, score in expected], rel=1e-3
    )


async def test_a_filter_restricts_search_and_count(stack: Stack) -> None:
    await filled(stack)
    german = {"equals": {"field": "lang", "value": "de"}}
    found = await send(stack, "POST", "/articles/search", {"query": "water", "filter": german})
    assert [hit["id"] for hit in found["hits"]] == ["c"]
    none = {"equals": {"field": "lang", "value": "fr"}}
    assert (await send(stack, "POST", "/articles/search", {"query": "water", "filter": none}))["hits"] == []
    count = "/articles/documents/count"
    assert (await send(stack, "POST", count, {"filter": german}))["documents"] == 2
    year = {"equals": {"field": "year", "value": 2000}}
    assert (await send(stack, "POST", count, {"filter": year}))["documents"] == 4
    assert (await send(stack, "POST", count))["documents"] == 4  # no body at all
    refused = {"equals": {"field": "author", "value": "x"}}
    error = await send(stack, "POST", count, {"filter": refused}, status=400)
    assert error["error"]["field"] == "filter.equals.field"


async def test_rerank_answers_every_id(stack: Stack) -> None:
    await filled(stack)
    ids = ["b", "nobody", "d", "c", "b"]
    body = {"query": "water river", "ids": ids, "projection": {"text": True}}
    found = await send(stack, "POST", "/articles/rerank", body)
    expected = dict(brute_force(word_matrix("water river")))
    ranked = sorted(["b", "b", "c"], key=lambda key: (-expected[key], key))
    assert [hit["id"] for hit in found["hits"]] == ranked
    assert [hit["score"] for hit in found["hits"]] == pytest.approx(
        [expected[key] for key in ranked], rel=1e-6
    )
    assert found["hits"][0]["document"] == {"id": ranked[0], "text": TEXTS[ranked[0]]}
    assert (found["missing_ids"], found["empty_ids"]) == (["nobody"], ["d"])
    assert found["usage"] == {"tokens": 2, "truncated_inputs": 0}
    best = await send(stack, "POST", "/articles/rerank", {**body, "top_k": 1, "projection": None})
    assert [set(hit) for hit in best["hits"]] == [{"id", "score"}]
    alike = await send(stack, "POST", "/articles/rerank", {"query": {"id": "c"}, "ids": ["a", "c"]})
    assert [hit["id"] for hit in alike["hits"]] == ["c", "a"]
    others = await send(stack, "POST", "/articles/search", {"query": {"id": "c"}})
    assert [hit["id"] for hit in others["hits"]] == [
        key for key, _ in brute_force(word_matrix(TEXTS["c"])) if key != "c"
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ids": []}, "ids"),
        ({"ids": None}, "ids"),
        ({"ids": ["a", 3]}, "ids[1]"),
        ({"ids": ["a"] * 10_001}, "ids"),
        ({"top_k": 0}, "top_k"),
        ({"k": 3}, "k"),
    ],
)
async def test_a_wrong_rerank_names_the_field(stack: Stack, change: dict[str, Any], field: str) -> None:
    body = {"query": "water", "ids": ["a"], **change}
    error = await send(stack, "POST", "/articles/rerank", body, status=400)
    assert error["error"]["field"] == field


async def test_explain_names_the_words_that_matched(stack: Stack) -> None:
    await filled(stack)
    body = {"query": "river water", "id": "a"}
    found = await send(stack, "POST", "/articles/explain", body)
    similarities = word_matrix(body["query"]).astype(float) @ word_matrix(TEXTS["a"]).astype(float).T
    matched = [
        (
            body["query"][one["query_span_start"] : one["query_span_end"]],
            TEXTS["a"][one["document_span_start"] : one["document_span_end"]],
        )
        for one in found["alignments"]
    ]
    assert matched == [("river", TEXTS["a"].split()[similarities[0].argmax()]), ("water", "water")]
    assert found["score"] == pytest.approx(similarities.max(axis=1).sum(), rel=1e-6)
    assert found["reduction"] == "sum"
    without = await send(stack, "POST", "/articles/explain", {"query": {"id": "b"}, "id": "a"})
    assert "query_span_start" not in without["alignments"][0]
    assert without["alignments"][0]["document_span_end"] > 0
    gone = await send(stack, "POST", "/articles/explain", {"query": "x", "id": "nobody"}, status=404)
    assert gone["error"]["reason"] == "DOCUMENT_NOT_FOUND"
    missing = await send(stack, "POST", "/articles/explain", {"query": "x"}, status=400)
    assert missing["error"]["field"] == "id"
    stack.retrieval.spoil = True
    broken = await send(stack, "POST", "/articles/explain", body, status=500)
    assert "internal error" in broken["error"]["message"]


async def test_versions_travel_as_objects(stack: Stack) -> None:
    before = (await filled(stack))["version"]
    deleted = await send(stack, "POST", "/articles/documents/delete", {"ids": ["c", "nobody"]})
    assert (deleted["deleted"], deleted["missing_ids"]) == (1, ["nobody"])
    assert deleted["version"] == {**before, "number": before["number"] + 1}
    search = {"query": "river", "k": 1}
    now = await send(stack, "POST", "/articles/search", {**search, "version": {"min_version": before}})
    assert [hit["id"] for hit in now["hits"]] == ["b"]
    then = await send(stack, "POST", "/articles/search", {**search, "version": {"at_version": before}})
    assert ([hit["id"] for hit in then["hits"]], then["version"]) == (["b"], before)
    got = await send(
        stack, "POST", "/articles/documents/get", {"ids": ["c"], "version": {"at_version": before}}
    )
    assert [item["id"] for item in got["documents"]] == ["c"]
    stale = {"incarnation": "0" * 32, "number": before["number"]}
    error = await send(
        stack, "POST", "/articles/search", {**search, "version": {"at_version": stale}}, status=404
    )
    assert error["error"]["reason"] == "VERSION_NOT_FOUND"


async def test_given_vectors_come_back_and_can_be_sent_again(stack: Stack) -> None:
    await send(stack, "POST", "", {"name": "v", "token_dimension": 3, "dense_dimension": 2})
    rows = [[0.5, -0.25, 1], [0, 1, 0]]
    document = {"id": "x", "token_vectors": rows, "dense_vector": [1.5, 2]}
    reply = await send(stack, "POST", "/v/documents", {"documents": [document]})
    assert reply["documents"] == [{"id": "x", "tokens": 2, "truncated": False, "superseded": False}]
    everything = {"text": True, "fields": ["*"], "token_vectors": True, "dense_vector": True}
    got = await send(stack, "POST", "/v/documents/get", {"ids": ["x", "y"], "projection": everything})
    assert got["missing_ids"] == ["y"]
    shown = got["documents"][0]
    assert (shown["token_vectors"]["vectors"], shown["dense_vector"]) == (rows, [1.5, 2])
    packed = await send(
        stack, "POST", "/v/documents/get", {"ids": ["x"], "projection": {**everything, "encoding": "float16"}}
    )
    vectors = packed["documents"][0]["token_vectors"]["vectors"]
    assert (vectors["dtype"], vectors["shape"]) == ("float16", [2, 3])
    assert np.frombuffer(base64.b64decode(vectors["data"]), "<f2").reshape(2, 3).tolist() == rows
    for again in (shown, packed["documents"][0]):
        reply = await send(stack, "POST", "/v/documents", {"documents": [again]})
        assert "error" not in reply["documents"][0]
    assert (await send(stack, "POST", "/v/documents/get", {"ids": ["x"], "projection": everything}))[
        "documents"
    ] == [shown]


async def test_an_empty_document_is_shown_without_rows(stack: Stack) -> None:
    await filled(stack)
    body = {"ids": ["d"], "projection": {"token_vectors": True, "encoding": "float32"}}
    got = await send(stack, "POST", "/articles/documents/get", body)
    assert got["documents"][0]["token_vectors"]["vectors"] == []


async def test_a_bad_document_fails_alone(stack: Stack) -> None:
    await send(stack, "POST", "", SPEC)
    documents: list[Any] = [
        {"id": "a", "text": "fine"},
        "no object",  # fails here
        {"id": "b", "text": "word " * 99},  # fails in the service, as its documents[1]
        {"id": "c", "text": 7},
        {"id": "e", "text": "old"},
        {"id": "e", "text": "new"},
        {"id": "f", "token_vectors": [[1e39] * 8]},  # infinite as float32
    ]
    reply = await send(stack, "POST", "/articles/documents", {"documents": documents})
    assert [item["id"] for item in reply["documents"]] == ["a", "", "b", "c", "e", "e", "f"]
    errors = [item.get("error") for item in reply["documents"]]
    assert [error and error["field"] for error in errors] == [
        None, "documents[1]", "documents[2].text", "documents[3].text", None, None,
        "documents[6].token_vectors.vectors",
    ]  # fmt: skip
    assert errors[1]["message"] == "documents[1]: has to be an object, not a string"
    assert errors[2]["message"] == "documents[2].text: has 99 words, and 32 fit"
    assert errors[2]["code"] == "INVALID_ARGUMENT"
    assert [item.get("superseded") for item in reply["documents"]] == [
        False, None, None, None, True, False, None,
    ]  # fmt: skip
    assert (reply["stored"], reply["superseded"]) == (2, 1)
    got = await send(stack, "POST", "/articles/documents/get", {"ids": ["a", "b", "c", "e", "f"]})
    assert {item["id"]: item["text"] for item in got["documents"]} == {"a": "fine", "e": "new"}
    cut = {"documents": documents[2:3], "truncation": {"enabled": True}}
    reply = await send(stack, "POST", "/articles/documents", cut)
    assert (reply["documents"][0]["truncated"], reply["usage"]["truncated_inputs"]) == (True, 1)


async def test_a_request_of_bad_documents_alone_fails(stack: Stack) -> None:
    await send(stack, "POST", "", SPEC)
    error = await send(stack, "POST", "/articles/documents", {"documents": [{"text": "x"}]}, status=400)
    assert error["error"]["field"] == "documents[0].id"


async def test_replies_are_what_the_document_says(stack: Stack) -> None:
    created = await stack.http.post("/v1/collections", json=SPEC)
    schema.CollectionReply.model_validate_json(created.content, strict=True)
    upsert = {"documents": [{"id": "a", "text": "water"}, {"id": "b", "text": "w " * 99}]}
    stored = await stack.http.post("/v1/collections/articles/documents", json=upsert)
    schema.UpsertReply.model_validate_json(stored.content, strict=True)
    everything = {"text": True, "fields": ["*"], "token_vectors": True}
    for encoding in (None, "float16"):
        projection = {**everything, "encoding": encoding}
        search = {"query": "water", "projection": projection}
        found = await stack.http.post("/v1/collections/articles/search", json=search)
        schema.SearchReply.model_validate_json(found.content, strict=True)
        rerank = {"query": "water", "ids": ["a", "z"], "projection": projection}
        ranked = await stack.http.post("/v1/collections/articles/rerank", json=rerank)
        schema.RerankStoredReply.model_validate_json(ranked.content, strict=True)
        get = {"ids": ["a"], "projection": projection}
        got = await stack.http.post("/v1/collections/articles/documents/get", json=get)
        schema.GetReply.model_validate_json(got.content, strict=True)
    for query in ("water", {"id": "a"}):
        why = await stack.http.post("/v1/collections/articles/explain", json={"query": query, "id": "a"})
        schema.ExplainReply.model_validate_json(why.content, strict=True)
    counted = await stack.http.post("/v1/collections/articles/documents/count", json={})
    schema.CountReply.model_validate_json(counted.content, strict=True)
    deleted = await stack.http.post("/v1/collections/articles/documents/delete", json={"ids": ["a"]})
    schema.DeleteReply.model_validate_json(deleted.content, strict=True)
    listed = await stack.http.get("/v1/collections")
    schema.CollectionsReply.model_validate_json(listed.content, strict=True)
    error = await stack.http.get("/v1/collections/nobody")
    schema.ErrorReply.model_validate_json(error.content, strict=True)


async def test_server_timing_has_the_phases_of_every_process(stack: Stack) -> None:
    await filled(stack)
    reply = await stack.http.post("/v1/collections/articles/search", json={"query": "water"})
    entries = dict(entry.split(";dur=") for entry in reply.headers["server-timing"].split(", "))
    assert list(entries) == ["gateway.validate", "gateway.rpc", *SEARCH_PHASES_NS, "gateway.render", "total"]
    assert {phase: float(entries[phase]) * 1e6 for phase in SEARCH_PHASES_NS} == SEARCH_PHASES_NS


async def test_disconnect_reaches_the_service(stack: Stack) -> None:
    stack.retrieval.hold = asyncio.Event()  # Never set: only a cancellation ends the handler.
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(raw("/v1/collections/articles/search", {"query": "x"}))
    await asyncio.wait_for(stack.retrieval.entered.wait(), PATIENCE_S)
    assert not stack.retrieval.cancelled.is_set()
    writer.close()
    await asyncio.wait_for(stack.retrieval.cancelled.wait(), PATIENCE_S)


async def test_tenants_come_from_the_key(keyed: Stack) -> None:
    keyed.retrieval.reset()
    caller, mesh = ({"authorization": f"Bearer {key}"} for key in (CALLER_KEY, MESH_KEY))
    forged = {**caller, "x-phasemesh-tenant": "default"}
    made = await keyed.http.post("/v1/collections", json=SPEC, headers=forged)
    assert made.status_code == 200
    assert list(keyed.retrieval.kept) == [("tenant-a", "articles")]
    other = await keyed.http.get("/v1/collections/articles", headers=mesh)
    assert other.status_code == 404


async def test_faults_inside_the_mesh_are_not_the_callers(stack: Stack) -> None:
    stack.retrieval.failures.append(Unauthenticated("the key isn't known here"))
    refused = await stack.http.get("/v1/collections")
    assert (refused.status_code, "key" in refused.text) == (500, False)
    stack.retrieval.failures.append(Cancelled("draining"))
    dropped = await stack.http.get("/v1/collections")
    assert (dropped.status_code, dropped.json()["error"]["reason"]) == (503, "CALL_DROPPED")
    stack.retrieval.failures.append(ResourceExhausted("busy", retry_after_s=2.5))
    busy = await stack.http.get("/v1/collections")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")


async def test_a_score_that_is_not_finite_is_an_error_not_null(stack: Stack) -> None:
    await filled(stack)
    stack.retrieval.spoil = True
    error = await send(stack, "POST", "/articles/search", {"query": "water"}, status=500)
    assert "internal error" in error["error"]["message"]


async def test_without_a_retrieval_service_there_are_no_routes() -> None:
    async with running_gateway({"gateway.retrieval": None}) as stack:
        error = await send(stack, "GET", "", status=404)
        assert error["error"]["reason"] == "ROUTE_NOT_FOUND"
        assert "/v1/collections" not in (await stack.http.get("/openapi.json")).text
        assert "retrieval" not in (await stack.http.get("/health")).json()


async def test_the_openapi_document(stack: Stack) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    text = json.dumps(document)
    for name in ("SearchRequest", "UpsertRequest", "CollectionSpec", "SearchReply"):
        assert f"#/components/schemas/{name}" in text
    search = document["paths"]["/v1/collections/{name}/search"]["post"]
    assert (search["summary"], search["tags"]) == ("Search", ["Collections"])
    assert search["parameters"][0]["name"] == "name"
    count = document["paths"]["/v1/collections/{name}/documents/count"]["post"]
    assert count["requestBody"]["required"] is False


async def test_documents_are_listed_page_by_page(stack: Stack) -> None:
    await filled(stack)
    body: dict[str, Any] = {"page_size": 3, "projection": {"fields": ["lang"]}}
    first = await send(stack, "POST", "/articles/documents/list", body)
    assert [document["id"] for document in first["documents"]] == ["a", "b", "c"]
    assert all("text" not in document for document in first["documents"])
    more = await send(
        stack, "POST", "/articles/documents/list", body | {"page_token": first["next_page_token"]}
    )
    assert [document["id"] for document in more["documents"]] == ["d"]
    assert more["next_page_token"] == ""
    assert more["version"] == first["version"]
    whole = await send(stack, "POST", "/articles/documents/list")
    assert [document["text"] for document in whole["documents"]] == list(TEXTS.values())


async def test_versions_are_tagged_restored_and_compacted(stack: Stack) -> None:
    await filled(stack)
    old = (await send(stack, "GET", "/articles"))["collection"]["version"]
    head = (await send(stack, "POST", "/articles/documents/delete", {"ids": ["a"]}))["version"]
    assert await send(stack, "POST", "/articles/tag", {"tag": "v1", "version": old}) == {}
    again = await send(stack, "POST", "/articles/tag", {"tag": "v1", "version": head}, status=409)
    assert again["error"]["reason"] == "TAG_EXISTS"
    stale = await send(stack, "POST", "/articles/restore", {"tag": "v1", "expected_version": old}, status=409)
    assert stale["error"]["reason"] == "VERSION_MOVED"
    restored = await send(stack, "POST", "/articles/restore", {"tag": "v1", "expected_version": head})
    assert restored["version"]["number"] == head["number"] + 1
    assert (await send(stack, "POST", "/articles/documents/count", {}))["documents"] == 4
    back = {"version": head, "expected_version": restored["version"]}
    assert (await send(stack, "POST", "/articles/restore", back))["version"]["number"] == head["number"] + 2
    assert await send(stack, "POST", "/articles/tag", {"tag": "v1", "overwrite": True}) == {}
    compacted = await send(stack, "POST", "/articles/compact")
    assert (compacted["fragments_before"], compacted["fragments_after"]) == (3, 1)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tag", {"version": {"incarnation": "x", "number": 1}}, "tag"),
        ("tag", {"tag": "v", "version": {"incarnation": "x"}}, "version.number"),
        ("tag", {"tag": "v", "move": True}, "move"),
        ("restore", {"expected_version": {"incarnation": "x", "number": 1}}, "version"),
        ("restore", {"tag": "v"}, "expected_version"),
        ("compact", {"all": True}, "all"),
        ("documents/list", {"page_size": -1}, "page_size"),
        ("documents/list", {"ids": ["a"]}, "ids"),
    ],
)
async def test_wrong_fields_of_version_requests_are_named(
    stack: Stack, path: str, body: dict[str, Any], field: str
) -> None:
    await filled(stack)
    reply = await send(stack, "POST", f"/articles/{path}", body, status=400)
    assert reply["error"]["field"] == field
