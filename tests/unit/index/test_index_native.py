"""Without the compiled kernels: the same results by numpy, and no secret made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.index import native
from phasemesh.index.coded import make_codes, served_codec
from phasemesh.index.leaf import LeafSource, leaf_search
from phasemesh.index.spec import Codec, Reduction
from tests.unit.index.corpora import corpora

ROOT = Path(__file__).resolve().parents[3]


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(1, 30))
def test_search_without_kernels_finds_the_same_bits(corpus, k):
    query = corpus.query
    by_kernels = leaf_search([LeafSource(0, corpus.segment())], query, k, Reduction.SUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNELS", None)
        segment = corpus.segment()
        assert segment.key.codec is None
        by_numpy = leaf_search([LeafSource(0, segment)], query, k, Reduction.SUM)
    assert by_numpy.hits == by_kernels.hits


def test_a_process_without_kernels_says_so(monkeypatch):
    monkeypatch.setattr(native, "KERNELS", None)
    assert native.kernel_name() == "numpy"
    assert "pip install ./workers/kernels" in native.slow_kernel()
    assert served_codec(Codec.INT8, 128) is None
    with pytest.raises(RuntimeError, match="compiled MaxSim kernels"):
        make_codes(np.ones((1, 16), np.float16), np.array([0, 1]), Codec.INT8)


@pytest.mark.skipif(native.KERNELS is None, reason="the compiled kernels aren't installed")
def test_a_process_with_kernels_names_their_path():
    assert native.slow_kernel() == ""
    assert native.kernel_name() == native.KERNELS.capabilities()["paths"]["int8"]
    assert [served_codec(Codec.INT4, dim) for dim in (8, 16, 100, 4096, 4112)] == [
        None, Codec.INT4, None, Codec.INT4, None,
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["missing", "wrong instruction set"])
def test_kernels_that_cannot_be_loaded_are_done_without(tmp_path, broken):
    environment = {**os.environ, "PHASEMESH_KERNELS_ISA": "mmx" if broken != "missing" else ""}
    if broken == "missing":
        (tmp_path / "phasemesh_kernels.py").write_text("raise ImportError('built for another machine')")
        environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    elif native.KERNELS is None:
        pytest.skip("the compiled kernels aren't installed")
    code = "from phasemesh.index import native; print(native.kernel_name(), native.slow_kernel())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("numpy ")
    assert ("mmx" if broken != "missing" else "built for another machine") in done.stdout


def test_an_installation_without_a_compiler_goes_on_and_says_what_is_lost():
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = [sys.executable, str(ROOT / "deploy" / "install.py"), "--kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "NOT installed" in done.stderr
    assert "no C++ compiler" in done.stderr
    assert "make kernels" in done.stderr
