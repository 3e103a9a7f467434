"""MaxSim on this machine's CPUs: the kernels beside other libraries, and beside reading the codes at all.

Everything is measured in one run, interleaved: each round does the same work with every contender, at the same
number of threads, and figures are medians over rounds. Caches are emptied before every timed call, since a scan of
a corpus never finds it there.

The core is d = 128 and 32 query tokens, for 1,000, 10,000 and 100,000 documents; dimensions and query lengths are
swept one at a time at 10,000 documents. What would need more memory than `--gib`, or more multiplications in one
scan than `--products`, is left out, and `left_out` says so. `--full` takes every combination that fits in memory,
and the peers at 100,000 documents: hours, and some 20 GB.

`neighbours` is the part of the machine that others used during each stage. Above `QUIET` the stage's figures are no
figures, ratios least of all, and targets that rest on it are neither reached nor missed: `reached` is null.

    python -m tests.bench.maxsim --json
    python -m tests.bench.maxsim --json --quick
    python -m tests.bench.maxsim --json --full
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

import phasemesh_kernels as kernels
from tests.bench.maxsim_corpus import (
    BYTES_PER_ELEMENT,
    Documents,
    Neighbours,
    available_gib,
    make,
    medians,
    offsets_of,
    say,
    unit,
)
from tests.bench.maxsim_peers import CODECS, DIM, QUERY_TOKENS, compare

SIZES = (1_000, 10_000, 100_000)
DIMS = (48, 96, 128, 1024)
QUERY_LENGTHS = (1, 32, 300, 1024)
THREADS = (1, 2)
PEERS = ("maxsim_cpu", "torch_bf16", "numpy")
#: Most that others may use of the machine.
QUIET = 0.05
#: To reach on a machine with AMX, by two threads, at d = 128 and 100,000 documents.
#: With the stage that measures each.
TARGETS = {
    "ratio_vs_maxsim_cpu": (30.0, "peers"),
    "ratio_vs_torch_bf16": (15.0, "peers"),
    "fraction_of_read_bandwidth": (0.75, "core"),
    "int4_over_int8": (1.3, "core"),
    "encode_tokens_per_s": (5e6, "encode"),
}


class Figures:
    """What has been measured: `result` is what `--json` prints."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.speeds: dict[str, int] = {}
        self.result: dict[str, Any] = {"tokens_per_s": self.speeds, "left_out": [], "neighbours": {}}

    def put(self, documents: Documents, query_tokens: int, threads: int, seconds: float) -> None:
        """Note the time of a scan."""
        count = len(documents.offsets) - 1
        key = key_of(documents.codec, count, documents.dim, query_tokens, threads)
        self.speeds[key] = round(documents.tokens / seconds)

    def speed(self, codec: str, count: int, threads: int) -> int:
        """Tokens per second of the core."""
        return self.speeds[key_of(codec, count, DIM, QUERY_TOKENS, threads)]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note how busy others keep the machine meanwhile."""
        neighbours = Neighbours()
        yield
        self.result["neighbours"][name] = neighbours.share()

    def leave_out(self, why: str) -> None:
        """Say what isn't measured."""
        say(f"left out: {why}")
        self.result["left_out"].append(why)


def key_of(codec: str, count: int, dim: int, query_tokens: int, threads: int) -> str:
    """Name of a figure."""
    return f"{codec} documents={count} d={dim} q={query_tokens} threads={threads}"


