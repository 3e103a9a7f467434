"""One real mesh for the tests of this folder: three models, two Ray actors, all processes, spans collected."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasemesh.cli.demo_model import demo_model
from phasemesh.config.settings import RpcSettings
from phasemesh.rpc.client import RpcClient
from tests.fakes import checkpoints
from tests.fakes.collector import Collector, collecting
from tests.mesh import Mesh, running_mesh


@dataclass(frozen=True)
class Sources:
    """Where the models lie."""

    minilm: Path
    cross: Path
    colbert: Path


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    demo = demo_model()
    assert demo is not None, "install the demo extra"
    folder = tmp_path_factory.mktemp("models")
    return Sources(
        Path(demo.source),
        checkpoints.cross_encoder(folder / "cross", activation="torch.nn.modules.linear.Identity"),
        checkpoints.colbert(folder / "colbert"),
    )


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def mesh(sources: Sources, collector: Collector) -> Iterator[Mesh]:
    models = ", ".join(
        f"{{name: {name}, source: '{source}', dtype: float32}}"
        for name, source in (
            ("minilm", sources.minilm),
            ("cross", sources.cross),
            ("colbert", sources.colbert),
        )
    )
    arguments = {
        "encoder.models": f"[{models}]",
        "encoder.replicas": "2",
        "tracing.exporter": "otlp",
        "tracing.endpoint": collector.url,
        "tracing.schedule_delay_ms": "200",
        "gateway.directory_refresh_s": "0.5",
    }
    flags = [part for name, value in arguments.items() for part in ("--set", f"{name}={value}")]
    with running_mesh(*flags) as mesh:
        yield mesh


@pytest.fixture
async def client() -> AsyncIterator[RpcClient]:
    client = RpcClient(rpc=RpcSettings(), key=None)
    yield client
    await client.close()
