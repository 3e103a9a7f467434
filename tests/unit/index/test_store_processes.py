"""Several processes on one collection, and a writer that is killed in the middle of its work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path

import lance
import pytest

from phasemesh.index.catalogue import Catalogue, dataset_path
from phasemesh.index.commit import StoreOptions
from phasemesh.index.durability import Durability
from phasemesh.index.spec import CatalogueEntry
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import EVERYTHING, SPEC, assert_same, make_document

ROUNDS = 100
WRITERS = 3
IDS_PER_ROUND = 4

# As retrieval processes are configured, but for syncing, which isn't what is tested here.
OPTIONS = StoreOptions(durability=Durability.PROCESS, conflict_timeout_s=60.0)


def write_rounds(root: Path, entry: CatalogueEntry, writer: int, barrier: Barrier) -> None:
    """Insert the same new ids as the other writers, at the same moment, round after round."""
    store = CollectionStore(root, "acme", entry, OPTIONS)
    for round_number in range(ROUNDS):
        documents = [make_document(f"r{round_number}-{n}", 2, seed=writer) for n in range(IDS_PER_ROUND)]
        barrier.wait(60.0)
        store.upsert(documents)


@pytest.mark.slow
def test_concurrent_inserts_of_one_id_leave_one_row(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(WRITERS)
    writers = [
        context.Process(target=write_rounds, args=(tmp_path, entry, writer, barrier))
        for writer in range(WRITERS)
    ]
    for process in writers:
        process.start()
    for process in writers:
        process.join(240.0)
    assert [process.exitcode for process in writers] == [0] * WRITERS

    dataset = lance.dataset(str(dataset_path(tmp_path, "acme", entry.incarnation)))
    rows = Counter(dataset.to_table(columns=["id"]).column("id").to_pylist())
    expected = [f"r{round_number}-{n}" for round_number in range(ROUNDS) for n in range(IDS_PER_ROUND)]
    assert rows == Counter(expected)
    # Each batch was one commit, so a round's documents are all of the writer that came last.
    store = CollectionStore(tmp_path, "acme", entry, OPTIONS)
    found, _ = store.get(expected, store.latest(), EVERYTHING)
    last: dict[str, int] = {}
    for document in found:
        seed = int((document.text or "").split()[1])
        assert_same(document, make_document(document.id, 2, seed=seed))
        assert last.setdefault(document.id.split("-")[0], seed) == seed


WRITE_LOOP = """
import os, sys
from pathlib import Path
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import SPEC, make_document

root, start = Path(sys.argv[1]), int(sys.argv[2])
store = CollectionStore(root, "acme", Catalogue(root).get("acme", SPEC.name))
for number in range(start, start + 100_000):
    # Three new documents, and one that every round replaces.
    documents = [make_document(f"w{number}-{n}", 3) for n in range(3)]
    store.upsert([*documents, make_document("hot", 2, seed=number)])
    if number % 3 == 2:
        store.delete([f"w{number - 1}-0"])
        os.write(1, f"deleted {number - 1}\\n".encode())
    os.write(1, f"wrote {number}\\n".encode())
"""


def run_until_killed(root: Path, start: int, lines: int, delay_s: float) -> list[str]:
    """Run the loop, kill -9 it `delay_s` after it acknowledged some writes, and return what it acknowledged."""
    command = [sys.executable, "-c", WRITE_LOOP, str(root), str(start)]
    here = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().decode() for _ in range(lines)]
        time.sleep(delay_s)  # lands the kill anywhere within a commit; nothing is waited for
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().decode().splitlines(keepends=True)
    assert process.returncode == -signal.SIGKILL
    # A line may be cut by the kill; what it would have said was not acknowledged.
    return [line.strip() for line in acknowledged if line.endswith("\n")]


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    start = 0
    for kill in range(8):
        lines = run_until_killed(tmp_path, start, 3 + kill, delay_s=0.0021 * kill)
        wrote = [int(line.split()[1]) for line in lines if line.startswith("wrote")]
        deleted = {int(line.split()[1]) for line in lines if line.startswith("deleted")}
        assert wrote == list(range(start, start + len(wrote)))

        store = CollectionStore(tmp_path, "acme", entry, OPTIONS)
        version = store.latest()
        first_open = wrote[-1] + 1  # the one write that may be there or not
        ids = [f"w{number}-{n}" for number in range(start, first_open + 3) for n in range(3)]
        found = {document.id: document for document in store.get(ids, version, EVERYTHING)[0]}
        for number in wrote:
            # The deletion of a document of the last-but-one write may have been under way, too.
            unsure = number == first_open - 1 and first_open % 3 == 2
            expected = {f"w{number}-{n}" for n in range(3)} - (
                {f"w{number}-0"} if number in deleted else set()
            )
            there = {name for name in found if name.startswith(f"w{number}-")}
            assert there == expected or (unsure and there == expected - {f"w{number}-0"})
        whole = {f"w{first_open}-{n}" for n in range(3)}
        assert whole & set(found) in (whole, set())
        assert not any(name.startswith((f"w{first_open + 1}-", f"w{first_open + 2}-")) for name in found)
        for document in found.values():
            assert_same(document, make_document(document.id, 3))
        # What one commit replaced and what it inserted belong together.
        [hot] = store.get(["hot"], version, EVERYTHING)[0]
        newest = first_open if whole <= set(found) else first_open - 1
        assert_same(hot, make_document("hot", 2, seed=newest))
        assert store.read_tokens(store.fragments(version)[-1].fragment_id, version).ids
        start = first_open + 3
