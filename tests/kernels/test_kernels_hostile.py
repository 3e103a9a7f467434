"""Arguments that cannot be used are refused by name and never read beyond."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import brute

pk = pytest.importorskip(
    "phasemesh_kernels", reason="phasemesh-kernels isn't installed (pip install ./workers/kernels)"
)

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((3, 32), dtype=np.float32)
CODES = RNG.integers(0, 256, (10, 32), np.uint8)
TOKENS = brute.unit(RNG.standard_normal((10, 32)))
OFFSETS = np.array([0, 4, 4, 10])
SCALES = np.ones(10, np.float32)
FAR = [-(2**63), -(2**63) + 1, -1, 2**31, 2**32, 2**62, 2**63 - 1]


def with_element(array: brute.Array, index: Any, value: float) -> brute.Array:
    array = array.copy()
    array[index] = value
    return array


def unaligned(array: brute.Array) -> brute.Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[:] = array
    return moved


MAXSIM: list[tuple[str, Any]] = [
    ("query", None),
    ("query", [[1.0] * 32]),
    ("query", QUERY[0]),
    ("query", QUERY[None]),
    ("query", QUERY[:0]),
    ("query", QUERY[:, :16]),
    ("query", QUERY[:, :0]),
    ("query", np.ones((4097, 32), np.float32)),
    ("query", np.ones((3, 32), np.int8)),
    ("query", np.ones((3, 32), np.complex64)),
    ("query", np.ones((3, 32), object)),
    ("query", with_element(QUERY, (2, 31), np.nan)),
    ("query", with_element(QUERY, (0, 0), np.inf)),
    ("query", with_element(QUERY.astype(np.float64), (1, 1), 1e300)),
    ("codes", None),
    ("codes", CODES.tobytes()),
    ("codes", CODES.tolist()),
    ("codes", CODES[0]),
    ("codes", CODES[None]),
    ("codes", CODES[:, :16]),
    ("codes", CODES[::2]),
    ("codes", CODES[::-1]),
    ("codes", np.asfortranarray(CODES)),
    ("codes", np.broadcast_to(CODES[:1], CODES.shape)),
    ("codes", CODES.astype(np.int8)),
    ("codes", CODES.astype(np.uint16)),
    ("codes", CODES.astype(np.float32)),
    ("codes", np.zeros((10, 0), np.uint8)),
    ("codes", np.zeros((10, 24), np.uint8)),
    ("codes", np.zeros((1, 4112), np.uint8)),
    ("codes", np.zeros((10, 32), object)),
    ("offsets", None),
    ("offsets", 5),
    ("offsets", []),
    ("offsets", np.zeros(0, np.int64)),
    ("offsets", OFFSETS[None]),
    ("offsets", OFFSETS.astype(np.float64)),
    ("offsets", ["0", "4"]),
    ("offsets", [0, 2**70]),
    ("offsets", [0, None]),
    ("offsets", [True, True]),
    ("offsets", [0, 4, 3, 10]),
    ("offsets", [0, 4, 4, 11]),
    ("offsets", [-1, 4, 4, 10]),
    ("offsets", [0, 20, 4, 10]),
    ("offsets", [0, -(2**63), 2**63 - 1, 10]),
    ("offsets", np.array([0, 2**64 - 1], np.uint64)),
    ("offsets", np.array([0, 2**63], np.uint64)),
    ("codec", "int9"),
    ("codec", "INT8"),
    ("codec", ""),
    ("codec", 8),
    ("codec", None),
    ("codec", b"int8"),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", "1"),
    ("seed", None),
    ("scales", 1.0),
    ("scales", SCALES[:9]),
    ("scales", SCALES[None]),
    ("scales", SCALES.astype(np.float64)),
    ("scales", np.ones(20, np.float32)[::2]),
    ("scales", with_element(SCALES, 9, np.nan)),
    ("scales", with_element(SCALES, 0, np.inf)),
    ("scales", with_element(SCALES, 0, -1.0)),
    ("scales", unaligned(SCALES)),
    ("select", 1),
    ("select", "all"),
    ("select", b"\x00"),
    ("select", object()),
    ("select", slice(0, 3, 2)),
    ("select", slice(2, 1)),
    ("select", slice(-1, 3)),
    ("select", slice(0, 4)),
    ("select", slice(0, 2**70)),
    ("select", slice(0.0, 1)),
    ("select", [3]),
    ("select", [-1]),
    ("select", [0, 2**63 - 1]),
    ("select", [0, 2**64]),
    ("select", [0.0]),
    ("select", [[0]]),
    ("select", [True, False, True]),
    ("select", np.array([2**64 - 1], np.uint64)),
    ("select", np.ones(2, bool)),
    ("select", np.ones(4, bool)),
    ("select", np.ones((3, 1), bool)),
    ("select", np.zeros(3, np.float32)),
    ("threads", 0),
    ("threads", -1),
    ("threads", 2**31),
    ("threads", 2**70),
    ("threads", 1.5),
    ("threads", "2"),
    ("threads", None),
    ("threads", True),
    ("cancel", True),
    ("cancel", threading.Event()),
    ("checkpoint", 1),
    ("isa", "sse9"),
    ("isa", ""),
    ("isa", 3),
]


def ids(rows: list[tuple[str, Any]]) -> list[str]:
    return [f"{name}-{i}" for i, (name, _) in enumerate(rows)]


def topk(query: Any, codes: Any, offsets: Any, **options: Any) -> object:
    return pk.maxsim_topk(query, codes, offsets, 2, **options)


def multi(query: Any, codes: Any, offsets: Any, **options: Any) -> object:
    return pk.maxsim_multi([query], codes, offsets, **options)


@pytest.mark.parametrize("function", [pk.maxsim, topk, multi])
@pytest.mark.parametrize(("name", "value"), MAXSIM, ids=ids(MAXSIM))
def test_an_argument_of_maxsim_is_refused_by_name(
    function: Callable[..., object], name: str, value: Any
) -> None:
    arguments = {"query": QUERY, "codes": CODES, "offsets": OFFSETS, "codec": "int8", name: value}
    query = arguments.pop("query")
    codes, offsets = arguments.pop("codes"), arguments.pop("offsets")
    # A query and codes that don't fit each other: either may be named.
    names = r"(query|queries\[0\]|codes)" if name in ("query", "codes") else name
    with pytest.raises((ValueError, TypeError), match=rf"^{names}: "):
        function(query, codes, offsets, **arguments)


@pytest.mark.parametrize("k", [0, -1, -(2**63), 2**63, 2**70, 1.0, "3", None, True])
def test_k_is_refused_by_name(k: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^k: "):
        pk.maxsim_topk(QUERY, CODES, OFFSETS, k, "int8")


def test_the_largest_k_is_accepted() -> None:
    assert pk.maxsim_topk(QUERY, CODES, OFFSETS, 2**63 - 1, "int8")[0].shape == (2,)


@pytest.mark.parametrize(
    "queries", [[], None, 5, QUERY[0], [QUERY, None], [QUERY, QUERY[:, :16]], [QUERY, QUERY[:0]]]
)
def test_queries_are_refused_by_name(queries: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^queries(\[\d\])?: "):
        pk.maxsim_multi(queries, CODES, OFFSETS, "int8")


def test_scales_are_refused_where_the_codec_has_none() -> None:
    with pytest.raises(ValueError, match=r"^scales: "):
        pk.maxsim(QUERY, TOKENS, OFFSETS, scales=SCALES)
    with pytest.raises(ValueError, match=r"^scales: "):
        pk.decode(TOKENS, scales=SCALES)
    with pytest.raises(ValueError, match=r"^scales: "):
        pk.encode(TOKENS, "f16", scales=True)


ENCODE: list[tuple[str, Any]] = [
    ("tokens", None),
    ("tokens", TOKENS.tolist()),
    ("tokens", TOKENS[0]),
    ("tokens", TOKENS[None]),
    ("tokens", TOKENS[::2]),
    ("tokens", np.asfortranarray(TOKENS)),
    ("tokens", np.ones((3, 24), np.float32)),
    ("tokens", np.ones((3, 0), np.float32)),
    ("tokens", np.ones((1, 4112), np.float32)),
    ("tokens", np.ones((3, 32), np.int32)),
    ("tokens", np.ones((3, 32), np.longdouble)),
    ("tokens", TOKENS.astype(">f4")),
    ("tokens", unaligned(TOKENS)),
    ("codec", "int9"),
    ("codec", None),
    ("offsets", []),
    ("offsets", [0, 11]),
    ("offsets", [-1, 10]),
    ("offsets", [0, 5, 4, 10]),
    ("offsets", [0.0, 10.0]),
    ("seed", -1),
    ("seed", 2**64),
    ("scales", "yes"),
    ("scales", 2),
    ("refused", "ignore"),
    ("refused", None),
    ("threads", 0),
    ("threads", 2**31),
    ("isa", "sse9"),
]


@pytest.mark.parametrize(("name", "value"), ENCODE, ids=ids(ENCODE))
def test_an_argument_of_encode_is_refused_by_name(name: str, value: Any) -> None:
    arguments = {"tokens": TOKENS, name: value}
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        pk.encode(arguments.pop("tokens"), **arguments)


DECODE = [row for row in MAXSIM if row[0] in ("codes", "codec", "seed", "threads")]
DECODE += [
    row
    for row in MAXSIM
    if row[0] == "scales" and not (isinstance(row[1], np.ndarray) and row[1].shape == (10,))
]


@pytest.mark.parametrize(("name", "value"), DECODE, ids=ids(DECODE))
def test_an_argument_of_decode_is_refused_by_name(name: str, value: Any) -> None:
    arguments = {"codes": CODES, "codec": "int8", name: value}
    codes = arguments.pop("codes")
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        pk.decode(codes, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("array", {"array": [1, 2]}),
        ("array", {"array": np.zeros((4, 4))[:, ::2]}),
        ("array", {"array": np.zeros(3, object)}),
        ("threads", {"threads": 0}),
        ("threads", {"threads": 2**31}),
        ("repeats", {"repeats": 0}),
        ("repeats", {"repeats": 1.5}),
    ],
)
def test_an_argument_of_read_bandwidth_is_refused_by_name(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        pk.read_bandwidth(**{"array": np.zeros(1000), **arguments})


integer = st.one_of(st.sampled_from(FAR), st.integers(-12, 12), st.integers(-(2**63), 2**63 - 1))


@settings(deadline=None, max_examples=200)
@given(
    offsets=st.lists(integer, min_size=1, max_size=6),
    select=st.one_of(
        st.none(),
        st.lists(integer, max_size=4),
        st.tuples(integer, integer),
        st.tuples(st.integers(0, 3), st.integers(0, 5)),
    ),
    argmax=st.booleans(),
)
def test_hostile_offsets_and_selections_are_refused_or_right(
    offsets: list[int], select: Any, argmax: bool
) -> None:
    documents = len(offsets) - 1
    chosen: list[int] | None = list(range(documents))
    if isinstance(select, tuple):
        chosen = list(range(*select)) if 0 <= select[0] <= select[1] <= documents else None
        select = slice(*select)
    elif select is not None:
        chosen = select if all(0 <= number < documents for number in select) else None
    # Only what is scored is looked at.
    sound = chosen is not None and all(0 <= offsets[i] <= offsets[i + 1] <= 10 for i in chosen)
    arguments = {"codec": "int8", "select": select, "argmax": argmax}
    if sound and chosen is not None:
        found = pk.maxsim(QUERY, CODES, offsets, **arguments)
        scores = found[0] if argmax else found
        wanted = [brute.maxsim(QUERY, CODES, np.array(offsets[i : i + 2]), "int8")[0][0] for i in chosen]
        np.testing.assert_array_equal(scores, np.array(wanted, np.float32))
    else:
        with pytest.raises(ValueError, match=r"^(offsets|select): "):
            pk.maxsim(QUERY, CODES, offsets, **arguments)


@pytest.mark.parametrize("codec", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_document_that_is_not_finite_is_named(codec: str, bad: float, isas: list[str]) -> None:
    for token in (4, 6, 9):
        codes = brute.encode(with_element(TOKENS, (token, 31), bad), codec)
        for isa in isas:
            with pytest.raises(ValueError, match=r"^codes: document 2 "):
                pk.maxsim(QUERY, codes, OFFSETS, codec, isa=isa)
            assert np.isfinite(pk.maxsim(QUERY, codes, OFFSETS, codec, isa=isa, select=[0])).all()


def test_scores_beyond_float32_are_refused(isas: list[str]) -> None:
    for isa in isas:
        for codes, codec in ((np.full((10, 32), 3e38, np.float32), "f32"), (CODES, "int8")):
            with pytest.raises(ValueError, match=r"^codes: document 0 "):
                pk.maxsim(np.full((3, 32), 3e38, np.float32), codes, OFFSETS, codec, isa=isa)


@pytest.mark.parametrize("codec", ["bf16", "f32"])
@pytest.mark.parametrize("argmax", [False, True])
def test_sums_that_overflow_on_the_way_are_refused_alike_by_every_path(
    codec: str, argmax: bool, isas: list[str]
) -> None:
    # inf - inf on one path, the true sum of zero on another.
    tokens = np.ones((3, 32), np.float32)
    tokens[1, :16], tokens[1, 16:] = 3e38, -3e38
    codes = brute.encode(tokens, codec)
    query = np.full((2, 32), 4, np.float32)
    offsets = np.array([0, 1, 3])
    for isa in isas:
        with pytest.raises(ValueError, match=r"^codes: document 1 has no finite score"):
            pk.maxsim(query, codes, offsets, codec, isa=isa, argmax=argmax)
        assert pk.maxsim(query, codes, offsets, codec, isa=isa, select=[0]).tolist() == [256.0]
