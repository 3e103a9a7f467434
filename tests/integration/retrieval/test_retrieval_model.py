"""Retrieval on a real late-interaction model: from text to ranked documents as sentence-transformers ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder

from phasemesh.config.settings import EncoderSettings
from phasemesh.encoder.service import EncoderRuntime
from phasemesh.pool.inprocess import InProcessPool
from phasemesh.pool.protocol import ModelSpec
from phasemesh.pool.settings import PoolConfig
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import Truncation
from phasemesh.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from tests.fakes import checkpoints
from tests.unit.retrieval.stack import maxsim, serving, stack

TEXTS = [
    "short",
    "a, b. c! punctuation is skipped",
    "many words " * 40,
    "the quick brown fox jumps over the lazy dog",
    "naïve 日本 résumé",
    "zebra crossing at night",
    "an engine runs on oil",
    "oil paintings hang on the wall",
]
QUERIES = ["which animal jumps", "oil on the wall", "?!"]


async def test_text_to_ranked_documents(tmp_path: Path) -> None:
    checkpoint = checkpoints.colbert(tmp_path / "colbert")
    reference = MultiVectorEncoder(str(checkpoint), device="cpu")
    documents = [np.asarray(rows) for rows in reference.encode_document(TEXTS)]
    pool = await InProcessPool.start(
        PoolConfig(device="cpu", threads=1), (ModelSpec("colbert", str(checkpoint), dtype="float32"),)
    )
    encoder = EncoderRuntime(EncoderSettings(port=0, admin_port=0), pool.models, {}, pool, Metrics())
    await encoder.start()
    try:
        async with stack(tmp_path, encoders=False) as bare, serving(
            "encoder", "phasemesh.v1.EncoderService", add_EncoderServiceServicer_to_server, encoder.servicer,
            bare.settings, Metrics(),
        ) as (_, target):  # fmt: skip
            directory = ModelDirectory(bare.client, (target,), refresh_s=3600)
            await directory.refresh()
            async with stack(
                tmp_path, targets=[scorer.target for scorer in bare.scorers], directory=directory
            ) as served:
                await served.create(model="colbert")
                cut = Truncation(enabled=True)
                reply = await served.upsert(
                    *(pb.Document(id=f"{i}", text=text) for i, text in enumerate(TEXTS)), truncation=cut
                )
                assert [status.tokens for status in reply.documents] == [len(rows) for rows in documents]
                assert [status.truncated for status in reply.documents] == [i == 2 for i in range(len(TEXTS))]
                for text in QUERIES:
                    query = np.asarray(reference.encode_query([text])[0])
                    expected = {f"{i}": maxsim(query, rows) for i, rows in enumerate(documents)}
                    found = {hit.id: hit.score for hit in (await served.search(text, 100)).hits}
                    # Vectors travel and are stored as float16.
                    assert found == pytest.approx(expected, rel=2e-3)
                    order = [hit.id for hit in (await served.search(text, 100)).hits]
                    scores = [expected[key] for key in order]
                    assert all(a >= b - 4e-3 * abs(b) for a, b in itertools.pairwise(scores))
    finally:
        await encoder.drain()
        await encoder.close()
        await pool.close()
