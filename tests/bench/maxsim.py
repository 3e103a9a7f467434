"""MaxSim on this machine's CPUs: the kernels beside other libraries, and beside reading the codes at all.

Everything is measured in one run, interleaved: each round scores the same documents with every contender, at the
same number of threads, and figures are medians over rounds. Caches are emptied before every timed call, since a
scan of a corpus never finds it there. Documents have 40 to 200 tokens, 120 on average.

The core is d = 128 and 32 query tokens, for 1,000, 10,000 and 100,000 documents; dimensions and query lengths are
swept one at a time at 10,000 documents. What a sweep would need beyond `--gib` of memory, or beyond `--products`
multiplications per scan, is left out and named in `left_out`.

    python -m tests.bench.maxsim --json
    python -m tests.bench.maxsim --json --quick
    python -m tests.bench.maxsim --json --gib 40 --products 1e13     # the whole product on a large machine
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import maxsim_cpu
import numpy as np
import numpy.typing as npt
import torch

import phasemesh_kernels as kernels
from phasemesh.index import portable

DIM = 128
QUERY_TOKENS = 32
SIZES = (1_000, 10_000, 100_000)
CODECS = ("int8", "int4", "bf16")
BYTES_PER_ELEMENT = {"int8": 1.0, "int4": 0.5, "bf16": 2.0}
#: To reach on a machine with AMX, by two threads, at d = 128 and 100,000 documents.
TARGETS = {
    "ratio_vs_maxsim_cpu": 30.0,
    "ratio_vs_torch_bf16": 15.0,
    "fraction_of_read_bandwidth": 0.75,
    "int4_over_int8": 1.3,
    "encode_tokens_per_s": 5e6,
}
#: Larger than the last-level cache of any machine this is for.
_EVICT = np.ones(96 << 20, np.uint8)


@dataclass(frozen=True)
class Documents:
    """Codes of one corpus."""

    offsets: npt.NDArray[np.int64]
    codes: npt.NDArray[Any]
    codec: str
    dim: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return int(self.offsets[-1])

    def head(self, count: int) -> Documents:
        """The first `count` documents."""
        stop = int(self.offsets[count])
        return Documents(self.offsets[: count + 1], self.codes[:stop], self.codec, self.dim)

    def scan(self, queries: list[npt.NDArray[np.float32]], threads: int, isa: str | None = None) -> None:
        """Score all documents for all queries in one scan."""
        kernels.maxsim_multi(queries, self.codes, self.offsets, self.codec, threads=threads, isa=isa)


def one_by_one(documents: Documents, queries: list[npt.NDArray[np.float32]]) -> None:
    """A scan per query, by two threads."""
    for query in queries:
        documents.scan([query], 2)


def lengths_of(count: int) -> npt.NDArray[np.int64]:
    """Offsets of `count` documents."""
    lengths = np.random.default_rng(3).integers(40, 201, size=count)
    return np.concatenate([[0], np.cumsum(lengths)])


def unit(rng: np.random.Generator, rows: int, dim: int) -> npt.NDArray[np.float32]:
    """float32 [rows, dim], unit rows."""
    matrix = rng.standard_normal((rows, dim), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix


def make(count: int, dim: int, codec: str) -> Documents:
    """Random documents, encoded a part at a time: the vectors themselves would not fit."""
    offsets = lengths_of(count)
    rng = np.random.default_rng(dim)
    step = max(1, (64 << 20) // (4 * dim))
    # A pool of vectors, encoded once and repeated: the speed of a scan doesn't depend on values.
    tokens = int(offsets[-1])
    pool = kernels.encode(unit(rng, min(step, tokens), dim), codec, threads=2).codes
    parts = [pool[: min(step, tokens - begin)] for begin in range(0, tokens, step)]
    return Documents(offsets, np.concatenate(parts), codec, dim)


def available_bytes() -> int:
    """Memory that may be taken without pushing others out."""
    with open("/proc/meminfo") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


def evict() -> None:
    """Leave nothing of anybody's in the caches."""
    kernels.read_bandwidth(_EVICT, threads=1, repeats=1)


def seconds(work: Callable[[], object]) -> float:
    """Of one call, from cold caches."""
    evict()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, interleaved, after one call of each that doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            took = seconds(work)
            if number:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def torch_maxsim(
    query: torch.Tensor, tokens: torch.Tensor, offsets: npt.NDArray[np.int64], budget: int = 16_384
) -> torch.Tensor:
    """A bf16 matrix product and a maximum per document, some whole documents at a time, so that the similarities
    stay in the second-level cache."""
    scores = torch.empty(len(offsets) - 1)
    lengths = torch.from_numpy(np.diff(offsets))
    first = 0
    while first < len(scores):
        stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + budget, side="right")) - 1)
        block = tokens[offsets[first] : offsets[stop]] @ query.T
        best = torch.segment_reduce(block.float(), "max", lengths=lengths[first:stop], axis=0)
        scores[first:stop] = best.sum(dim=1)
        first = stop
    return scores


