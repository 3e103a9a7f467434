"""Scanning from a device's memory: the same answers as the CPU's, and an answer whatever the device does.

Torch's own CPU device stands in for a GPU: the arithmetic and the bookkeeping are the same code. The fused
kernel runs where its distribution is installed, through Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.engine.device_scan import DeviceScanner, fused_error
from phasemesh.engine.errors import ModelLoadError
from phasemesh.index.leaf import LeafQuery, LeafSource, leaf_search, leaf_searches
from phasemesh.index.overlay import visible_rows
from phasemesh.index.rescore import scale_query
from phasemesh.index.scanner import CPU
from phasemesh.index.spec import Codec, Reduction
from tests.unit.index.corpora import corpora, random_corpus

GIB = 1 << 30


class NoScanner:
    """Fails the test if it is asked."""

    name, warning = "none", ""

    def scan(self, *args: Any) -> Any:
        raise AssertionError("the CPU was asked")


@settings(max_examples=150, deadline=None)
@given(corpora, st.integers(1, 30), st.sampled_from([None, *Codec]), st.randoms(use_true_random=False))
def test_search_equals_float64_brute_force_order_included(corpus, k, codec, random):
    scanner = DeviceScanner("cpu", GIB)
    allowed = np.array([random.random() < 0.7 for _ in corpus.ids], bool)
    segment = corpus.segment(codec=codec)
    source = LeafSource(3, segment, visible_rows(segment.rows, None, allowed))
    result = leaf_search([source], corpus.query, k, Reduction.SUM, scanner=scanner)
    expected = corpus.ranking(np.flatnonzero(allowed))
    assert [hit.id for hit in result.hits] == [name for name, _ in expected[:k]]
    scale = max((abs(score) for _, score in expected), default=0.0)
    np.testing.assert_allclose(
        [hit.score for hit in result.hits],
        [score for _, score in expected[:k]],
        rtol=1e-12,
        atol=1e-12 * scale,
    )
    # It scans the vectors themselves, so even the coarsest codes lose nothing.
    assert result.exact
    assert result.documents == len(expected)


@settings(max_examples=100, deadline=None)
@given(corpora)
def test_scores_are_within_their_bounds_of_float64(corpus):
    segment = corpus.segment()
    scaled = scale_query(corpus.query)
    (scanned,) = DeviceScanner("cpu", GIB).scan(segment, [scaled], None, None)
    factor = float(np.abs(scaled).max() / np.abs(corpus.query).max()) if corpus.query.any() else 1.0
    for row in range(segment.rows):
        exact = corpus.score(row) * factor
        if np.isinf(exact):
            assert scanned.scores[row] == -np.inf
        else:
            slack = 1e-12 * abs(exact)
            assert abs(float(scanned.scores[row]) - exact) <= scanned.errors[row] + slack


def test_queries_that_share_a_scan_get_the_bits_of_their_own():
    corpus = random_corpus(7, 200, dim=16)
    rng = np.random.default_rng(7)
    queries = [
        LeafQuery(rng.normal(size=(count, 16)).astype(np.float32), k, Reduction.SUM)
        for count, k in [(1, 3), (5, 50), (33, 1)]
    ]
    parts = [corpus.segment(range(0, 120), name="a"), corpus.segment(range(120, 200), name="b")]
    sources = [LeafSource(number, part) for number, part in enumerate(parts)]
    scanner = DeviceScanner("cpu", GIB, otherwise=NoScanner())
    together = leaf_searches(sources, queries, scanner=scanner)
    for query, result in zip(queries, together, strict=True):
        alone = leaf_search(sources, query.vectors, query.k, query.reduction)
        assert not isinstance(result, Exception)
        assert result.hits == alone.hits


def test_many_small_steps_give_the_same_bits_as_one(monkeypatch):
    corpus = random_corpus(3, 300, dim=8)
    segment = corpus.segment()
    query = [scale_query(corpus.query)]
    visible = np.arange(segment.rows) % 3 > 0
    whole = DeviceScanner("cpu", GIB).scan(segment, query, visible, None)
    monkeypatch.setattr("phasemesh.engine.device_scan._MAX_CELLS", 64)
    steps = 0

    def checkpoint() -> None:
        nonlocal steps
        steps += 1

    parts = DeviceScanner("cpu", GIB).scan(segment, query, visible, checkpoint)
    assert steps > 20
    np.testing.assert_array_equal(whole[0].scores, parts[0].scores)


class Ended(RuntimeError):
    pass


def test_a_search_that_is_ended_ends_there_and_harms_nothing():
    corpus = random_corpus(5, 50)
    scanner = DeviceScanner("cpu", GIB, otherwise=NoScanner())

    def end() -> None:
        raise Ended("deadline")

    with pytest.raises(Ended):
        scanner.scan(corpus.segment(), [scale_query(corpus.query)], None, end)
    assert scanner.resident_bytes > 0
    assert scanner.warning == ""
    scanner.scan(corpus.segment(), [scale_query(corpus.query)], None, None)


def test_what_finds_no_room_is_scanned_by_the_cpu_until_something_is_idle():
    corpus = random_corpus(11, 60, dim=16, longest=9)
    query = [scale_query(corpus.query)]
    segments = [corpus.segment(name=f"{number}.lance") for number in range(3)]
    size = segments[0].tokens.nbytes
    now_s = 0.0
    scanner = DeviceScanner("cpu", 2 * size, now_s=lambda: now_s)
    for segment in segments:
        scanner.scan(segment, query, None, None)
    assert scanner.resident_bytes == 2 * size
    # The third didn't push the first out: those stay while they are in use.
    strict = NoScanner()
    scanner._otherwise = strict
    scanner.scan(segments[0], query, None, None)
    with pytest.raises(AssertionError):
        scanner.scan(segments[2], query, None, None)
    now_s = 61.0
    scanner.scan(segments[0], query, None, None)
    scanner.scan(segments[2], query, None, None)
    assert scanner.resident_bytes == 2 * size
    with pytest.raises(AssertionError):
        scanner.scan(segments[1], query, None, None)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
    ],
)
def test_a_device_that_fails_costs_speed_and_no_answer(monkeypatch, error, lost):
    corpus = random_corpus(13, 40, dim=16)
    source = LeafSource(0, corpus.segment())
    scanner = DeviceScanner("cpu", GIB)
    good = leaf_search([source], corpus.query, 5, Reduction.SUM, scanner=scanner)

    def fail(*args: Any) -> Any:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(scanner, "_torch_sums", fail)
        assert leaf_search([source], corpus.query, 5, Reduction.SUM, scanner=scanner).hits == good.hits
        assert scanner.resident_bytes == 0
    assert bool(scanner.warning) is lost
    assert ("illegal memory access" in scanner.warning) is lost
    assert scanner.name == (CPU.name if lost else "cpu-torch-float16")
    assert leaf_search([source], corpus.query, 5, Reduction.SUM, scanner=scanner).hits == good.hits
    assert (scanner.resident_bytes == 0) is lost


def test_a_device_that_isnt_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ModelLoadError, match="'cuda' isn't available"):
        DeviceScanner("cuda")


@settings(max_examples=200, deadline=None)
@given(corpora)
def test_a_float16_query_is_off_by_less_than_its_bound(corpus):
    """What the fused kernel is fed, scored in float64: the bound covers it without its share for rounding."""
    scaled = scale_query(corpus.query)
    rounded = scaled.astype(np.float16).astype(np.float64)
    bounds = fused_error(scaled, corpus.segment().norms)
    for row, document in enumerate(corpus.documents):
        if len(document):
            wide = document.astype(np.float64)
            exact = (wide @ scaled.astype(np.float64).T).max(axis=0).sum()
            assert abs((wide @ rounded.T).max(axis=0).sum() - exact) <= bounds[row] + 1e-12 * abs(exact)


@pytest.mark.skipif(
    importlib.util.find_spec("late_interaction_kernels") is None
    or importlib.util.find_spec("triton") is None,
    reason="late-interaction-kernels and triton aren't installed",
)
def test_the_fused_kernel_scores_the_same_documents():
    # In a process of its own: Triton decides at import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.fused_kernel"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
