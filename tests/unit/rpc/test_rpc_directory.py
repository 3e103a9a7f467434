"""The directory against real servers that come, go and change their minds."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.v1.encoder_pb2 import (
    MODEL_STATE_DRAINING,
    MODEL_STATE_LOADING,
    MODEL_STATE_READY,
    MODEL_STATE_UNAVAILABLE,
    ModelInfo,
    ModelState,
)
from tests.unit.rpc.harness import Mesh, Servicer, mesh


def info(
    name: str, recipe: str = "h1", *aliases: str, state: ModelState.ValueType = MODEL_STATE_READY
) -> ModelInfo:
    return ModelInfo(name=name, recipe_hash=recipe, aliases=aliases, state=state, ready_replicas=1)


class Encoder:
    """A server that can be taken down and brought back at its port."""

    def __init__(self, *models: ModelInfo) -> None:
        self.servicer = Servicer(models=list(models))
        self.target = ""
        self._stack = AsyncExitStack()

    def models(self, *models: ModelInfo) -> None:
        self.servicer.models = list(models)

    async def up(self) -> Encoder:
        port = int(self.target.rpartition(":")[2] or 0)
        m: Mesh = await self._stack.enter_async_context(mesh(servicer=self.servicer, port=port))
        self.target = m.target
        return self

    async def down(self) -> None:
        await self._stack.aclose()


class World:
    """Encoders, a client and directories that are cleaned up."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.client = RpcClient(rpc=RpcSettings(), key=None)

    async def encoder(self, *models: ModelInfo) -> Encoder:
        encoder = await Encoder(*models).up()
        self.stack.push_async_callback(encoder.down)
        return encoder

    def directory(self, *encoders: Encoder, refresh_s: float = 60.0) -> ModelDirectory:
        directory = ModelDirectory(self.client, [encoder.target for encoder in encoders], refresh_s=refresh_s)
        self.stack.push_async_callback(directory.close)
        return directory


@pytest.fixture
async def world() -> Iterator[World]:  # type: ignore[misc]  # pytest-asyncio unwraps async fixtures
    made = World()
    yield made
    await made.stack.aclose()
    await made.client.close()


async def test_route_by_name_and_alias_in_turn(world: World) -> None:
    one = await world.encoder(info("bge", "h1", "small"), info("other", "h9"))
    two = await world.encoder(info("bge", "h1", "small"))
    directory = world.directory(one, two)
    await directory.refresh()
    for name in ("bge", "small"):
        targets = [directory.route(name).target for _ in range(6)]
        assert targets.count(one.target) == targets.count(two.target) == 3
        assert targets[0] != targets[1]
    assert {directory.route("other").target for _ in range(3)} == {one.target}
    assert directory.route("small").info.name == "bge"
    assert [model.name for model in directory.models()] == ["bge", "other"]
    assert directory.ready()


async def test_unknown_lists_what_there_is(world: World) -> None:
    directory = world.directory(await world.encoder(info("bge"), info("minilm")))
    await directory.refresh()
    with pytest.raises(NotFound, match="bge, minilm") as raised:
        directory.route("gpt")
    assert (raised.value.reason, raised.value.field) == ("MODEL_NOT_FOUND", "model")


async def test_no_name_means_the_only_model(world: World) -> None:
    encoder = await world.encoder(info("bge"))
    directory = world.directory(encoder)
    await directory.refresh()
    assert directory.route("").info.name == "bge"
    encoder.models(info("bge"), info("minilm"))
    await directory.refresh()
    with pytest.raises(InvalidArgument, match="bge, minilm"):
        directory.route("")
    encoder.models()
    await directory.refresh()
    with pytest.raises(NotFound):
        directory.route("")


async def test_down_is_not_unknown_and_comes_back(world: World) -> None:
    encoder = await world.encoder(info("bge"))
    directory = world.directory(encoder)
    await directory.refresh()
    await encoder.down()
    await directory.refresh()
    assert not directory.ready()
    with pytest.raises(Unavailable) as raised:
        directory.route("bge")
    assert raised.value.reason == "MODEL_UNAVAILABLE"
    assert raised.value.retry_after_s == 1.0
    assert [(model.name, model.state) for model in directory.models()] == [("bge", MODEL_STATE_UNAVAILABLE)]
    with pytest.raises(NotFound):
        directory.route("gpt")
    await encoder.up()
    while not directory.ready():  # until the channel's back-off of 0.1 s is over
        await directory.refresh()
    assert directory.route("bge").target == encoder.target
    assert directory.models()[0].state == MODEL_STATE_READY


