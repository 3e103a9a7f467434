"""Filters in JSON against protobuf's own reading of the same condition."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from phasemesh.gateway.dialects.native.filters import read_filter
from phasemesh.v1 import retrieval_pb2 as pb


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"equals": {"field": "a", "value": 1}}, None),
        ({"equals": {"field": "a", "value": None}}, None),
        ({"equals": {"field": "a", "value": True}}, None),
        ({"in": {"field": "a", "values": ["x", "9223372036854775807", 2.5]}}, None),
        ({"in": {"field": "a", "values": []}}, None),
        ({"range": {"field": "a", "at_least": 1, "below": 2}}, None),
        ({"range": {"field": "a", "at_most": "2024-01-01T00:00:00Z", "above": "a"}}, None),
        ({"exists": {"field": "a"}}, None),
        ({"prefix": {"field": "a", "prefix": ""}}, None),
        ({"id_in": ["x", "y"]}, {"id_in": {"ids": ["x", "y"]}}),
        ({"not": {"exists": {"field": "a"}}}, None),
        (
            {"all": [{"exists": {"field": "a"}}, {"any": [{"not": {"id_in": []}}]}]},
            {
                "all": {
                    "filters": [
                        {"exists": {"field": "a"}},
                        {"any": {"filters": [{"not": {"id_in": {}}}]}},
                    ]
                }
            },
        ),
        ({"equals": {"field": "a", "value": 1}, "any": None}, {"equals": {"field": "a", "value": 1}}),
    ],
)
def test_a_condition_is_read_as_protobuf_reads_it(
    ours: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    assert read_filter(ours) == json_format.ParseDict(theirs or ours, pb.Filter())
