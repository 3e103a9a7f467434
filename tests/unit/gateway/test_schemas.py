"""The documented bodies and the parsers accept the same JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ValidationError

from phasemesh.errors import InvalidArgument
from phasemesh.gateway.dialects.native import read, schema
from phasemesh.gateway.dialects.openai.routes import parse_embeddings
from phasemesh.gateway.dialects.openai.schema import EmbeddingsRequest
from phasemesh.gateway.dialects.rerank.routes import parse_rerank
from phasemesh.gateway.dialects.rerank.schema import RerankRequest

SCALARS = st.none() | st.booleans() | st.integers(-2, 2**33) | st.sampled_from(["", "a", "base64", 1.0])
ITEMS = SCALARS | st.lists(SCALARS, max_size=3) | st.fixed_dictionaries({}, optional={"text": SCALARS})
ANY = ITEMS | st.lists(ITEMS, max_size=3)


def accepted(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ValidationError, InvalidArgument):
        return False
    return True


def bodies(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={key: likely | ANY for key, likely in fields.items()})


def agree(schema: type[BaseModel], parse: Callable[[], object], body: dict[str, Any]) -> None:
    assert accepted(parse) == accepted(lambda: schema.model_validate(body, strict=True)), body


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    body=bodies(
        {
            "model": st.just("m"),
            "input": st.lists(st.just("a"), min_size=1) | st.lists(st.lists(st.just(3), min_size=1)),
            "encoding_format": st.none(),
            "dimensions": st.none(),
        }
    )
)
def test_embeddings(body: dict[str, Any]) -> None:
    agree(EmbeddingsRequest, lambda: parse_embeddings(body, max_inputs=2048), body)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    body=bodies(
        {
            "model": st.just("m"),
            "query": st.just("q"),
            "documents": st.lists(st.just("a") | st.just({"text": "b"}), min_size=1),
            "top_n": st.none(),
            "return_documents": st.none(),
        }
    )
)
def test_rerank(body: dict[str, Any]) -> None:
    agree(RerankRequest, lambda: parse_rerank(body, max_documents=2048), body)


@pytest.mark.parametrize("body", [{"model": "m", "input": "x"}, {"model": "m", "input": [[1]], "user": "u"}])
def test_both_say_yes_sometimes(body: dict[str, Any]) -> None:
    assert accepted(lambda: parse_embeddings(body, max_inputs=1))
    assert accepted(lambda: EmbeddingsRequest.model_validate(body, strict=True))


VECTORS = st.lists(
    st.lists(st.integers(-3, 3) | st.floats(-1, 1), min_size=2, max_size=2), min_size=1, max_size=2
)
VERSION = st.fixed_dictionaries({"incarnation": st.just("i"), "number": st.integers(0, 9)})
READ = st.fixed_dictionaries({}, optional={"at_version": VERSION | SCALARS, "min_version": VERSION})
FILTER = st.fixed_dictionaries(
    {"equals": st.fixed_dictionaries({"field": st.just("f"), "value": ITEMS}) | SCALARS}
)
PROJECTION = st.fixed_dictionaries(
    {},
    optional={
        "text": SCALARS,
        "fields": st.lists(st.just("*") | SCALARS, max_size=2),
        "encoding": st.sampled_from(["float16", "numbers", None]),
    },
)
DOCUMENT = st.fixed_dictionaries(
    {"id": st.just("a") | SCALARS},
    optional={
        "text": SCALARS,
        "token_vectors": VECTORS | ANY | st.fixed_dictionaries({"vectors": VECTORS}),
        "fields": st.dictionaries(st.just("f"), ITEMS),
        "dense_vector": st.lists(st.floats(-1, 1), max_size=2) | SCALARS,
        "txt": st.just("x"),
    },
)
NATIVE: list[tuple[type[BaseModel], Callable[[dict[str, Any]], object], dict[str, st.SearchStrategy[Any]]]] = [
    (
        schema.SearchRequest,
        lambda body: read.read_search(body, "c"),
        {
            "query": st.just("q") | st.fixed_dictionaries({"vectors": VECTORS | ANY}),
            "k": st.integers(-1, 3),
            "filter": FILTER,
            "projection": PROJECTION,
            "version": READ,
            "candidates": st.sampled_from(["dense", "DENSE"]),
            "allow_partial": SCALARS,
            "filtr": FILTER,
        },
    ),
    (
        schema.RerankStoredRequest,
        lambda body: read.read_rerank(body, "c"),
        {
            "query": st.just("q") | st.fixed_dictionaries({"id": st.just("a") | SCALARS}),
            "ids": st.lists(st.just("a") | SCALARS, max_size=2),
            "top_k": st.integers(-1, 3),
            "projection": PROJECTION,
            "version": READ,
        },
    ),
    (
        schema.ExplainRequest,
        lambda body: read.read_explain(body, "c"),
        {"query": st.just("q"), "id": st.just("a") | SCALARS, "version": READ, "ids": ANY},
    ),
    (
        schema.CollectionSpec,
        read.read_create,
        {
            "name": st.just("c"),
            "model": st.just("m"),
            "token_dimension": st.integers(-1, 3),
            "codec": st.sampled_from(["int8", "int4", "INT8", "unspecified"]),
            "fields": st.lists(
                st.fixed_dictionaries({"name": st.just("f"), "type": st.sampled_from(["bool", "blob"])}),
                max_size=2,
            ),
            "normalize": st.sampled_from(["auto", "always"]),
        },
    ),
    (schema.GetRequest, lambda body: read.read_get(body, "c", max_ids=9), {
        "ids": st.lists(st.just("a")), "projection": PROJECTION, "version": READ}),
    (schema.CountRequest, lambda body: read.read_count(body, "c"), {"filter": FILTER, "version": READ}),
    (schema.DeleteRequest, lambda body: read.read_delete(body, "c", max_ids=9), {
        "ids": st.lists(st.just("a")), "filter": FILTER}),
    (schema.UpsertRequest, lambda body: without_faults(read.read_upsert(body, "c", max_documents=9)), {
        "documents": st.lists(DOCUMENT, max_size=2),
        "priority": st.sampled_from(["bulk", "high"]),
        "truncation": st.fixed_dictionaries({"enabled": SCALARS}, optional={"max_tokens": SCALARS})}),
]  # fmt: skip


def without_faults(call: read.UpsertCall) -> None:
    for fault in call.faults.values():
        raise fault


@pytest.mark.parametrize("case", NATIVE, ids=[case[0].__name__ for case in NATIVE])
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_native(
    case: tuple[type[BaseModel], Callable[[dict[str, Any]], object], dict[str, st.SearchStrategy[Any]]],
    data: st.DataObject,
) -> None:
    model, parse, fields = case
    body = data.draw(bodies(fields))
    # The document can't say "one of the two", nor that rows are of one length: what is read is documented,
    # and the other way round where the model states it all.
    read_here = accepted(lambda: parse(body))
    documented = accepted(lambda: model.model_validate(body, strict=True))
    assert documented or not read_here, body
    if model is schema.CollectionSpec:
        assert read_here == documented, body
