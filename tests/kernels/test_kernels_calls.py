"""How calls run: ended from another thread or by a checkpoint, without the GIL, with large arrays left where they lie,
and within the limits of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import brute

pk = pytest.importorskip(
    "phasemesh_kernels", reason="phasemesh-kernels isn't installed (pip install ./workers/kernels)"
)

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((3, 32), dtype=np.float32)
CODES = RNG.integers(0, 256, (10, 32), np.uint8)
OFFSETS = np.array([0, 4, 4, 10])
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Hours:
    """Work that nobody would wait for: one document, often."""

    codes = RNG.integers(0, 256, (64, 1024), np.uint8)
    query = RNG.standard_normal((1024, 1024), dtype=np.float32)
    select = np.zeros(10_000_000, np.int32)

    @classmethod
    def run(cls, **options: Any) -> None:
        pk.maxsim(cls.query, cls.codes, [0, 64], "int8", select=cls.select, **options)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_is_cancelled_from_another_thread(threads: int) -> None:
    token = pk.CancelToken()
    begun = threading.Event()

    def cancel() -> None:
        begun.wait()
        token.cancel()

    other = threading.Thread(target=cancel)
    other.start()
    assert not token.cancelled
    with pytest.raises(pk.Cancelled):
        Hours.run(threads=threads, cancel=token, checkpoint=begun.set)
    other.join()
    assert token.cancelled
    assert issubclass(pk.Cancelled, RuntimeError)
    for function, more in ((pk.maxsim, ()), (pk.maxsim_topk, (3,))):
        with pytest.raises(pk.Cancelled):
            function(QUERY, CODES, OFFSETS, *more, codec="int8", cancel=token)


class Enough(Exception):
    pass


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_what_a_checkpoint_raises_ends_the_call(threads: int, at: int) -> None:
    calls: list[int] = []

    def checkpoint() -> None:
        calls.append(threading.get_ident())
        if len(calls) == at:
            raise Enough(at)

    with pytest.raises(Enough) as caught:
        Hours.run(threads=threads, checkpoint=checkpoint)
    assert caught.value.args == (at,)
    assert calls == [threading.get_ident()] * at


def test_the_checkpoint_is_called_before_a_short_call_begins() -> None:
    calls: list[None] = []
    pk.maxsim(QUERY, CODES, OFFSETS, "int8", checkpoint=lambda: calls.append(None))
    assert len(calls) >= 1


def test_a_checkpoint_may_scan_by_itself(isas: list[str]) -> None:
    codes = RNG.integers(0, 256, (300, 1024), np.uint8)
    for isa in isas:
        expected = pk.maxsim(Hours.query[:100], codes, [0, 1, 300], "int8", isa=isa)
        inner: list[brute.Floats] = []

        def scan(isa: str = isa, inner: list[brute.Floats] = inner) -> None:
            inner.append(pk.maxsim(QUERY, CODES, OFFSETS, "int8", isa=isa))

        found = pk.maxsim(Hours.query[:100], codes, [0, 1, 300], "int8", isa=isa, checkpoint=scan)
        np.testing.assert_array_equal(found, expected)
        for scores in inner:
            np.testing.assert_array_equal(scores, pk.maxsim(QUERY, CODES, OFFSETS, "int8"))


def test_a_long_call_lets_other_threads_run() -> None:
    """The call ends once another thread has counted far: had it kept the GIL, it would never end."""
    token = pk.CancelToken()
    begun = threading.Event()
    count = 0

    def other() -> None:
        nonlocal count
        begun.wait()
        while count < 2_000_000:
            count += 1
        token.cancel()

    thread = threading.Thread(target=other)
    thread.start()
    begun.set()
    with pytest.raises(pk.Cancelled):
        Hours.run(cancel=token)
    thread.join()
    assert count == 2_000_000


def resident() -> int:
    """Bytes of memory of this process that belong to it alone."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@linux
@pytest.mark.parametrize(("codec", "dtype"), [("int8", np.uint8), ("int4", np.uint8), ("f16", np.float16)])
def test_a_mapped_file_is_read_where_it_lies(tmp_path: Path, codec: str, dtype: Any) -> None:
    path = tmp_path / "codes"
    columns = 64 if codec == "int4" else 128
    rows = 2**28 // (columns * np.dtype(dtype).itemsize)  # 256 MiB of zeros that take no space
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2**28)
    codes = np.memmap(path, dtype, "r", shape=(rows, columns))
    offsets = np.arange(0, rows + 1, 1024)
    query = RNG.standard_normal((4, 128), dtype=np.float32)
    query = np.concatenate([query, -query])
    pk.maxsim(query, codes[:1024], [0, 1024], codec)
    before = resident()
    peak = before

    def look() -> None:
        nonlocal peak
        peak = max(peak, resident())

    scores = pk.maxsim(query, codes, offsets, codec, checkpoint=look)
    look()
    assert len(set(scores.tolist())) == 1
    assert peak - before < 2**26
    # Codes that change in the file change the scores: no copy was kept.
    with path.open("r+b") as file:
        file.seek(2**27)
        file.write(b"\x3c" * 128)
    assert len(set(pk.maxsim(query, codes, offsets, codec).tolist())) == 2


@linux
def test_mapped_tokens_are_encoded_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = np.memmap(path, np.float32, "w+", shape=(2**18, 256))  # 256 MiB
    tokens[:, 0] = 1
    tokens.flush()
    del tokens
    mapped = np.memmap(path, np.float32, "r", shape=(2**18, 256))
    before = resident()
    encoded = pk.encode(mapped, "int4")
    assert encoded.codes.nbytes == 2**25
    assert resident() - before < 2**26


@pytest.mark.parametrize(
    ("value", "message"), [("sse9", "PHASEMESH_KERNELS_ISA: "), ("amx-model", "PHASEMESH_KERNELS_ISA: ")]
)
def test_a_wrong_limit_in_the_environment_is_named(value: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import phasemesh_kernels"],
        env={**os.environ, "PHASEMESH_KERNELS_ISA": value},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_the_environment_limits_what_is_used() -> None:
    code = "import phasemesh_kernels as pk; c = pk.capabilities(); print(c['isa'], c['forced'], *sorted(set(c['paths'].values())))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PHASEMESH_KERNELS_ISA": "portable"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["portable", "portable", "portable"]


@linux
def test_read_bandwidth_bears_more_threads_than_there_can_be() -> None:
    # In a process of its own, which may not have so many: it ends with a number or an error, never by a signal.
    code = (
        "import resource, numpy as np, phasemesh_kernels as pk\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "try:\n    print(pk.read_bandwidth(np.zeros(10**6), threads=2000, repeats=1) > 0)\n"
        "except (ValueError, MemoryError, RuntimeError):\n    print('error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