def core(figures: Figures, sizes: tuple[int, ...]) -> None:
    """Ours at every size, beside reading the same pages; lower instruction sets; eight queries in one scan."""
    rng = np.random.default_rng(0)
    query = unit(rng, QUERY_TOKENS, DIM)
    result = figures.result
    for name in ("read_gb_per_s", "fraction_of_read_bandwidth", "forced_tokens_per_s"):
        result[name] = {}
    levels = kernels.capabilities()["levels"]
    for codec in CODECS:
        whole = make(sizes[-1], DIM, codec)
        # What reading alone and multiplying alone reach, by their own clocks: a call does it several times.
        reads: dict[int, list[float]] = {threads: [] for threads in THREADS}
        products: dict[int, list[float]] = {threads: [] for threads in THREADS}
        for count in sizes:
            say(f"{codec}: {count} documents")
            documents = whole.head(count)
            work: dict[str, Callable[[], object]] = {
                f"scan {threads}": partial(documents.scan, [query], threads) for threads in THREADS
            }
            if count == sizes[-1]:
                work |= {
                    f"read {threads}": partial(read, whole, threads, reads[threads]) for threads in THREADS
                }
                if codec == "int8":
                    work |= {
                        f"multiply {threads}": partial(multiply, threads, products[threads])
                        for threads in THREADS
                    }
            took = medians(work, figures.rounds)
            for threads in THREADS:
                figures.put(documents, QUERY_TOKENS, threads, took[f"scan {threads}"])
        for threads in THREADS:
            # The best that reading does, but the median of ours.
            best = max(reads[threads])
            used = figures.speed(codec, sizes[-1], threads) * DIM * BYTES_PER_ELEMENT[codec]
            result["read_gb_per_s"][f"{codec} {threads}"] = round(best / 1e9, 2)
            result["fraction_of_read_bandwidth"][f"{codec} {threads}"] = round(used / best, 3)

        say(f"{codec}: lower instruction sets")
        part = whole.head(min(sizes[-1], 10_000))
        lower = [isa for isa in ("avx512", "avx2") if isa in levels]
        took = medians({isa: partial(part.scan, [query], 2, isa) for isa in lower}, figures.rounds)
        for isa, seconds in took.items():
            result["forced_tokens_per_s"][f"{codec} {isa}"] = round(part.tokens / seconds)

        if codec == "int8":
            say("int8: eight queries, in one scan and in eight")
            queries = [unit(rng, QUERY_TOKENS, DIM) for _ in range(8)]
            took = medians(
                {"one": partial(whole.scan, queries, 2), "eight": partial(one_by_one, whole, queries)},
                figures.rounds,
            )
            result["multi_query_gain"] = round(took["eight"] / took["one"], 3)
            multipliers(figures, sizes[-1], {threads: max(rates) for threads, rates in products.items()})


def read(documents: Documents, threads: int, rates: list[float]) -> None:
    """Read the codes and nothing else; bytes per second are appended to `rates`."""
    rates.append(kernels.read_bandwidth(documents.codes, threads=threads, repeats=1))


def multiply(threads: int, rates: list[float]) -> None:
    """Multiply 8-bit integers and do nothing else; products per second are appended to `rates`."""
    rates.append(kernels.multiply_rate(threads=threads, repeats=1))


def one_by_one(documents: Documents, queries: list[npt.NDArray[np.float32]]) -> None:
    """A scan per query, by two threads."""
    for query in queries:
        documents.scan([query], 2)


def multipliers(figures: Figures, count: int, rates: dict[int, float]) -> None:
    """The other limit: products that the multipliers could do in the same time."""
    figures.result["multiply_products_per_s"] = {str(threads): round(rate) for threads, rate in rates.items()}
    figures.result["fraction_of_multiply_rate"] = {
        f"int8 {threads}": round(figures.speed("int8", count, threads) * DIM * QUERY_TOKENS / rate, 3)
        if rate
        else None
        for threads, rate in rates.items()
    }


def sweeps(figures: Figures, cells: list[tuple[int, int, int]], gib: float, products: float) -> None:
    """Other (documents, dimension, query tokens) than the core's."""
    rng = np.random.default_rng(1)
    for codec in CODECS:
        documents: Documents | None = None
        for count, dim, query_tokens in sorted(cells):
            name = f"{codec} documents={count} d={dim} q={query_tokens}"
            tokens = int(offsets_of(count)[-1])
            if tokens * dim * BYTES_PER_ELEMENT[codec] > gib * 2**30:
                figures.leave_out(f"{name}: more than {gib:g} GiB of codes")
                continue
            if tokens * dim * query_tokens > products:
                figures.leave_out(f"{name}: more than {products:.0e} products; {SIZES[0]} documents instead")
                count = SIZES[0]
            if key_of(codec, count, dim, query_tokens, THREADS[0]) in figures.speeds:
                continue
            if documents is None or (len(documents.offsets) - 1, documents.dim) != (count, dim):
                documents = None  # before the next is made: two of them may not fit
                documents = make(count, dim, codec)
            say(f"{codec}: {count} documents, d = {dim}, {query_tokens} query tokens")
            query = unit(rng, query_tokens, dim)
            took = medians(
                {str(threads): partial(documents.scan, [query], threads) for threads in THREADS},
                figures.rounds,
            )
            for threads in THREADS:
                figures.put(documents, query_tokens, threads, took[str(threads)])


