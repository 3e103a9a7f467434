"""`phasemesh collections` against a served mesh."""

from __future__ import annotations

import asyncio
import json

import numpy as np
from typer.testing import CliRunner

from phasemesh.cli.collections_group import group
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.material import unit_rows
from tests.unit.retrieval.stack import Stack, given


async def run(served: Stack, *arguments: str, code: int = 0) -> str:
    """What a command prints."""
    done = await asyncio.to_thread(CliRunner().invoke, group, [*arguments, "--target", served.target])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


async def test_a_collection_is_shown_tagged_restored_compacted_and_deleted(served: Stack, name: str) -> None:
    await served.create(name)
    random = np.random.default_rng(1)
    for n in range(3):
        await served.upsert(given(f"d{n}", unit_rows(random, 2)), name=name)
    lines = (await run(served, "list", "--json")).splitlines()
    found = next(json.loads(line) for line in lines if json.loads(line)["spec"]["name"] == name)
    assert (found["documents"], found["tokens"]) == ("3", "6")
    assert name[:8] in await run(served, "list")
    number = int(json.loads(await run(served, "show", name))["version"]["number"])

    assert await run(served, "tag", name, "v1") == f"v1 is version {number}\n"
    assert await run(served, "tag", name, "v1", "--version", str(number - 1), "--move") == (
        f"v1 is version {number - 1}\n"
    )
    assert await run(served, "restore", name, "--tag", "v1", "--yes") == (
        f"restored as version {number + 1}\n"
    )
    count = await served("CountDocuments", pb.CountDocumentsRequest(collection=name))
    assert count.documents == 2
    await run(served, "restore", name, "--version", str(number), "--yes")
    assert (await run(served, "compact", name)).startswith("3 fragments became 1; version ")
    assert await run(served, "tag", name, "v1", "--remove") == "v1 is gone\n"
    await run(served, "restore", name, "--yes", code=1)
    await run(served, "tag", name, "v1", "--remove", "--move", code=1)
    await run(served, "delete", name, "--yes")
    await run(served, "show", name, code=1)
