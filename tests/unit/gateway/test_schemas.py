"""The documented bodies and the parsers accept the same JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ValidationError

from phasemesh.errors import InvalidArgument
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
