"""Conversions at retrieval's edge: field values, token matrices, and clocks of other processes."""

from __future__ import annotations

import errno
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from phasemesh.errors import InvalidArgument, PhasemeshError, Unavailable
from phasemesh.index import errors as index_errors
from phasemesh.index.spec import FieldType, FieldValue, Normalize
from phasemesh.retrieval.faults import index_faults, mapped
from phasemesh.retrieval.values import ValueFault, value_from_wire, value_to_wire
from phasemesh.retrieval.vectors import as_float16, conditioned
from phasemesh.retrieval.work import Request
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.v1.common_pb2 import PhaseTiming, Timings


def json_value(value: Any) -> Value:
    """As protobuf's own JSON parser reads it."""
    return json_format.ParseDict(value, Value())


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES: dict[FieldType, st.SearchStrategy[Any]] = {
    FieldType.STRING: TEXT,
    FieldType.INT64: st.integers(-(2**63), 2**63 - 1),
    FieldType.DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    FieldType.BOOL: st.booleans(),
    FieldType.TIMESTAMP: st.datetimes(
        datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)
    ),
    FieldType.STRING_LIST: st.lists(TEXT).map(tuple),
}  # fmt: skip


@given(st.sampled_from(list(VALUES)).flatmap(lambda kind: st.tuples(st.just(kind), VALUES[kind])))
def test_values_come_back_as_they_were(case: tuple[FieldType, FieldValue]) -> None:
    kind, value = case
    wire = value_to_wire(value)
    # Through JSON, as the gateway sends it.
    assert value_from_wire(json_value(json_format.MessageToDict(wire)), kind) == value


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (5, FieldType.INT64, 5),
        ("9223372036854775807", FieldType.INT64, 2**63 - 1),
        (None, FieldType.STRING, None),
        ("2024-05-06T07:08:09+02:00", FieldType.TIMESTAMP, datetime(2024, 5, 6, 5, 8, 9, tzinfo=UTC)),
        (1_000_000, FieldType.TIMESTAMP, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (["a"], FieldType.STRING_LIST, ("a",)),
    ],
)
def test_values_are_read(value: Any, kind: FieldType, expected: FieldValue) -> None:
    assert value_from_wire(json_value(value), kind) == expected


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, FieldType.INT64),
        (1, FieldType.BOOL),
        (1, FieldType.STRING),
        ("1", FieldType.DOUBLE),
        (1.5, FieldType.INT64),
        (2.0**60, FieldType.INT64),
        ("9223372036854775808", FieldType.INT64),
        ("1_0", FieldType.INT64),
        (" 1", FieldType.INT64),
        ("", FieldType.INT64),
        ("-", FieldType.INT64),
        ("2024-05-06T07:08:09", FieldType.TIMESTAMP),
        ("yesterday", FieldType.TIMESTAMP),
        (1e300, FieldType.TIMESTAMP),
        ("0001-01-01T00:00:00+23:00", FieldType.TIMESTAMP),
        (["a", 1], FieldType.STRING_LIST),
        ("a", FieldType.STRING_LIST),
        ({"a": 1}, FieldType.STRING),
    ],
)
def test_values_of_another_type_are_refused(value: Any, kind: FieldType) -> None:
    with pytest.raises(ValueFault):
        value_from_wire(json_value(value), kind)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [FieldType.DOUBLE, FieldType.INT64, FieldType.TIMESTAMP])
def test_numbers_are_finite(number: float, kind: FieldType) -> None:
    with pytest.raises(ValueFault):
        value_from_wire(Value(number_value=number), kind)


def rows(*lengths: float, dtype: Any = np.float32) -> Any:
    return np.array([[length * 0.6, length * 0.8] for length in lengths], dtype)


def test_auto_scales_to_unit_length_and_leaves_unit_rows_alone() -> None:
    given_rows = rows(1.0, 5.0, 1e-20, 1e20)
    scaled = conditioned(given_rows, Normalize.AUTO, "v")
    assert np.allclose(scaled, [[0.6, 0.8]] * 4, rtol=1e-6)
    assert scaled.dtype == np.float32
    random = np.random.default_rng(0).standard_normal((200, 64))
    half = (random / np.linalg.norm(random, axis=1, keepdims=True)).astype(np.float16)
    assert conditioned(half, Normalize.AUTO, "v") is half
    assert conditioned(given_rows, Normalize.AUTO, "v", scale=False) is given_rows


