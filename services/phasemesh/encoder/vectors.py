"""The arithmetic on vectors and logits that is left to the service; all of it in float32 or wider."""

from __future__ import annotations

import numpy as np

from phasemesh.pool.protocol import Float32


def unit(vectors: Float32) -> Float32:
    """float32[n, d] scaled to unit length; a zero row stays zero."""
    # float64 sums, so that neither overflow nor underflow of squares can spoil a row.
    norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    scaled: Float32 = (vectors / np.where(norms == 0, 1.0, norms)).astype(np.float32)
    return scaled


def cosine(query: Float32, documents: Float32) -> Float32:
    """Cosine of float32[d] with each row of float32[n, d]; 0 where either is zero."""
    scores: Float32 = unit(documents) @ unit(query[np.newaxis])[0]
    return scores


def sigmoid(logits: Float32) -> Float32:
    """The logistic function, without overflow at either end."""
    small = np.exp(-np.abs(logits))
    scores: Float32 = np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    return scores
