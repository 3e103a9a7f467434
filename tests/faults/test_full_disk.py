"""A full disk below the data root: writes say so, nothing acknowledged is lost, and room is all it takes to go on."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phasemesh.errors import Unavailable
from phasemesh.v1 import retrieval_pb2 as pb
from tests.faults.test_collections import (
    assert_equal,
    brute_force,
    call,
    collection_of,
    document,
    search,
    unit,
)
from tests.mesh import running_mesh

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    """Take all the room that is left."""
    with open(file, "wb", buffering=0) as out:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    out.write(bytes(size))
            except OSError:
                pass


async def test_a_full_disk_refuses_writes_and_loses_nothing(small_disk: Path) -> None:
    rng = np.random.default_rng(5)
    stored = {f"first-{n}": unit(rng, 9) for n in range(20)}
    query = unit(rng, 4)
    with running_mesh("--no-ray", "--data-dir", str(small_disk / "data")) as mesh:
        await collection_of(mesh, "c", stored)

        async def write(number: int) -> None:
            batch = {f"{number}-{part}": unit(rng, 400) for part in range(40)}
            rows = [document(key, vectors) for key, vectors in batch.items()]
            await call(mesh, "UpsertDocuments", pb.UpsertDocumentsRequest(collection="c", documents=rows))
            stored.update(batch)

        async def write_until_refused() -> None:
            for number in range(200):
                await write(number)

        with pytest.raises(Unavailable, match="data_dir is full") as refused:
            await write_until_refused()
        assert refused.value.reason == "STORAGE_FULL"
        assert len(stored) > 100
        assert_equal(await search(mesh, "c", query), brute_force(stored, query, 10))
        count = pb.CountDocumentsRequest(collection="c")
        assert (await call(mesh, "CountDocuments", count)).documents == len(stored)

        # To the last byte: what starts again now can't write a thing, and answers all the same.
        filler = small_disk / "filler"
        await asyncio.to_thread(fill, filler)
        for index in (0, 1):
            victim = mesh.report(f"scorer-{index}").pid
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(
                mesh.wait_until,
                lambda at=index, pid=victim: mesh.report(f"scorer-{at}").pid != pid,
                40,
                "a restart",
            )
        assert_equal(await search(mesh, "c", query), brute_force(stored, query, 10))
        assert mesh.admin("scorer-0", "/readyz")[0] == 200
        spec = pb.CollectionSpec(name="new", token_dimension=16)
        with pytest.raises(Unavailable, match="data_dir is full"):
            await call(mesh, "CreateCollection", pb.CreateCollectionRequest(spec=spec))
        listed = await call(mesh, "ListCollections", pb.ListCollectionsRequest())
        assert [one.spec.name for one in listed.collections] == ["c"]
        filler.unlink()

        enlarge = ["mount", "-o", "remount,size=256m", str(small_disk)]
        await asyncio.to_thread(subprocess.run, enlarge, check=True)
        await write(1000)
        assert_equal(await search(mesh, "c", query), brute_force(stored, query, 10))
        assert (await call(mesh, "CountDocuments", count)).documents == len(stored)
