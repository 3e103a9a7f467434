"""The official `openai` client, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest
import pytest_asyncio

from phasemesh.errors import ResourceExhausted, Unavailable
from tests.fakes.encoder_service import text_vector
from tests.fakes.gateway_stack import Stack

TEXTS = ["water boils at 100 degrees", "the river froze", "emoji \U0001f600 and \u202eRTL", "a\x00b"]


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        yield client


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([text_vector(text.split(), 16) for text in texts])


async def test_default_is_base64_and_decodes_to_the_same_vectors(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    reply = await client.embeddings.create(model="bag", input=TEXTS)
    np.testing.assert_array_equal(
        np.array([item.embedding for item in reply.data], np.float32), expected(TEXTS)
    )
    assert [item.index for item in reply.data] == [0, 1, 2, 3]
    assert reply.model == "bag"
    words = sum(len(text.split()) + 2 for text in TEXTS)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (words, words)
    assert reply.object == "list"


async def test_floats_are_the_same_float32s(client: openai.AsyncOpenAI) -> None:
    reply = await client.embeddings.create(model="bag", input=TEXTS, encoding_format="float")
    assert isinstance(reply.data[0].embedding, list)
    np.testing.assert_array_equal(
        np.array([item.embedding for item in reply.data], np.float32), expected(TEXTS)
    )


async def test_one_text_and_an_alias(client: openai.AsyncOpenAI) -> None:
    reply = await client.embeddings.create(model="bag-alias", input=TEXTS[0], user="somebody")
    np.testing.assert_array_equal(np.array([reply.data[0].embedding], np.float32), expected(TEXTS[:1]))
    assert reply.model == "bag"


async def test_token_ids_travel_as_they_stand(client: openai.AsyncOpenAI, stack: Stack) -> None:
    flat = await client.embeddings.create(model="bag", input=[101, 7, 102])
    nested = await client.embeddings.create(model="bag", input=[[101, 7, 102], [5]])
    assert flat.data[0].embedding == nested.data[0].embedding
    assert len(nested.data) == 2
    request = stack.encoder.calls[-1][1]
    assert [list(item.token_ids.ids) for item in request.inputs] == [[101, 7, 102], [5]]


async def test_dimensions_of_a_matryoshka_model(client: openai.AsyncOpenAI) -> None:
    reply = await client.embeddings.create(model="org/nested", input="some words", dimensions=8)
    full = text_vector(["some", "words"], 16)[:8]
    np.testing.assert_allclose(reply.data[0].embedding, full / np.linalg.norm(full), rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "dimensions", "code"),
    [("bag", 8, "not_matryoshka"), ("org/nested", 5, "dimensions_out_of_range")],
)
async def test_wrong_dimensions_are_a_bad_request(
    client: openai.AsyncOpenAI, model: str, dimensions: int, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model=model, input="x", dimensions=dimensions)
    assert (caught.value.param, caught.value.code) == ("dimensions", code)
    assert caught.value.type == "invalid_request_error"


async def test_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.embeddings.create(model="nobody", input="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "bag" in caught.value.message
    assert caught.value.request_id


async def test_too_long_names_the_input(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="bag", input=["short", "word " * 50])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    assert "input[1]" in caught.value.message
    assert "inputs[" not in caught.value.message


async def test_a_model_without_embeddings(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="cross", input="x")
    assert (caught.value.param, caught.value.code) == ("model", "task_not_supported")


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in await client.models.list()]
    assert [model.id for model in models] == ["bag", "org/nested", "cross"]
    one = await client.models.retrieve("org/nested")
    assert (one.id, one.object, one.owned_by) == ("org/nested", "model", "phasemesh")
    assert abs(one.created - time.time()) < 3600
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/nobody")


async def test_retries_after_the_time_it_was_told(stack: Stack) -> None:
    stack.encoder.failures.append(ResourceExhausted("queue full", reason="QUEUE_FULL", retry_after_s=0.3))
    began = time.monotonic()
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=1) as client:
        reply = await client.embeddings.create(model="bag", input="x")
    waited = time.monotonic() - began
    assert len(reply.data) == 1
    assert len(stack.encoder.calls) == 2
    # Its own first back-off would be between 0.375 s and 0.5 s; it was told 0.3 s.
    assert 0.3 <= waited < 0.37


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ResourceExhausted("queue full", retry_after_s=2.2), openai.RateLimitError),
        (Unavailable("draining", retry_after_s=2.2), openai.InternalServerError),
    ],
)
async def test_overload_says_when_to_come_back(
    stack: Stack, error: Exception, kind: type[openai.APIStatusError]
) -> None:
    # UNAVAILABLE is tried three times by the gRPC client first.
    stack.encoder.failures.extend([error] * 3)  # type: ignore[list-item]  # both are of our tree
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(kind) as caught:
            await client.embeddings.create(model="bag", input="x")
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.response.headers["retry-after-ms"] == "2200"


async def test_the_synchronous_client_too(stack: Stack) -> None:
    def embed() -> list[float]:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            return client.embeddings.create(model="bag", input=TEXTS[0]).data[0].embedding

    vector = await asyncio.to_thread(embed)
    np.testing.assert_array_equal(np.array([vector], np.float32), expected(TEXTS[:1]))
