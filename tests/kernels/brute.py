"""What `phasemesh_kernels` is held against: its documentation once more, in numpy.

Written from the format and the formulas alone; nothing here calls the library. Scores come from binary64 (float
codecs) and int64 (integer codecs).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CODECS = ("int8", "int4", "bf16", "f16", "f32")
INTEGER = ("int8", "int4")
DTYPES: dict[str, Any] = {
    "int8": np.uint8,
    "int4": np.uint8,
    "bf16": np.uint16,
    "f16": np.float16,
    "f32": np.float32,
}
MASK = 2**64 - 1
F32 = np.float32

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


class SplitMix64:
    """Steele, Lea, Flood 2014."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def number(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        while (number := self.number()) < 2**64 % n:
            pass
        return number % n


class Rotation:
    """Rounds of a permutation, signs and a block-wise Hadamard transform, in binary32."""

    def __init__(self, dim: int, seed: int) -> None:
        numbers = SplitMix64(seed)
        self.block = dim & -dim
        self.rounds: list[tuple[Array, Floats]] = []
        for _ in range(2 if self.block == dim else 4):
            order = list(range(dim))
            if self.block != dim:
                for i in range(dim - 1, 0, -1):
                    j = numbers.below(i + 1)
                    order[i], order[j] = order[j], order[i]
            bits = [numbers.number() for _ in range((dim + 63) // 64)]
            signs = [-1.0 if bits[i // 64] >> (i % 64) & 1 else 1.0 for i in range(dim)]
            self.rounds.append((np.array(order), np.array(signs, F32)))
        self.scale = F32(float(self.block) ** (-len(self.rounds) / 2))

    def _hadamard(self, rows: Array) -> Array:
        h = 1
        while h < self.block:
            pairs = rows.reshape(len(rows), rows.shape[1] // (2 * h), 2, h)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            rows = np.stack([a + b, a - b], axis=2).reshape(rows.shape)
            h *= 2
        return rows

    def forward(self, rows: Array) -> Array:
        for order, signs in self.rounds:
            rows = self._hadamard(rows[:, order] * signs.astype(rows.dtype))
        return rows * rows.dtype.type(self.scale)

    def backward(self, rows: Array) -> Array:
        for order, signs in reversed(self.rounds):
            rows = self._hadamard(rows) * signs.astype(rows.dtype)
            back = np.empty_like(rows)
            back[:, order] = rows
            rows = back
        return rows * rows.dtype.type(self.scale)


@cache
def rotation(dim: int, seed: int) -> Rotation:
    return Rotation(dim, seed)


def clip(codec: str, dim: int) -> np.float32:
    constant = 2.5 - 3.2 / dim if codec == "int4" else 3.45 + 0.135 * (dim.bit_length() - 1)
    return F32(constant / dim**0.5)


def step(codec: str, dim: int) -> np.float32:
    return clip(codec, dim) / F32(15 if codec == "int4" else 127)


def encode(tokens: Floats, codec: str, seed: int = 0) -> Array:
    """Codes of float32 [T, d]; integer codecs: of unit vectors."""
    dim = tokens.shape[1]
    if codec == "f32":
        return tokens
    if codec == "f16":
        return tokens.astype(np.float16)
    if codec == "bf16":
        return to_bf16(tokens)
    steps = rotation(dim, seed).forward(tokens) * (F32(1) / step(codec, dim))
    if codec == "int8":
        return (np.rint(np.clip(steps, -127, 127)) + 128).astype(np.uint8)
    levels = np.clip(steps * F32(0.5) + F32(8), 0, F32(15.5)).astype(np.uint8)
    return levels[:, : dim // 2] | levels[:, dim // 2 :] << 4


def integers(codes: Array, codec: str) -> npt.NDArray[np.int64]:
    """The integers v that int8 and int4 codes stand for, [T, d]."""
    if codec == "int8":
        return codes.astype(np.int64) - 128
    return 2 * np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.int64) - 15


def decode(codes: Array, codec: str, seed: int = 0, scales: Floats | None = None) -> Floats:
    """float32 [T, d] in the vectors' own basis."""
    if codec == "bf16":
        return from_bf16(codes)
    if codec not in INTEGER:
        return codes.astype(F32)
    v = integers(codes, codec)
    rows = rotation(v.shape[1], seed).backward(v.astype(F32) * step(codec, v.shape[1]))
    return rows if scales is None else rows * scales[:, None]


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: Array) -> Floats:
    return (halves.astype(np.uint32) << 16).view(F32)


def quantise(query: Floats, dim: int, seed: int) -> tuple[npt.NDArray[np.int64], float]:
    """A query's 8-bit integers [q, d] and the value of one: its largest rotated element is 127 of them."""
    largest = float(np.abs(query).max())
    if largest == 0.0:
        return np.zeros(query.shape, np.int64), 0.0
    exponent = int(np.frexp(largest)[1])
    rows = rotation(dim, seed).forward(np.ldexp(query.astype(np.float64), -exponent).astype(F32))
    top = float(np.abs(rows).max())
    v = np.rint(rows.astype(np.float64) * (127.0 / top)).astype(np.int64)
    return v, float(np.ldexp(top / 127.0, exponent))


def maxsim(
    query: Floats,
    codes: Array,
    offsets: Array,
    codec: str,
    *,
    seed: int = 0,
    scales: Floats | None = None,
    mean: bool = False,
) -> tuple[Doubles, Array, Doubles]:
    """Scores [n], positions [n, q] (the first of equals), and how far a path's scores may be off [n].

    Integer codecs: 0; the scores rounded to float32 are the library's. Float codecs: the bound of dot products
    in binary32 in any order, (d + 1) u / (1 - (d + 1) u) times the products' magnitudes.
    """
    n, q, dim = len(offsets) - 1, len(query), query.shape[1]
    scores = np.full(n, -np.inf)
    bounds = np.zeros(n)
    best = np.full((n, q), -1, np.int32)
    similarity, off, factor = _similarities(query, codes, codec, dim, seed, scales)
    for i in range(n):
        part = similarity[offsets[i] : offsets[i + 1]]
        if not len(part):
            continue
        best[i] = part.argmax(axis=0)
        total = 0.0
        for value in part.max(axis=0).tolist():  # in the order of the query's tokens
            total += value
        scores[i] = total * factor / (q if mean else 1)
        if codec not in INTEGER:
            bounds[i] = off[offsets[i] : offsets[i + 1]].max(axis=0).sum() / (q if mean else 1)
            bounds[i] += abs(scores[i]) * 2.0**-24 + 1e-30
    return scores, best, bounds


def _similarities(
    query: Floats, codes: Array, codec: str, dim: int, seed: int, scales: Floats | None
) -> tuple[Array, Doubles, float]:
    if codec in INTEGER:
        v, unit = quantise(query, dim, seed)
        dots = integers(codes, codec) @ v.T
        factor = unit * float(step(codec, dim))
        if scales is None:
            return dots, np.zeros(0), factor
        return dots.astype(F32) * scales[:, None], np.zeros(0), factor
    rows = from_bf16(codes) if codec == "bf16" else codes
    wide = rows.astype(np.float64)
    columns = (from_bf16(to_bf16(query)) if codec == "bf16" else query).astype(np.float64)
    u = (dim + 1) * 2.0**-24
    off = np.abs(wide) @ np.abs(columns).T * (u / (1 - u)) + dim * 2.0**-120
    return wide @ columns.T, off, 1.0


def unit(rows: Array) -> Floats:
    """Rows of length 1, float32."""
    wide = rows.astype(np.float64)
    return (wide / np.linalg.norm(wide, axis=1, keepdims=True)).astype(F32)


def assert_scores(found: Floats, truth: Doubles, bounds: Doubles) -> None:
    """float32 scores against brute force: the very bits where the bound is 0."""
    assert found.dtype == np.float32
    exact = bounds == 0
    np.testing.assert_array_equal(found[exact], truth[exact].astype(np.float32))
    off = np.abs(found[~exact] - truth[~exact])
    assert (off <= bounds[~exact]).all(), f"off by {(off / bounds[~exact]).max():.3g} bounds"