async def test_never_heard_from_is_not_unknown_either(world: World) -> None:
    here, absent = await world.encoder(info("bge")), await world.encoder(info("colbert"))
    await absent.down()
    directory = world.directory(here, absent)
    await directory.start()
    assert directory.route("bge").target == here.target
    with pytest.raises(Unavailable, match="1 of 2 encoder services have not answered"):
        directory.route("colbert")


async def test_one_of_two_down_leaves_the_other(world: World) -> None:
    one, two = await world.encoder(info("bge")), await world.encoder(info("bge"))
    directory = world.directory(one, two)
    await directory.refresh()
    await one.down()
    await directory.refresh()
    assert {directory.route("bge").target for _ in range(4)} == {two.target}
    assert [model.state for model in directory.models()] == [MODEL_STATE_READY]


async def test_two_hashes_under_one_name_are_refused(world: World) -> None:
    one, two = await world.encoder(info("bge", "aaa")), await world.encoder(info("x", "bbb", "bge"))
    directory = world.directory(one, two)
    await directory.refresh()
    with pytest.raises(FailedPrecondition) as raised:
        directory.route("bge")
    assert raised.value.reason == "RECIPE_MISMATCH"
    for part in (one.target, two.target, "aaa", "bbb"):
        assert part in raised.value.message
    # Who names the recipe gets it.
    assert {directory.route("bge", recipe_hash="bbb").target for _ in range(3)} == {two.target}
    with pytest.raises(FailedPrecondition, match="ccc isn't served"):
        directory.route("bge", recipe_hash="ccc")
    # A dead server's last word doesn't count.
    await one.down()
    await directory.refresh()
    assert directory.route("bge").target == two.target


@pytest.mark.parametrize("state", [MODEL_STATE_LOADING, MODEL_STATE_UNAVAILABLE, MODEL_STATE_DRAINING])
async def test_only_ready_models_get_requests(world: World, state: ModelState.ValueType) -> None:
    one = await world.encoder(info("bge", state=state))
    two = await world.encoder(info("bge"))
    directory = world.directory(one, two)
    await directory.refresh()
    assert {directory.route("bge").target for _ in range(4)} == {two.target}
    assert [model.state for model in directory.models()] == [MODEL_STATE_READY]
    two.models(info("bge", state=state))
    await directory.refresh()
    with pytest.raises(Unavailable) as raised:
        directory.route("bge")
    assert raised.value.reason == "MODEL_NOT_READY"
    assert not directory.ready()


async def test_background_follows_quickly_and_is_nobodys_child(
    world: World, spans: InMemorySpanExporter
) -> None:
    mark = contextvars.ContextVar("mark", default="clean")
    encoder = await world.encoder(info("bge"))
    seen: list[str] = []

    class Spy(RpcClient):
        async def call(self, *args: Any, **options: Any) -> Any:
            seen.append(mark.get())
            return await super().call(*args, **options)

    client = Spy(rpc=RpcSettings(), key=None)
    mark.set("of the start")
    directory = ModelDirectory(client, [encoder.target, encoder.target], refresh_s=600)
    await directory.start()
    assert seen == ["of the start"]  # the first poll is the start's own
    await encoder.down()
    directory.suspect(encoder.target)
    async with asyncio.timeout(5):
        while directory.ready():
            await asyncio.sleep(0)
    # Up again: found without being asked, long before the interval.
    encoder.models(info("bge"), info("new"))
    await encoder.up()
    async with asyncio.timeout(5):
        while not directory.ready():
            await asyncio.sleep(0.005)
    assert directory.route("new").target == encoder.target
    await directory.close()
    await client.close()
    assert set(seen[1:]) == {"clean"}
    assert spans.get_finished_spans() == ()
