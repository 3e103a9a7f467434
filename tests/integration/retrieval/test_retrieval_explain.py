"""Explain through real scorers: alignments against float64 brute force, spans against the texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import unit_rows
from tests.unit.retrieval.stack import DIM, MODEL, Stack, given, tensor, text_matrix


async def test_words_that_match_are_named_by_their_characters(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL)
    text = "the  wäter boils"
    await served.upsert(pb.Document(id="a", text=text), pb.Document(id="b", text="other"), name=name)
    asked = "boils wäter steam"
    reply = await served("Explain", pb.ExplainRequest(collection=name, query=pb.Query(text=asked), id="a"))
    similarities = text_matrix(asked, "Q").astype(np.float64) @ text_matrix(text, "D").astype(np.float64).T
    assert [one.query_token for one in reply.alignments] == [0, 1, 2, 3]
    assert [one.document_token for one in reply.alignments] == similarities.argmax(axis=1).tolist()
    assert [one.similarity for one in reply.alignments] == pytest.approx(similarities.max(axis=1), rel=1e-6)
    words = [
        (
            asked[one.query_span_start : one.query_span_end],
            text[one.document_span_start : one.document_span_end],
        )
        for one in reply.alignments
    ]
    assert words[1:3] == [("boils", "boils"), ("wäter", "wäter")]
    assert words[0][0] == ""
    assert reply.alignments[0].HasField("query_span_start")
    found = await served.search(asked, 9, name=name)
    assert reply.score == next(hit.score for hit in found.hits if hit.id == "a")
    assert reply.score == pytest.approx(sum(one.similarity for one in reply.alignments), rel=1e-6)
    assert reply.reduction == pb.MAX_SIM_REDUCTION_SUM
    assert (reply.version, reply.usage.tokens) == (found.version, 4)


async def test_given_vectors_have_no_spans_and_a_mean_is_a_mean(served: Stack, name: str) -> None:
    await served.create(name, reduction=pb.MAX_SIM_REDUCTION_MEAN)
    rng = np.random.default_rng(5)
    matrix, query = unit_rows(rng, 9), unit_rows(rng, 4)
    await served.upsert(given("a", matrix), name=name)
    request = pb.ExplainRequest(collection=name, query=pb.Query(vectors=tensor(query)), id="a")
    reply = await served("Explain", request)
    assert reply.reduction == pb.MAX_SIM_REDUCTION_MEAN
    assert reply.score == pytest.approx(np.mean([one.similarity for one in reply.alignments]), rel=1e-6)
    assert not any(one.HasField("document_span_start") for one in reply.alignments)
    assert not any(one.HasField("query_span_start") for one in reply.alignments)
    [hit] = (await served.search(query, 1, name=name)).hits
    assert hit.score == reply.score


async def test_of_several_chunks_the_best_is_explained(served: Stack, name: str) -> None:
    await served.create(name, normalize=pb.NORMALIZE_POLICY_NEVER)
    rng = np.random.default_rng(1)
    matrix, query = unit_rows(rng, 12), unit_rows(rng, 3)
    document = pb.Document(
        id="a",
        token_vectors=pb.TokenMatrix(
            vectors=tensor(matrix), chunk_offsets=[4, 9], span_starts=range(12), span_ends=range(1, 13)
        ),
    )
    await served.upsert(given("first", matrix[:2]), document, name=name)
    reply = await served(
        "Explain", pb.ExplainRequest(collection=name, query=pb.Query(vectors=tensor(query)), id="a")
    )
    similarities = query.astype(np.float64) @ matrix.astype(np.float64).T
    cuts = [(0, 4), (4, 9), (9, 12)]
    begin, stop = max(cuts, key=lambda cut: similarities[:, cut[0] : cut[1]].max(axis=1).sum())
    assert (begin, stop) != (0, 4)
    expected = (begin + similarities[:, begin:stop].argmax(axis=1)).tolist()
    assert expected != similarities.argmax(axis=1).tolist()
    assert [one.document_token for one in reply.alignments] == expected
    assert [one.document_span_start for one in reply.alignments] == expected
    assert reply.score == pytest.approx(similarities[:, begin:stop].max(axis=1).sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"id": "nobody"}, NotFound, "id"),
        ({"id": "empty"}, FailedPrecondition, "id"),
        ({"id": ""}, InvalidArgument, "id"),
        ({"id": "nul\0"}, NotFound, "id"),
        ({"id": "a", "query": pb.Query()}, InvalidArgument, "query"),
        ({"id": "a", "query": pb.Query(text="x")}, FailedPrecondition, "query.text"),
        (
            {"id": "a", "query": pb.Query(vectors=tensor(np.eye(1, 3)))},
            InvalidArgument,
            "query.vectors.shape",
        ),
    ],
)
async def test_what_cannot_be_explained(
    served: Stack, name: str, options: dict[str, Any], kind: type[Exception], field: str
) -> None:
    await served.create(name)
    await served.upsert(given("a", np.eye(1, DIM)), pb.Document(id="empty"), name=name)
    asked = {"query": pb.Query(vectors=tensor(np.eye(1, DIM))), **options}
    with pytest.raises(kind) as caught:
        await served("Explain", pb.ExplainRequest(collection=name, **asked))
    assert caught.value.field == field  # type: ignore[attr-defined]
