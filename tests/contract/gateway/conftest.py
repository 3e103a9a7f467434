from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.gateway_stack import Stack, running_gateway

CALLER_KEY = "caller-key-1234"
MESH_KEY = "mesh-key-5678"


@pytest_asyncio.fixture(scope="session")
async def shared_stack() -> AsyncIterator[Stack]:
    async with running_gateway(
        {"gateway.max_body_bytes": 200_000, "gateway.max_inputs": 64, "gateway.request_timeout_s": 20}
    ) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """A gateway without keys, bodies up to 200 kB, 64 inputs; the fakes as new."""
    shared_stack.encoder.reset()
    shared_stack.retrieval.reset()
    return shared_stack


@pytest_asyncio.fixture(scope="session")
async def keyed() -> AsyncIterator[Stack]:
    """A gateway with keys."""
    keys = [
        {"name": "team-a", "key": CALLER_KEY, "tenant": "tenant-a"},
        {"name": "mesh", "key": MESH_KEY, "role": "mesh"},
    ]
    async with running_gateway({"access.keys": keys}) as stack:
        yield stack
