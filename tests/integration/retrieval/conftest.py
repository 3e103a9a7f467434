"""One retrieval service for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.unit.retrieval.stack import (
    Stack,
    stack,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with stack(tmp_path_factory.mktemp("retrieval")) as served:
        yield served


@pytest.fixture(autouse=True)
def _calm(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        encoder = request.getfixturevalue("served").encoder
        encoder.failures.clear()
        encoder.calls.clear()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A collection's name of this test's own."""
    return "".join(char if char.isalnum() else "-" for char in request.node.name)[:100]
