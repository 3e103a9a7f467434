"""Random ragged corpora, and late-interaction search over them the slow and obvious way, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from phasemesh.index.coded import served_codec
from phasemesh.index.segments import Segment, SegmentKey, build_segment
from phasemesh.index.spec import Codec


@dataclass(frozen=True)
class Corpus:
    ids: list[str]
    documents: list[npt.NDArray[np.float16]]
    chunks: list[list[int]]
    query: npt.NDArray[np.float32]

    @property
    def tokens(self):
        dim = self.query.shape[1]
        return np.concatenate([np.zeros((0, dim), np.float16), *self.documents])

    @property
    def offsets(self):
        return np.cumsum([0] + [len(document) for document in self.documents])

    def segment(self, rows=None, name="file.lance", codec: Codec | None = Codec.INT8) -> Segment:
        rows = range(len(self.ids)) if rows is None else rows
        part = Corpus(
            [self.ids[row] for row in rows],
            [self.documents[row] for row in rows],
            [self.chunks[row] for row in rows],
            self.query,
        )
        chunks = [np.array(cuts, np.int32) for cuts in part.chunks]
        served = None if codec is None else served_codec(codec, self.query.shape[1])
        return build_segment(SegmentKey("0" * 32, name, served), part.ids, part.tokens, part.offsets, chunks)

    def score(self, row: int, *, mean: bool = False) -> float:
        """MaxSim by loops: one document, one query token at a time, the best of the document's chunks."""
        query = self.query.astype(np.float64)
        best = -np.inf
        for chunk in np.split(self.documents[row].astype(np.float64), self.chunks[row]):
            if len(chunk):
                total = 0.0
                for vector in query:
                    total += max(float(np.sum(token * vector)) for token in chunk)
                best = max(best, total)
        return best / len(query) if mean else best

    def ranking(self, rows=None, *, mean: bool = False) -> list[tuple[str, float]]:
        rows = range(len(self.ids)) if rows is None else rows
        scored = [(self.ids[row], self.score(row, mean=mean)) for row in rows]
        return sorted(((name, s) for name, s in scored if s > -np.inf), key=lambda hit: (-hit[1], hit[0]))


def random_corpus(seed: int, count: int, dim: int = 8, longest: int = 6, *, style: str = "normal") -> Corpus:
    """`style`: `normal`, `negative` (all similarities are), `grid` (few values: many exact ties), `wild`."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(int(rng.integers(1, 5)), dim)).astype(np.float32)
    documents: list[npt.NDArray[np.float16]] = []
    chunks: list[list[int]] = []
    for _ in range(count):
        length = int(rng.integers(0, longest + 1))
        if documents and rng.random() < 0.2:
            documents.append(documents[int(rng.integers(len(documents)))])
        else:
            vectors = rng.normal(size=(length, dim))
            if style == "negative":
                vectors = -np.abs(vectors)
            elif style == "grid":
                vectors = np.round(vectors)
            elif style == "wild":
                vectors *= 10.0 ** rng.integers(-6, 4, size=(length, 1))
            documents.append(vectors.astype(np.float16))
        length = len(documents[-1])
        cuts = rng.integers(0, length + 1, size=int(rng.integers(0, 3))) if rng.random() < 0.3 else []
        chunks.append(sorted(int(cut) for cut in cuts))
    if style == "negative":
        query = np.abs(query)
    elif style == "grid":
        query = np.round(query)
    elif style == "wild":
        query *= np.float32(10.0) ** rng.integers(-20, 20)
    ids = [f"d{number:03}é" for number in rng.permutation(count)]
    return Corpus(ids, documents, chunks, query.astype(np.float32))


corpora = st.builds(
    random_corpus,
    st.integers(0, 2**32),
    st.integers(0, 25),
    st.sampled_from([1, 8, 16, 48, 64]),
    st.integers(0, 9),
    style=st.sampled_from(["normal", "negative", "grid", "wild"]),
)