@pytest.mark.parametrize(
    ("matrix", "policy", "reason", "row"),
    [
        (rows(1, float("nan")), Normalize.NEVER, "NOT_FINITE", 1),
        (rows(1, 1, float("inf")), Normalize.AUTO, "NOT_FINITE", 2),
        (rows(1, 0), Normalize.AUTO, "ZERO_VECTOR", 1),
        (rows(0), Normalize.NEVER, "ZERO_VECTOR", 0),
        (rows(1, 1.01), Normalize.REQUIRE, "NOT_UNIT", 1),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(
    matrix: Any, policy: Normalize, reason: str, row: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"vector {row} ") as caught:
        conditioned(matrix, policy, "v")
    assert (caught.value.reason, caught.value.field) == (reason, "v")


@pytest.mark.parametrize("length", [1e6, 1e-9])
def test_rows_that_float16_cannot_hold_are_refused(length: float) -> None:
    with pytest.raises(InvalidArgument, match="vector 1 "):
        as_float16(rows(1, length), "v")


def test_every_failure_of_the_index_has_its_leaf() -> None:
    # Others are the index's own affair, and never leave it.
    kinds = [
        kind
        for kind in vars(index_errors).values()
        if isinstance(kind, type) and kind.__mro__[1] is index_errors.IndexFailure
    ]
    assert kinds
    for kind in kinds:
        assert isinstance(mapped(kind("x")), PhasemeshError), kind
    assert mapped(index_errors.IndexFailure("x")) is None


class Ticks:
    def __init__(self) -> None:
        self.ns = 1000

    def __call__(self) -> int:
        return self.ns


def request_at(ticks: Ticks) -> Request:
    return Request("t", 10.0, PhaseClock(now_ns=ticks, unix_ns=lambda: 5_000), lambda: 4.0)


def told(request: Request) -> list[tuple[str, int, int]]:
    return [(phase.phase, phase.start_offset_ns, phase.duration_ns) for phase in request.timings().phases]


def test_another_clocks_phases_are_put_in_the_middle_of_the_call() -> None:
    ticks = Ticks()
    request = request_at(ticks)
    theirs = Timings(
        total_ns=60,
        phases=[
            PhaseTiming(phase="a", start_offset_ns=10, duration_ns=20),
            PhaseTiming(phase="b", start_offset_ns=30, duration_ns=30),
        ],
    )
    request.note_reply(theirs, 1100, 1200)
    request.clock.note("own", 1200, 1250)
    ticks.ns = 1300
    assert told(request) == [("a", 130, 20), ("b", 150, 30), ("own", 200, 50)]
    assert request.timings().total_ns == 300
    assert request.remaining_s() == 6.0


def test_calls_side_by_side_do_not_overlap() -> None:
    request = request_at(Ticks())
    theirs = Timings(total_ns=100, phases=[PhaseTiming(phase="x", duration_ns=100)])
    request.note_reply(theirs, 1000, 1100)
    request.note_reply(theirs, 1060, 1160)
    assert told(request) == [("x", 0, 100), ("x", 100, 60)]


def test_a_reply_that_claims_more_time_than_passed_stays_within_its_call() -> None:
    request = request_at(Ticks())
    theirs = Timings(total_ns=900, phases=[PhaseTiming(phase="x", start_offset_ns=50, duration_ns=800)])
    request.note_reply(theirs, 1000, 1100)
    assert told(request) == [("x", 50, 50)]


@pytest.mark.parametrize(
    ("cause", "reason", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "STORAGE_FULL", "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "STORAGE_FULL", "is full"),
        # As Lance words it.
        (
            OSError(
                "LanceError(IO): Generic LocalFileSystem error: No space left on device (os error 28), src/x.rs"
            ),
            "STORAGE_FULL",
            "is full",
        ),
        (OSError(errno.EROFS, "Read-only file system"), "STORAGE_FAILED", "can't be written: read-only"),
        (RuntimeError("cannot: Permission denied (os error 13)"), "STORAGE_FAILED", "permission denied"),
        (OSError(errno.EIO, "Input/output error"), "STORAGE_FAILED", "input/output error"),
    ],
)
def test_a_medium_that_refuses_is_named_and_paths_are_not(cause, reason, words):
    with pytest.raises(Unavailable, match=words) as refused, index_faults():
        raise cause
    assert refused.value.reason == reason
    assert refused.value.retryable
    assert "src/" not in str(refused.value)


def test_a_bug_is_not_taken_for_a_failed_medium():
    with pytest.raises(RuntimeError, match="no such thing"), index_faults():
        raise RuntimeError("no such thing")


@pytest.mark.parametrize("number", [2**53, 2**53 + 2, -(2**53), 2.0**60, 1e300])
def test_numbers_that_may_have_been_rounded_are_refused_and_taken_as_text(number: float) -> None:
    # 2**53 + 1 arrives as 2**53.
    with pytest.raises(ValueFault, match="give it as text"):
        value_from_wire(Value(number_value=number), FieldType.INT64)
    assert value_from_wire(Value(number_value=2**53 - 1), FieldType.INT64) == 2**53 - 1
    for exact in (2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1):
        assert value_from_wire(Value(string_value=str(exact)), FieldType.INT64) == exact
        assert value_to_wire(exact) == Value(string_value=str(exact))
