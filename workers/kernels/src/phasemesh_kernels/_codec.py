"""Packing token vectors and unpacking them.

Codes are the same, bit for bit, on every machine and at every number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh_kernels import _core
from phasemesh_kernels._arguments import (
    CODECS,
    check_codec,
    check_offsets,
    check_scales,
    check_seed,
    check_threads,
    check_tokens,
    codes_as_bytes,
)
from phasemesh_kernels._machine import isa_limit

_REASONS = {"not_finite": "has an element that isn't finite", "zero_norm": "is of length zero"}


@dataclass(frozen=True, slots=True)
class Refused:
    """A document that has no code.

    Attributes:
        document: Its number; the token's where there are no offsets.
        token: Its first token that cannot be encoded, by the position in the batch.
        reason: "not_finite" or "zero_norm".
    """

    document: int
    token: int
    reason: str


class EncodeError(ValueError):
    """Some documents cannot be encoded; `refused` has all of them, by number."""

    refused: tuple[Refused, ...]

    def __init__(self, refused: tuple[Refused, ...]) -> None:
        self.refused = refused
        first = refused[0]
        others = f" (and {len(refused) - 1} other documents)" if len(refused) > 1 else ""
        super().__init__(
            f"tokens: document {first.document} cannot be encoded: token {first.token} "
            f"{_REASONS[first.reason]}{others}"
        )

    def __reduce__(self) -> tuple[type[EncodeError], tuple[tuple[Refused, ...]]]:
        return type(self), (self.refused,)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Packed token vectors and what is needed to read them.

    Attributes:
        codes: One row per token: uint8 [T, d] (int8), uint8 [T, d / 2] (int4), uint16 [T, d] (bf16),
            float16 or float32 [T, d] (f16, f32). Zeros for documents that were refused.
        scales: Length of each token vector, float32 [T]; None where all are of unit length.
        codec: "int8", "int4", "bf16", "f16" or "f32".
        dim: Elements of a vector, d.
        seed: Of the rotation.
        refused: Documents without a code, by number.
        errors: How far each decoded vector is from the original, in units of its scale, rounded up,
            float32 [T]; None where not asked for.
    """

    codes: npt.NDArray[Any]
    scales: npt.NDArray[np.float32] | None
    codec: str
    dim: int
    seed: int
    refused: tuple[Refused, ...]
    errors: npt.NDArray[np.float32] | None


def encode(
    tokens: npt.NDArray[np.floating],
    codec: str = "int8",
    *,
    offsets: npt.NDArray[np.int64] | Sequence[int] | None = None,
    seed: int = 0,
    scales: bool | None = None,
    refused: str = "raise",
    errors: bool = False,
    threads: int = 1,
    isa: str | None = None,
) -> Encoded:
    """Pack token vectors.

    Args:
        tokens: float16, float32 or float64 [T, d], C-contiguous; may be read-only or memory-mapped. d is a
            multiple of 16 up to 4096.
        codec: "int8" (d bytes a token), "int4" (d / 2), "bf16", "f16" (2 d) or "f32" (4 d).
        offsets: int64 [n + 1]: document i has the tokens offsets[i] to offsets[i + 1]. None: each token is a
            document of its own. Says what is refused together, nothing else.
        seed: Of the rotation before int8 and int4 codes; the same is needed to read them.
        scales: Whether int8 and int4 codes keep each vector's length. None: where some token isn't of unit
            length.
        refused: What becomes of documents with a token that isn't finite or is of length zero: "raise", or
            "skip": their codes are zeros.
        errors: Whether to compute the distance of each decoded vector from the original.
        threads: How many to use, this one included.
        isa: Upper limit of the instruction set; None: that of the environment.

    Raises:
        EncodeError: Documents were refused.
        ValueError: An argument cannot be used.
    """
    if refused not in ("raise", "skip"):
        raise ValueError(f'refused: {refused!r} is neither "raise" nor "skip"')
    if scales not in (None, True, False):
        raise ValueError(f"scales: None, True or False is needed, got {scales!r}")
    array = check_tokens(tokens)
    name = check_codec(codec)
    seed = check_seed(seed)
    packed, lengths, distances, flaws = _core.encode(
        array,
        name,
        seed,
        None if offsets is None else check_offsets(offsets),
        None if scales is None else bool(scales),
        bool(errors),
        check_threads(threads),
        isa_limit(isa),
    )
    without_code = tuple(Refused(*flaw) for flaw in flaws)
    if without_code and refused == "raise":
        raise EncodeError(without_code)
    return Encoded(
        codes=packed.view(CODECS[name]),
        scales=lengths,
        codec=name,
        dim=array.shape[1],
        seed=seed,
        refused=without_code,
        errors=distances,
    )


def decode(
    codes: npt.NDArray[Any],
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    threads: int = 1,
) -> npt.NDArray[np.float32]:
    """Unpack token vectors.

    Args:
        codes: As in `Encoded`.
        codec: None where the dtype says it: uint16 (bf16), float16 (f16), float32 (f32).
        seed: The one they were encoded with.
        scales: float32 [T], where they were kept.
        threads: How many to use, this one included.

    Returns:
        float32 [T, d], in the vectors' own basis.

    Raises:
        ValueError: An argument cannot be used.
    """
    packed, name = codes_as_bytes(codes, codec)
    return _core.decode(packed, name, check_seed(seed), check_scales(scales), check_threads(threads))
