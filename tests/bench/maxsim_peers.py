"""Every library on the same documents with the same number of threads: the ratios of the MaxSim benchmark.

A process of its own for each number of threads, because most libraries read theirs once, from the environment,
when they start: maxsim-cpu's pool and numpy's BLAS would otherwise have all of the machine beside one thread of
ours. All score alike before anything is timed. A library that isn't there is left out, with the reason.

    python -m tests.bench.maxsim_peers --threads 2 --documents 10000 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

import phasemesh_kernels as kernels
from phasemesh.index import portable
from tests.bench.maxsim_corpus import Documents, medians, offsets_of, unit

DIM = 128
QUERY_TOKENS = 32
CODECS = ("int8", "int4", "bf16")
#: Largest difference from the float32 scores per query token: rounding, and for int4 its coarse codes.
TOLERANCES = {"int8": 0.02, "int4": 0.15, "bf16": 0.01, "maxsim_cpu": 1e-4, "torch_bf16": 0.01}
#: Tokens that torch multiplies at a time: similarities of 32 query tokens that stay in a second-level cache.
CHUNKS = (4_096, 8_192, 16_384)

Work = Callable[[], Any]


def compare(threads: int, documents: int, rounds: int) -> dict[str, Any]:
    """Run `measure` in a process that has `threads` threads of every kind."""
    count = str(threads)
    names = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    arguments = f"--threads {threads} --documents {documents} --rounds {rounds}".split()
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        env=os.environ | dict.fromkeys(names, count),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def torch_maxsim(
    query: Any,
    tokens: Any,
    offsets: npt.NDArray[np.int64],
    form: str,
    chunk: int,
    pool: ThreadPoolExecutor | None,
) -> Any:
    """A bf16 matrix product and a maximum per document, some whole documents at a time: float32 [documents].

    Args:
        query: bfloat16 [q, d].
        tokens: bfloat16 [T, d].
        offsets: int64 [documents + 1].
        form: "segment" or "scatter", the operator that takes the maxima.
        chunk: Most tokens at a time, if no document is longer.
        pool: Threads that share the chunks, one of torch's each; None: all of torch's on every chunk.
    """
    import torch

    scores = torch.empty(len(offsets) - 1)
    lengths = torch.from_numpy(np.diff(offsets))
    columns = query.T

    def score(span: tuple[int, int]) -> None:
        first, stop = span
        with torch.inference_mode():
            block = (tokens[offsets[first] : offsets[stop]] @ columns).float()
            if form == "segment":
                best = torch.segment_reduce(block, "max", lengths=lengths[first:stop], axis=0)
            else:
                rows = torch.repeat_interleave(torch.arange(stop - first), lengths[first:stop])
                best = torch.full((stop - first, len(query)), -torch.inf)
                best.scatter_reduce_(0, rows[:, None].expand(-1, len(query)), block, "amax")
            scores[first:stop] = best.sum(dim=1)

    spans = []
    first = 0
    while first < len(scores):
        stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + chunk, side="right")) - 1)
        spans.append((first, stop))
        first = stop
    # map: what a thread raised is raised here
    for _ in map(score, spans) if pool is None else pool.map(score, spans):
        pass
    return scores


def best_of_torch(
    query: npt.NDArray[np.float32],
    vectors: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    threads: int,
) -> tuple[Work, str]:
    """The fastest form of torch on this machine, found on the first documents, and its name."""
    import torch

    torch.set_num_threads(threads)
    narrow, half = torch.from_numpy(query).bfloat16(), torch.from_numpy(vectors).bfloat16()
    head = offsets[: min(len(offsets), 1_001)]
    shared = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    forms: dict[str, tuple[float, Work]] = {}
    for form, chunk, pool in product(
        ("segment", "scatter"), CHUNKS, (None, shared) if threads > 1 else (None,)
    ):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            torch_maxsim(narrow, half, head, form, chunk, pool)
            times.append(time.perf_counter() - began)
        name = f"{form}_reduce, {chunk} tokens at a time, {'one thread' if pool else 'all threads'} each"
        forms[name] = min(times), partial(torch_maxsim, narrow, half, offsets, form, chunk, pool)
    best = min(forms, key=lambda name: forms[name][0])
    return forms[best][1], best


def measure(threads: int, count: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of every library, `rounds` interleaved calls of each."""
    rng = np.random.default_rng(1)
    offsets = offsets_of(count)
    tokens = int(offsets[-1])
    pool = unit(rng, min(tokens, 1 << 19), DIM)
    vectors = np.concatenate([pool[: min(len(pool), tokens - at)] for at in range(0, tokens, len(pool))])
    query = unit(rng, QUERY_TOKENS, DIM)

    contenders: dict[str, Work] = {}
    skipped: dict[str, str] = {}
    for codec in CODECS:
        documents = Documents(offsets, kernels.encode(vectors, codec, threads=threads).codes, codec, DIM)
        contenders[codec] = partial(documents.scan, [query], threads)
    float16 = vectors.astype(np.float16)
    contenders["numpy"] = lambda: portable.maxsim(query, float16, offsets)
    form = None
    try:
        contenders["torch_bf16"], form = best_of_torch(query, vectors, offsets, threads)
    except ImportError as error:
        skipped["torch_bf16"] = str(error)
    try:
        import maxsim_cpu

        matrices = [vectors[offsets[i] : offsets[i + 1]] for i in range(count)]
        contenders["maxsim_cpu"] = lambda: maxsim_cpu.maxsim_scores_variable(query, matrices)
    except ImportError as error:
        skipped["maxsim_cpu"] = str(error)

    exact = np.add.reduce(
        [np.maximum.reduceat(vectors @ token, offsets[:-1]).astype(np.float64) for token in query]
    )
    for name, work in contenders.items():
        off = float(np.abs(np.asarray(work(), np.float64).reshape(-1) - exact).max()) / QUERY_TOKENS
        # not `>`: a score that isn't a number is wrong too
        if not off <= TOLERANCES.get(name, 1e-3):
            raise AssertionError(f"{name} scores otherwise than exact products: {off} per query token")
    took = medians(contenders, rounds)
    return {
        "tokens_per_s": {name: round(tokens / value) for name, value in took.items()},
        "torch_form": form,
        "skipped": skipped,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(json.dumps(measure(options.threads, options.documents, options.rounds)))


if __name__ == "__main__":
    main()