def peers(figures: Figures, count: int) -> None:
    """Every library on the same documents; int8 against each."""
    result = figures.result
    result["peer_documents"] = count
    for threads in THREADS:
        say(f"all libraries: {count} documents, {threads} threads")
        found = compare(threads, count, figures.rounds)
        speeds = found["tokens_per_s"]
        suffix = "" if threads == THREADS[-1] else f"_{threads}_thread"
        for peer in PEERS:
            result[f"ratio_vs_{peer}{suffix}"] = (
                round(speeds["int8"] / speeds[peer], 2) if peer in speeds else None
            )
        result[f"peers{suffix}"] = found


def encoding(figures: Figures, tokens: int) -> None:
    """int8 codes of float16 vectors, by two threads."""
    say(f"encode {tokens} tokens")
    vectors = unit(np.random.default_rng(2), tokens, DIM).astype(np.float16)
    took = medians({"encode": lambda: kernels.encode(vectors, "int8", threads=2)}, figures.rounds)["encode"]
    figures.result["encode_tokens_per_s"] = round(tokens / took)


def judge(figures: Figures, largest: int, needs_met: bool) -> None:
    """Set what there is to reach beside what has been."""
    result = figures.result
    values = {
        "ratio_vs_maxsim_cpu": result["ratio_vs_maxsim_cpu"],
        "ratio_vs_torch_bf16": result["ratio_vs_torch_bf16"],
        "fraction_of_read_bandwidth": result["fraction_of_read_bandwidth"]["int8 2"],
        "int4_over_int8": round(figures.speed("int4", largest, 2) / figures.speed("int8", largest, 2), 3),
        "encode_tokens_per_s": result["encode_tokens_per_s"],
    }
    neighbours = result["neighbours"]
    result["targets"] = {}
    for name, (target, stage) in TARGETS.items():
        value = values[name]
        known = value is not None and (neighbours[stage] is None or neighbours[stage] <= QUIET)
        result["targets"][name] = {
            "value": value,
            "target": target,
            "reached": value >= target if known else None,
            "needs_amx": True,
        }
    result["targets_hold_for_this_machine"] = needs_met


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; the result is what `--json` prints."""
    capabilities = kernels.capabilities()
    figures = Figures(2 if options.quick else options.rounds)
    sizes = SIZES[:2] if options.quick else SIZES
    figures.result |= {
        "benchmark": "maxsim",
        "cpus": len(os.sched_getaffinity(0)),
        "isa": capabilities["isa"],
        "paths": capabilities["paths"],
        "capabilities": capabilities,
        "rounds": figures.rounds,
    }
    gib, most = (available_gib(), float("inf")) if options.full else (options.gib, options.products)
    with figures.stage("core"):
        core(figures, sizes)

    middle = sizes[0] if options.quick else SIZES[1]
    every = list(product(SIZES, DIMS, QUERY_LENGTHS))
    cells = [(middle, dim, QUERY_TOKENS) for dim in DIMS] + [
        (middle, DIM, tokens) for tokens in QUERY_LENGTHS
    ]
    if options.full:
        cells = every
    else:
        others = set(every) - set(cells) - {(count, DIM, QUERY_TOKENS) for count in sizes}
        figures.leave_out(
            f"{len(others)} other combinations of {SIZES} documents, d = {DIMS} and {QUERY_LENGTHS} query tokens: "
            "one thing at a time is varied; --full measures all"
        )
    with figures.stage("sweeps"):
        sweeps(figures, cells, gib, most)
    with figures.stage("peers"):
        peers(figures, options.peer_documents or (SIZES[-1] if options.full else middle))
    with figures.stage("encode"):
        encoding(figures, 50_000 if options.quick else 400_000)
    judge(figures, sizes[-1], bool(capabilities["cpu"]["amx_int8"]))
    return figures.result


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds: does it run at all?")
    parser.add_argument("--full", action="store_true", help="every combination that fits in memory")
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed calls of each, at least 7 for figures to keep"
    )
    parser.add_argument("--gib", type=float, default=4.0, help="most memory of one corpus")
    parser.add_argument("--products", type=float, default=5e10, help="most multiplications of one scan")
    parser.add_argument(
        "--peer-documents", type=int, help="corpus for other libraries (10,000; --full: 100,000)"
    )
    options = parser.parse_args()
    result = run(options)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
