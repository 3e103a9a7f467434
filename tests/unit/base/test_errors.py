"""The two mapping tables, row by row, against the table that the contract publishes."""

import pytest

from phasemesh import errors
from phasemesh.errors import GRPC_CODE, HTTP_STATUS, Code, PhasemeshError, from_code

# name: (google.rpc.Code, HTTP status of google/rpc/code.proto or of the dialects where that differs, retryable)
PUBLISHED = {
    "InvalidArgument": (3, 400, False),
    "PayloadTooLarge": (3, 413, False),
    "Unauthenticated": (16, 401, False),
    "PermissionDenied": (7, 403, False),
    "NotFound": (5, 404, False),
    "AlreadyExists": (6, 409, False),
    "FailedPrecondition": (9, 400, False),
    "Aborted": (10, 409, False),
    "ResourceExhausted": (8, 429, True),
    "Unavailable": (14, 503, True),
    "DeadlineExceeded": (4, 504, False),
    "Cancelled": (1, 499, False),
    "Unimplemented": (12, 501, False),
    "Internal": (13, 500, False),
}


def leaves(kind: type[PhasemeshError] = PhasemeshError) -> set[type[PhasemeshError]]:
    return {kind}.union(*(leaves(child) for child in kind.__subclasses__()))


def test_tables_are_total() -> None:
    tree = {kind for kind in leaves() if kind.__module__ == "phasemesh.errors.tree"}
    assert set(GRPC_CODE) == tree
    assert set(HTTP_STATUS) == tree
    assert {kind.__name__ for kind in tree - {PhasemeshError}} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_row(name: str) -> None:
    error = getattr(errors, name)("what to do")
    assert (int(error.code), error.http_status, error.retryable) == PUBLISHED[name]
    assert error.reason == error.reason.upper()
    assert str(error) == "what to do"


@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip_over_the_code(name: str) -> None:
    sent = getattr(errors, name)("text")
    got = from_code(int(sent.code), sent.message, reason=sent.reason, field="a.b", retry_after_s=2.0)
    assert type(got) is type(sent)
    assert got.reason == sent.reason
    if not isinstance(got, errors.Internal):
        assert (got.field, got.retry_after_s) == ("a.b", 2.0)


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.DATA_LOSS, Code.OUT_OF_RANGE, Code.INTERNAL, 4711])
def test_codes_outside_the_tree_are_internal(code: int) -> None:
    assert type(from_code(code, "peer's text")) is errors.Internal


def test_a_subclass_of_a_leaf_has_the_leaf_s_rows() -> None:
    class QuotaExceeded(errors.ResourceExhausted):
        """A quota, one day."""

    assert (QuotaExceeded("x").code, QuotaExceeded("x").http_status) == (Code.RESOURCE_EXHAUSTED, 429)


def test_internal_keeps_the_cause_out() -> None:
    error = errors.Internal()
    assert error.error_id in error.message
    assert errors.Internal().error_id != error.error_id
