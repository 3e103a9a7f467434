"""Pure parts of `index`, `search` and `explain`: filters by declared type, counts, texts."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Value

from phasemesh.cli.banner import token_model
from phasemesh.cli.collection_commands import Indexed, retrieval_target, snippet
from phasemesh.cli.collection_values import declared_fields, filter_of
from phasemesh.cli.explain_command import rows
from phasemesh.config.settings import SettingsError, load_settings
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2
from phasemesh.v1 import retrieval_pb2 as pb

DECLARED = [
    pb.FieldDeclaration(name="path", type=pb.FIELD_TYPE_STRING),
    pb.FieldDeclaration(name="year", type=pb.FIELD_TYPE_INT64),
    pb.FieldDeclaration(name="size", type=pb.FIELD_TYPE_DOUBLE),
    pb.FieldDeclaration(name="draft", type=pb.FIELD_TYPE_BOOL),
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("path=a=b.md", Value(string_value="a=b.md")),
        ("path=", Value(string_value="")),
        ("year=9007199254740993", Value(string_value="9007199254740993")),  # exact, as no double is
        ("size=1.5", Value(number_value=1.5)),
        ("draft=false", Value(bool_value=False)),
    ],
)
def test_filters_follow_the_declared_type(text: str, value: Value) -> None:
    condition = filter_of(text, DECLARED)
    assert condition.equals.field == text.split("=")[0]
    assert condition.equals.value == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path", "has to be FIELD=VALUE"),
        ("=x", "has to be FIELD=VALUE"),
        ("author=x", "the collection has no field 'author'; declared are path, year, size, draft"),
        ("draft=yes", "the field takes true or false"),
        ("size=big", "the field takes a number"),
    ],
)
def test_bad_filters(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        filter_of(text, DECLARED)


def test_only_declared_values_are_sent() -> None:
    values = {"path": "a", "year": 2000, "author": "x", "size": None}
    assert MessageToDict(declared_fields(values, DECLARED)) == {"path": "a", "year": 2000}


def test_counts_and_summary() -> None:
    done = Indexed()
    failed = pb.DocumentStatus(id="b", error=common.ItemError(code=3, message="too long"))
    done.add(
        pb.UpsertDocumentsResponse(
            documents=[pb.DocumentStatus(id="a", truncated=True), failed],
            stored=1,
            usage=common.Usage(tokens=7),
        )
    )
    done.add(pb.UpsertDocumentsResponse(documents=[failed] * 9))
    assert (done.stored, done.failed, done.truncated, len(done.failures)) == (1, 10, 1, 5)
    assert done.failures[0] == "b: too long"
    assert done.summary(2.0) == (
        "1 documents in 2.0 s (0 docs/s), 7 tokens, 1 cut to fit the model, 10 refused"
    )


def test_snippets_are_one_line() -> None:
    assert snippet("a\n b\tc") == "a b c"
    assert snippet("word " * 99, 12) == "word word w…"


def test_the_target_is_the_reported_one_or_an_error(tmp_path) -> None:  # type: ignore[no-untyped-def]  # a path
    settings = load_settings(flags={"runtime_dir": str(tmp_path)})
    assert retrieval_target(settings, "host:1") == "host:1"
    with pytest.raises(SettingsError, match="no retrieval service has reported"):
        retrieval_target(settings, None)


def test_a_late_interaction_model_is_preferred() -> None:
    dense = encoder_pb2.ModelInfo(name="dense", vector_kinds=[encoder_pb2.VECTOR_KIND_DENSE])
    both = encoder_pb2.ModelInfo(
        name="both", vector_kinds=[encoder_pb2.VECTOR_KIND_DENSE, encoder_pb2.VECTOR_KIND_TOKEN]
    )
    late = encoder_pb2.ModelInfo(
        name="late",
        vector_kinds=[encoder_pb2.VECTOR_KIND_TOKEN],
        score_types=[common.SCORE_TYPE_LATE_INTERACTION],
    )
    assert token_model([dense]) is None
    assert token_model([dense, both]) is both
    assert token_model([dense, both, late]) is late


def test_matched_words_are_shown_with_what_stands_around_them() -> None:
    query, text = "boils water", "so the\nwäter boils at last"
    begin = text.index("boils")
    reply = pb.ExplainResponse(
        alignments=[
            pb.TokenAlignment(
                query_token=0, query_span_start=0, query_span_end=0, document_token=0,
                document_span_start=0, document_span_end=0, similarity=0.1,
            ),
            pb.TokenAlignment(
                query_token=1, query_span_start=0, query_span_end=5, document_token=4,
                document_span_start=begin, document_span_end=begin + 5, similarity=0.9,
            ),
            pb.TokenAlignment(query_token=2, document_token=7, similarity=-0.5),
        ]
    )  # fmt: skip
    shown = rows(reply, query, text)
    assert [(row["query"], row["document"]) for row in shown] == [
        ("[0]", "[0]"),
        ("boils", "boils"),
        ("[2]", "[7]"),
    ]
    assert (shown[1]["before"], shown[1]["after"]) == ("so the wäter ", " at last")
