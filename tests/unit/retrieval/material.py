"""Collections, queries and documents that tests of retrieval share."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct
from numpy.typing import NDArray

from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_FLOAT16
from tests.unit.retrieval.stack import (
    DIM,
    Stack,
    given,
    ranking,
)

FIELDS = [
    pb.FieldDeclaration(name="lang", type=pb.FIELD_TYPE_STRING),
    pb.FieldDeclaration(name="year", type=pb.FIELD_TYPE_INT64),
    pb.FieldDeclaration(name="tags", type=pb.FIELD_TYPE_STRING_LIST),
    pb.FieldDeclaration(name="seen", type=pb.FIELD_TYPE_TIMESTAMP),
]


def struct(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made


def equals(field: str, value: Any) -> pb.Filter:
    return pb.Filter(equals=pb.FieldEquals(field=field, value=struct(v=value).fields["v"]))


def unit_rows(rng: np.random.Generator, rows: int) -> NDArray[np.float16]:
    matrix = rng.standard_normal((rows, DIM))
    unit: NDArray[np.float16] = (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float16)
    return unit


def hits(reply: pb.SearchResponse) -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in reply.hits]


def rounded(expected: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """As the wire has them: float32."""
    return [(name, float(np.float32(score))) for name, score in expected]


def corpus(seed: int, count: int) -> dict[str, NDArray[np.float16]]:
    """Ragged documents: some empty, some equal, some opposite to others."""
    rng = np.random.default_rng(seed)
    stored: dict[str, NDArray[np.float16]] = {}
    for index in range(count):
        match index % 7:
            case 3:
                matrix = np.zeros((0, DIM), np.float16)
            case 5:
                matrix = stored[f"d{index - 1:03}"]
            case 6:
                matrix = -stored[f"d{index - 2:03}"]
            case _:
                matrix = unit_rows(rng, int(rng.integers(1, 12)))
        stored[f"d{index:03}"] = matrix
    return stored


def get_request(name: str, ids: list[str], **options: Any) -> pb.GetDocumentsRequest:
    projection = pb.Projection(token_vectors=True, encoding=VECTOR_ENCODING_FLOAT16)
    options.setdefault("projection", projection)
    return pb.GetDocumentsRequest(collection=name, ids=ids, **options)


GOOD_QUERY = np.eye(2, DIM, dtype=np.float32)


def spoiled_query(value: float) -> NDArray[np.float32]:
    query = GOOD_QUERY.copy()
    query[1, 3] = value
    return query


async def many(served: Stack, name: str) -> tuple[NDArray[np.float16], list[tuple[str, float]]]:
    """A collection over many fragments; a query and its expected hits."""
    await served.create(name)
    stored = corpus(11, 120)
    await served.upsert(*(given(key, matrix) for key, matrix in stored.items()), name=name)
    query = unit_rows(np.random.default_rng(12), 4)
    return query, rounded(ranking(query, stored, 1000))