def peers(count: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of every library on the same documents, d = 128, 32 query tokens."""
    rng = np.random.default_rng(1)
    offsets = lengths_of(count)
    pool = unit(rng, min(int(offsets[-1]), 1 << 19), DIM)
    vectors = np.concatenate(
        [pool[: min(len(pool), int(offsets[-1]) - at)] for at in range(0, int(offsets[-1]), len(pool))]
    )
    query = unit(rng, QUERY_TOKENS, DIM)
    torch.set_num_threads(threads)
    result: dict[str, dict[str, float]] = {}
    contenders: dict[str, Callable[[], object]] = {}
    documents = Documents(offsets, kernels.encode(vectors, "int8", threads=2).codes, "int8", DIM)
    contenders["int8"] = partial(documents.scan, [query], threads)
    half = torch.from_numpy(vectors).bfloat16()
    narrow = torch.from_numpy(query).bfloat16()
    contenders["torch_bf16"] = lambda: torch_maxsim(narrow, half, offsets)
    float16 = vectors.astype(np.float16)
    contenders["numpy"] = lambda: portable.maxsim(query, float16, offsets)
    matrices = [vectors[offsets[i] : offsets[i + 1]] for i in range(count)]
    contenders["maxsim_cpu"] = lambda: maxsim_cpu.maxsim_scores_variable(query, matrices)
    with torch.inference_mode():
        took = medians(contenders, rounds)
    for name, value in took.items():
        result[name] = {"tokens_per_s": round(int(offsets[-1]) / value)}
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; the result is what `--json` prints."""
    rounds = 3 if options.quick else options.rounds
    sizes = SIZES[:2] if options.quick else SIZES
    capabilities = kernels.capabilities()
    result: dict[str, Any] = {
        "benchmark": "maxsim",
        "cpus": len(os.sched_getaffinity(0)),
        "isa": capabilities["isa"],
        "paths": capabilities["paths"],
        "rounds": rounds,
        "tokens_per_s": {},
        "left_out": [],
    }
    rng = np.random.default_rng(0)
    query = unit(rng, QUERY_TOKENS, DIM)
    largest = sizes[-1]

    # Ours at every size, and reading the same bytes.
    read: dict[str, float] = {}
    for codec in CODECS:
        whole = make(largest, DIM, codec)
        for count in sizes:
            documents = whole.head(count)
            for threads in (1, 2):
                say(f"{codec} {count} documents, {threads} threads")
                took = medians({"scan": partial(documents.scan, [query], threads)}, rounds)["scan"]
                put(result, codec, count, DIM, QUERY_TOKENS, threads, documents.tokens / took)
        for threads in (1, 2):
            read[f"{codec} {threads}"] = kernels.read_bandwidth(whole.codes, threads=threads, repeats=rounds)
        if codec == "int8":
            queries = [unit(rng, QUERY_TOKENS, DIM) for _ in range(8)]
            took8 = medians(
                {
                    "one": partial(whole.scan, queries, 2),
                    "eight": partial(one_by_one, whole, queries),
                },
                min(rounds, 3),
            )
            result["multi_query_gain"] = round(took8["eight"] / took8["one"], 3)
            lower = [isa for isa in ("avx512", "avx2") if isa in capabilities["levels"]]
            part = whole.head(min(largest, 10_000))
            slower = medians({isa: partial(part.scan, [query], 2, isa) for isa in lower}, rounds)
            result["forced_tokens_per_s"] = {isa: round(part.tokens / took) for isa, took in slower.items()}
    # The other limit: products that the multipliers could do in the same time.
    result["multiply_products_per_s"] = {
        str(threads): round(kernels.multiply_rate(threads=threads, repeats=rounds)) for threads in (1, 2)
    }
    result["fraction_of_multiply_rate"] = {
        f"int8 {threads}": round(
            speed(result, "int8", largest, threads)
            * DIM
            * QUERY_TOKENS
            / max(1, result["multiply_products_per_s"][str(threads)]),
            3,
        )
        for threads in (1, 2)
    }
    result["read_gb_per_s"] = {name: round(value / 1e9, 2) for name, value in read.items()}
    result["fraction_of_read_bandwidth"] = {
        f"{codec} {threads}": round(
            speed(result, codec, largest, threads)
            * DIM
            * BYTES_PER_ELEMENT[codec]
            / read[f"{codec} {threads}"],
            3,
        )
        for codec in CODECS
        for threads in (1, 2)
    }

    # One thing at a time, at 10,000 documents.
    sweep = [(dim, QUERY_TOKENS) for dim in (48, 96, 1024)] + [(DIM, tokens) for tokens in (1, 300, 1024)]
    for codec in CODECS:
        for dim, tokens in sweep:
            count = sizes[min(1, len(sizes) - 1)]
            all_tokens = int(lengths_of(count)[-1])
            name = f"{codec} d={dim} q={tokens} documents={count}"
            if all_tokens * dim * BYTES_PER_ELEMENT[codec] > options.gib * 2**30:
                result["left_out"].append(f"{name}: more than {options.gib} GiB")
                continue
            if all_tokens * dim * tokens > options.products:
                count = sizes[0]
                result["left_out"].append(
                    f"{name}: more than {options.products:.0e} products; {count} documents instead"
                )
            documents = make(count, dim, codec)
            asked = unit(rng, tokens, dim)
            for threads in (1, 2):
                say(f"{codec} d={dim} q={tokens}, {threads} threads")
                took = medians({"scan": partial(documents.scan, [asked], threads)}, min(rounds, 7))["scan"]
                put(result, codec, count, dim, tokens, threads, documents.tokens / took)

    # Everybody on the same documents.
    # The others need float32, float16 and bfloat16 vectors, and some copy them: about 16 bytes an element.
    room = int(0.6 * available_bytes() / (120 * DIM * 16))
    count = min(largest, options.peer_documents, room)
    if count < min(largest, options.peer_documents):
        result["left_out"].append(f"other libraries beyond {count} documents: too little memory here")
    for threads in (1, 2):
        say(f"all libraries, {count} documents, {threads} threads")
        found = peers(count, threads, rounds if threads == 2 else min(rounds, 3))
        ours = found["int8"]["tokens_per_s"]
        suffix = "" if threads == 2 else "_1_thread"
        for peer in ("maxsim_cpu", "torch_bf16", "numpy"):
            result[f"ratio_vs_{peer}{suffix}"] = round(ours / found[peer]["tokens_per_s"], 2)
        result[f"peers{suffix}"] = {name: value["tokens_per_s"] for name, value in found.items()}
    result["peer_documents"] = count

    tokens16 = unit(rng, 400_000 if not options.quick else 50_000, DIM).astype(np.float16)
    took = medians({"encode": lambda: kernels.encode(tokens16, "int8", threads=2)}, rounds)["encode"]
    result["encode_tokens_per_s"] = round(len(tokens16) / took)

    reached = {
        "ratio_vs_maxsim_cpu": result["ratio_vs_maxsim_cpu"],
        "ratio_vs_torch_bf16": result["ratio_vs_torch_bf16"],
        "fraction_of_read_bandwidth": result["fraction_of_read_bandwidth"]["int8 2"],
        "int4_over_int8": round(speed(result, "int4", largest, 2) / speed(result, "int8", largest, 2), 3),
        "encode_tokens_per_s": result["encode_tokens_per_s"],
    }
    result["targets"] = {
        name: {"value": reached[name], "target": target, "reached": reached[name] >= target}
        for name, target in TARGETS.items()
    }
    result["targets_hold_for_this_machine"] = bool(capabilities["cpu"]["amx_int8"])
    return result


def key_of(codec: str, count: int, dim: int, tokens: int, threads: int) -> str:
    """Name of a figure."""
    return f"{codec} documents={count} d={dim} q={tokens} threads={threads}"


def put(
    result: dict[str, Any], codec: str, count: int, dim: int, tokens: int, threads: int, value: float
) -> None:
    """Note a figure."""
    result["tokens_per_s"][key_of(codec, count, dim, tokens, threads)] = round(value)


def speed(result: dict[str, Any], codec: str, count: int, threads: int) -> float:
    """A figure of the core."""
    return float(result["tokens_per_s"][key_of(codec, count, DIM, QUERY_TOKENS, threads)])


def say(what: str) -> None:
    """Progress."""
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="small sizes, three rounds: does it run at all?")
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed calls of each, at least 7 for figures to keep"
    )
    parser.add_argument("--gib", type=float, default=4.0, help="most memory of one corpus")
    parser.add_argument(
        "--products", type=float, default=4e10, help="most multiplications of one scan of a sweep"
    )
    parser.add_argument("--peer-documents", type=int, default=100_000, help="corpus for other libraries")
    options = parser.parse_args()
    if options.quick:
        options.peer_documents = min(options.peer_documents, 2_000)
    result = run(options)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
