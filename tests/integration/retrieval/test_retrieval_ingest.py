"""Writes and reads by id: what is stored, what fails alone, and what becomes of texts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from phasemesh.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_FLOAT16, Truncation
from tests.unit.retrieval.material import (
    FIELDS,
    GOOD_QUERY,
    get_request,
    hits,
    rounded,
    struct,
    unit_rows,
)
from tests.unit.retrieval.stack import (
    DIM,
    MODEL,
    Stack,
    given,
    maxsim,
    ranking,
    stack,
    tensor,
    text_matrix,
)


async def test_a_document_that_fails_fails_alone(served: Stack, name: str) -> None:
    await served.create(name, fields=FIELDS, dense_dimension=4)
    rng = np.random.default_rng(5)
    good = unit_rows(rng, 3)
    spoiled, infinite, zero = (good.astype(np.float32) for _ in range(3))
    spoiled[1, 2], infinite[2, 0], zero[1] = np.nan, np.inf, 0
    documents = [
        given("good", good, fields=struct(lang="de", year=2020, tags=["x", "y"])),
        given("nan", spoiled),
        given("inf", infinite),
        given("zero", zero),
        given("dim", np.ones((2, DIM + 1), np.float32)),
        given("undeclared", good, fields=struct(color="red")),
        given("type", good, fields=struct(year="no number")),
        given("i" * 513, good),
        given("", good),
        given("no-model", good[:0]),
        pb.Document(id="text", text="some text"),
        given("dense", good, dense_vector=tensor(np.ones(3, np.float32))),
        pb.Document(id="blank", text=" "),
        pb.Document(id="chunks", token_vectors=pb.TokenMatrix(vectors=tensor(good), chunk_offsets=[2, 2])),
        pb.Document(id="spans", token_vectors=pb.TokenMatrix(vectors=tensor(good), span_starts=[1])),
        given("last", good[:1]),
    ]
    reply = await served.upsert(*documents, name=name)
    assert [status.id for status in reply.documents] == [document.id for document in documents]
    faults = {
        status.id[:10]: (status.error.reason, status.error.field)
        for status in reply.documents
        if status.HasField("error")
    }
    assert faults == {
        "nan": ("NOT_FINITE", "documents[1].token_vectors.vectors"),
        "inf": ("NOT_FINITE", "documents[2].token_vectors.vectors"),
        "zero": ("ZERO_VECTOR", "documents[3].token_vectors.vectors"),
        "dim": ("DIMENSION_MISMATCH", "documents[4].token_vectors.vectors.shape"),
        "undeclared": ("INVALID_FIELD", "documents[5].fields"),
        "type": ("INVALID_FIELD", "documents[6].fields"),
        "iiiiiiiiii": ("INVALID_ID", "documents[7].id"),
        "": ("INVALID_ID", "documents[8].id"),
        "text": ("NO_MODEL", "documents[10].text"),
        "dense": ("DIMENSION_MISMATCH", "documents[11].dense_vector.shape"),
        "chunks": ("INVALID_CHUNKS", "documents[13].token_vectors.chunk_offsets"),
        "spans": ("INVALID_SPANS", "documents[14].token_vectors.span_starts"),
    }
    assert reply.stored == 4
    assert {hit.id for hit in (await served.search(good, 10, name=name)).hits} == {"good", "last"}
    counted = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
    assert counted.documents == 4


async def test_nothing_good_commits_nothing(served: Stack, name: str) -> None:
    made = await served.create(name)
    reply = await served.upsert(given("", np.ones((1, DIM), np.float32)), name=name)
    assert reply.stored == 0
    assert reply.version == made.version


async def test_of_one_id_the_last_counts(served: Stack, name: str) -> None:
    await served.create(name)
    rng = np.random.default_rng(6)
    old, new = unit_rows(rng, 2), unit_rows(rng, 4)
    spoiled = np.full((1, DIM), np.nan, np.float32)
    reply = await served.upsert(
        given("c", spoiled), given("a", old), given("b", old), given("a", new), given("b", spoiled), name=name
    )
    assert (reply.stored, reply.superseded) == (2, 1)
    assert [status.superseded for status in reply.documents] == [False, True, False, False, False]
    assert [status.tokens for status in reply.documents] == [0, 0, 2, 4, 0]
    assert hits(await served.search(new, 9, name=name)) == rounded(ranking(new, {"a": new, "b": old}, 9))


async def test_upsert_again_gives_one_row_the_newest(served: Stack, name: str) -> None:
    await served.create(name)
    rng = np.random.default_rng(8)
    old, new = unit_rows(rng, 3), unit_rows(rng, 3)
    first = (await served.upsert(given("a", old), name=name)).version
    second = (await served.upsert(given("a", new), name=name)).version
    assert second.incarnation == first.incarnation
    assert second.number > first.number
    assert hits(await served.search(old, 9, name=name)) == rounded(ranking(old, {"a": new}, 9))
    before = await served.search(old, 9, name=name, version=pb.ReadVersion(at_version=first))
    assert hits(before) == rounded(ranking(old, {"a": old}, 9))
    assert before.version == first


async def test_deletion_leaves_the_others_bit_for_bit(served: Stack, name: str) -> None:
    await served.create(name)
    stored = {key: unit_rows(np.random.default_rng(ord(key)), 4) for key in "abc"}
    written = await served.upsert(*(given(key, matrix) for key, matrix in stored.items()), name=name)
    query = unit_rows(np.random.default_rng(4), 3)
    before = await served.search(query, 3, name=name)
    request = pb.DeleteDocumentsRequest(collection=name, ids=["b", "never", "b", "nor"])
    deleted = await served("DeleteDocuments", request)
    assert (deleted.deleted, list(deleted.missing_ids)) == (1, ["never", "nor"])
    after = await served.search(query, 3, name=name)
    assert hits(after) == [hit for hit in hits(before) if hit[0] != "b"]
    assert after.version == deleted.version
    old = await served.search(query, 3, name=name, version=pb.ReadVersion(at_version=written.version))
    assert hits(old) == hits(before)


async def test_get_documents_projects_in_the_requests_order(served: Stack, name: str) -> None:
    await served.create(name, fields=FIELDS, dense_dimension=3)
    matrix = unit_rows(np.random.default_rng(2), 3)
    fields = struct(lang="de", year=2**40, tags=["a", "b"], seen="2024-05-06T07:08:09.5+02:00")
    await served.upsert(
        given("a", matrix, text="words", fields=fields, dense_vector=tensor(np.arange(3, dtype=np.float32))),
        given("b", matrix[:0]),
        name=name,
    )
    bare = pb.GetDocumentsRequest(collection=name, ids=["b", "nobody", "a", "b"])
    reply = await served("GetDocuments", bare)
    assert [document.id for document in reply.documents] == ["b", "a", "b"]
    assert list(reply.missing_ids) == ["nobody"]
    whole = reply.documents[1]
    assert whole.text == "words"
    assert whole.fields["year"] == 2**40
    assert list(whole.fields["tags"]) == ["a", "b"]
    assert whole.fields["seen"] == "2024-05-06T05:08:09.500000Z"
    assert not whole.HasField("token_vectors")
    projection = pb.Projection(
        fields=["lang"], token_vectors=True, dense_vector=True, encoding=VECTOR_ENCODING_FLOAT16
    )
    part = (await served("GetDocuments", get_request(name, ["a"], projection=projection))).documents[0]
    assert not part.HasField("text")
    assert dict(part.fields) == {"lang": "de"}
    assert np.array_equal(decode_tensor(part.token_vectors.vectors, field="v"), matrix)
    assert decode_tensor(part.dense_vector, field="d").tolist() == [0, 1, 2]
    # What was read can be stored again, and nothing of it changes.
    await served.upsert(part, name=name)
    again = (await served("GetDocuments", get_request(name, ["a"], projection=projection))).documents[0]
    assert again == part


async def test_writers_at_once_see_what_they_were_told_is_stored(served: Stack, name: str) -> None:
    await served.create(name)

    async def write(writer: int) -> None:
        for turn in range(4):
            matrix = unit_rows(np.random.default_rng(writer * 10 + turn), 2)
            key = f"w{writer}" if turn % 2 else "shared"
            reply = await served.upsert(given(key, matrix), name=name)
            found = await served.search(
                matrix, 100, name=name, version=pb.ReadVersion(at_version=reply.version)
            )
            (score,) = (hit.score for hit in found.hits if hit.id == key)
            # Of writers of one id at the same moment, any may be the last.
            assert key == "shared" or score == pytest.approx(maxsim(matrix, matrix), rel=1e-6)
            seen = await served.search(matrix, 100, name=name)
            assert seen.version.number >= reply.version.number

    await asyncio.gather(*(write(writer) for writer in range(6)))
    assert sorted(key for key, _ in hits(await served.search(GOOD_QUERY, 100, name=name))) == [
        "shared",
        *(f"w{writer}" for writer in range(6)),
    ]


async def test_texts_go_out_in_batches_and_faults_stay_their_own(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1, retrieval__encode_batch=3) as served:
        await served.create(model=MODEL)
        texts = ["one", "two", "w " * 20, "four", "x " * 20, "y " * 20, "z " * 20, "eight"]
        reply = await served.upsert(*(pb.Document(id=f"{i}", text=text) for i, text in enumerate(texts)))
        failed = {status.id: status.error for status in reply.documents if status.HasField("error")}
        assert set(failed) == {"2", "4", "5", "6"}
        for key, error in failed.items():
            assert (error.reason, error.field) == ("INPUT_TOO_LONG", f"documents[{key}].text")
            assert error.message.startswith(f"documents[{key}].text")
        assert reply.stored == 4
        assert max(len(call.inputs) for call in served.encoder.calls) == 3
        cut = await served.upsert(pb.Document(id="long", text="w " * 20), truncation=Truncation(enabled=True))
        assert (cut.documents[0].truncated, cut.documents[0].tokens) == (True, 12)
        assert (cut.usage.tokens, cut.usage.truncated_inputs) == (12, 1)


async def test_every_text_failing_is_no_failure_of_the_batch(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL)
    reply = await served.upsert(
        *(pb.Document(id=f"{i}", text="w " * 20) for i in range(5)),
        given("given", np.eye(2, DIM, dtype=np.float32)),
        name=name,
    )
    assert [status.error.reason for status in reply.documents] == ["INPUT_TOO_LONG"] * 5 + [""]
    assert reply.stored == 1


async def test_a_models_vectors_meet_the_policy_too(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL, normalize=pb.NORMALIZE_POLICY_REQUIRE)
    served.encoder.factors = {"loud": 3.0, "broken": np.nan}
    try:
        reply = await served.upsert(
            *(pb.Document(id=text, text=text) for text in ("loud", "quiet", "broken")), name=name
        )
        with pytest.raises(InvalidArgument) as caught:
            await served.search("loud", name=name)
    finally:
        served.encoder.factors = {}
    assert [status.error.reason for status in reply.documents] == ["NOT_UNIT", "", "NOT_FINITE"]
    assert reply.documents[0].error.field == "documents[0].text"
    assert (caught.value.reason, caught.value.field) == ("NOT_UNIT", "query.text")


async def test_a_reply_that_would_be_too_large_is_asked_for_in_parts(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL)
    served.encoder.reply_limit = 3 * 3 * DIM * 2
    try:
        reply = await served.upsert(*(pb.Document(id=f"{i}", text="two words") for i in range(10)), name=name)
    finally:
        served.encoder.reply_limit = None
    assert reply.stored == 10


async def test_calls_are_cut_by_the_predicted_size_of_their_reply(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1, rpc__max_message_bytes=8192) as served:
        await served.create(model=MODEL)
        reply = await served.upsert(*(pb.Document(id=f"{i}", text="two words") for i in range(40)))
        assert reply.stored == 40
        # 12 tokens of 2 * DIM + 15 bytes at most, beside 64: 628 bytes a text.
        assert max(len(call.inputs) for call in served.encoder.calls) == int(8192 * 0.9) // 628


async def test_an_encoder_that_refuses_or_is_down_stores_nothing(served: Stack, name: str) -> None:
    made = await served.create(name, model=MODEL)
    served.encoder.failures.append(ResourceExhausted("busy", reason="QUEUE_FULL", retry_after_s=2.5))
    with pytest.raises(ResourceExhausted) as caught:
        await served.upsert(pb.Document(id="a", text="word"), name=name)
    assert caught.value.retry_after_s == 2.5
    counted = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
    assert (counted.documents, counted.version) == (0, made.version)
    served.encoder.failures.extend([Unavailable("down")] * 20)
    with pytest.raises(Unavailable):
        await served.search("word", name=name)
    served.encoder.failures.clear()
    # One of many that comes back in time isn't even seen.
    served.encoder.failures.append(Unavailable("down"))
    assert (await served.upsert(pb.Document(id="a", text="word"), name=name)).stored == 1


async def test_another_recipe_under_the_models_name_is_refused(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1) as served:
        await served.create(model=MODEL)
        await served.upsert(pb.Document(id="a", text="word"))
        # Reloaded since the directory's last look: only the reply tells.
        served.encoder.recipe_hash = "e" * 32
        with pytest.raises(FailedPrecondition) as caught:
            await served.search("word")
        assert caught.value.reason == "RECIPE_MISMATCH"
        with pytest.raises(FailedPrecondition) as caught:
            await served.upsert(pb.Document(id="b", text="word"))
        assert caught.value.reason == "RECIPE_MISMATCH"
        served.encoder.listed_hash = "e" * 32
        await served.directory.refresh()
        served.encoder.calls.clear()
        with pytest.raises(FailedPrecondition) as caught:
            await served.search("word")
        assert caught.value.reason == "RECIPE_MISMATCH"
        assert not served.encoder.calls  # known beforehand, so nobody is asked
        # Vectors need no model.
        assert [hit.id for hit in (await served.search(text_matrix("word", "D"))).hits] == ["a"]


async def test_given_vectors_need_no_encoder(tmp_path: Path) -> None:
    async with stack(tmp_path, scorers=1, encoders=False) as served:
        await served.create()
        matrix = unit_rows(np.random.default_rng(1), 2)
        await served.upsert(given("a", matrix))
        assert [hit.id for hit in (await served.search(matrix)).hits] == ["a"]
        with pytest.raises(FailedPrecondition) as caught:
            await served.create("m", model=MODEL)
        assert caught.value.reason == "NO_ENCODER"


@pytest.mark.parametrize("policy", ["AUTO", "NEVER", "REQUIRE"])
async def test_normalize_policies(served: Stack, name: str, policy: str) -> None:
    await served.create(name, normalize=getattr(pb, f"NORMALIZE_POLICY_{policy}"))
    rng = np.random.default_rng(21)
    long, unit = 3 * unit_rows(rng, 3).astype(np.float32), unit_rows(rng, 2)
    reply = await served.upsert(given("long", long), given("unit", unit), name=name)
    documents = (await served("GetDocuments", get_request(name, ["long", "unit"]))).documents
    read = {document.id: decode_tensor(document.token_vectors.vectors, field="v") for document in documents}
    assert np.array_equal(read["unit"], unit)
    match policy:
        case "AUTO":
            assert np.allclose(read["long"], long / np.linalg.norm(long, axis=1, keepdims=True), atol=5e-4)
        case "NEVER":
            assert np.array_equal(read["long"], long.astype(np.float16))
        case "REQUIRE":
            assert reply.documents[0].error.reason == "NOT_UNIT"
            assert "long" not in read
    if policy == "REQUIRE":
        with pytest.raises(InvalidArgument, match="unit"):
            await served.search(long, name=name)
    else:
        query = long / (np.linalg.norm(long, axis=1, keepdims=True) if policy == "AUTO" else 1)
        found = hits(await served.search(long, name=name))
        expected = ranking(query, read, 9)
        assert [key for key, _ in found] == [key for key, _ in expected]
        assert np.allclose([score for _, score in found], [score for _, score in expected], rtol=1e-6)


async def test_a_request_that_one_commit_cannot_hold_stores_nothing(served: Stack, name: str) -> None:
    await served.create(name)
    rows = unit_rows(np.random.default_rng(1), 2)
    ingest = served.runtime.servicer._ingest
    limit, ingest._max_tokens = ingest._max_tokens, 5
    try:
        with pytest.raises(InvalidArgument, match="fewer documents") as refused:
            await served.upsert(*(given(key, rows) for key in "abc"), name=name)
        assert (refused.value.reason, refused.value.field) == ("TOO_MANY_TOKENS", "documents")
        count = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
        assert count.documents == 0
        await served.upsert(given("long", unit_rows(np.random.default_rng(1), 9)), name=name)  # alone it may
        await served.upsert(*(given(key, rows) for key in "ab"), name=name)
    finally:
        ingest._max_tokens = limit
    assert limit == 2_000_000
