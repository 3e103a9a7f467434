"""What a collection and its documents are: the values that cross every seam of the index.

Plain frozen values without behaviour beyond checks of their own shape. A spec never changes once its
collection exists, so anything derived from one (a schema, a segment) stays valid for the incarnation's life.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from phasemesh.index.errors import InvalidSpec

#: Value of a declared field. A `TIMESTAMP` is a timezone-aware datetime; None stands for "has no value".
FieldValue: TypeAlias = str | int | float | bool | datetime | tuple[str, ...] | None

_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}", re.ASCII)

#: Widest token or dense vector; beyond any known model, small enough that one row can't exhaust memory.
MAX_DIM = 65_536
#: Most declared fields: each is a column of its own in every file of the data.
MAX_FIELDS = 256


class FieldType(StrEnum):
    """Type of a declared metadata field."""

    STRING = "string"
    INT64 = "int64"
    DOUBLE = "double"
    BOOL = "bool"
    TIMESTAMP = "timestamp"
    STRING_LIST = "string_list"


class Codec(StrEnum):
    """Representation in which scorers hold token vectors; the store always keeps float16."""

    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Normalize(StrEnum):
    """Whether token vectors are scaled to unit length on their way in."""

    AUTO = "auto"
    NEVER = "never"
    REQUIRE = "require"


class Reduction(StrEnum):
    """How the best similarities of the query's vectors are combined."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class FieldDeclaration:
    """A metadata field that documents may carry and filters may name."""

    name: str
    type: FieldType

    def __post_init__(self) -> None:
        if not _FIELD_NAME.fullmatch(self.name):
            raise InvalidSpec(
                f"fields: {self.name[:64]!r} isn't a field name; use a letter, then up to 127 letters, "
                "digits and underscores"
            )


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """What is fixed when a collection is created.

    Args:
        name: Unique within the tenant; the catalogue validates it.
        model: Model that encodes texts; empty for a collection of given vectors.
        recipe_hash: Recipe hash of that model; empty without one.
        token_dim: Dimension d of token vectors.
        codec: Representation that scorers hold.
        fields: Declared metadata fields.
        normalize: Whether vectors are scaled on their way in.
        reduction: How MaxSim combines the query's vectors.
        dense_dim: Dimension of the optional dense vector; 0 for none.

    Raises:
        InvalidSpec: A dimension is out of range or two fields have one name.
    """

    name: str
    model: str
    recipe_hash: str
    token_dim: int
    codec: Codec = Codec.INT8
    fields: tuple[FieldDeclaration, ...] = ()
    normalize: Normalize = Normalize.AUTO
    reduction: Reduction = Reduction.SUM
    dense_dim: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.token_dim <= MAX_DIM:
            raise InvalidSpec(f"token_dim: {self.token_dim} isn't between 1 and {MAX_DIM}")
        if len(self.fields) > MAX_FIELDS:
            raise InvalidSpec(f"fields: there are {len(self.fields)}, at most {MAX_FIELDS} are taken")
        if not 0 <= self.dense_dim <= MAX_DIM:
            raise InvalidSpec(f"dense_dim: {self.dense_dim} isn't between 0 (none) and {MAX_DIM}")
        # Lance resolves column names without regard to case, so two such names would be one column.
        seen = [declared.name.lower() for declared in self.fields]
        for position, name in enumerate(seen):
            if name in seen[:position]:
                raise InvalidSpec(
                    f"fields: {self.fields[position].name!r} is declared twice (case doesn't count)"
                )


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A collection as the catalogue holds it.

    Args:
        spec: What was fixed at its creation.
        incarnation: Random identifier of this life of the collection, 32 hexadecimal digits.
        created_unix_ns: When it was created, nanoseconds since 1970 UTC.
    """

    spec: CollectionSpec
    incarnation: str
    created_unix_ns: int


@dataclass(frozen=True, slots=True)
class Version:
    """A point in a collection's history; only comparable within one incarnation."""

    incarnation: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredDocument:
    """One document as it is stored.

    Args:
        id: Unique in the collection.
        text: Its text, if there is one.
        fields: Values of declared fields; absent ones have no value.
        tokens: Token vectors, float16 [tokens, d]; may have no rows.
        token_spans: Character offsets of each row's token in the text, int32 [tokens, 2]; None if unknown.
        chunk_offsets: First rows of the second and later chunks, int32 [chunks - 1].
        dense: The optional dense vector, float32 [dense_dim].
    """

    id: str
    text: str | None
    fields: Mapping[str, FieldValue]
    tokens: npt.NDArray[np.float16]
    token_spans: npt.NDArray[np.int32] | None = None
    chunk_offsets: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    dense: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class FragmentRef:
    """One fragment of one version: the unit of placement.

    Args:
        fragment_id: Its number within the dataset; never used again for other rows.
        data_key: Name of the data file that holds its token vectors. Files are write-once, so the same key
            always means the same physical rows, whatever was deleted from them since.
        physical_rows: Rows in that file, including those deleted since.
        tokens: Token vectors in that file, including those of deleted rows.
    """

    fragment_id: int
    data_key: str
    physical_rows: int
    tokens: int
