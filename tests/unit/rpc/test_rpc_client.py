"""The client helper: spans that end, cancellation that arrives, one loop, retries, large messages."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import DeadlineExceeded, PayloadTooLarge, Unavailable
from phasemesh.rpc.client import RpcClient, dial_target
from phasemesh.rpc.context import current_call
from phasemesh.telemetry import tracing
from phasemesh.v1.common_pb2 import Tensor
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse, ListModelsRequest
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.unit.rpc.harness import EMBED, mesh


class Stuck:
    """A handler that never answers and tells when it starts and is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.running = 0
        self.count = 0

    async def __call__(self, request: EmbedRequest) -> EmbedResponse:
        self.started.set()
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.count += 1
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
        raise AssertionError


async def echo(request: EmbedRequest) -> EmbedResponse:
    return EmbedResponse(model=request.model)


async def test_cancelling_the_waiter_reaches_the_handler_and_ends_the_span(
    spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = Stuck()
    async with mesh(stuck) as m:
        task = asyncio.create_task(m.embed())
        await asyncio.wait_for(stuck.started.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(stuck.cancelled.wait(), 5)
        (client,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert client.attributes is not None
    assert client.attributes["rpc.response.status_code"] == "CANCELLED"
    assert client.status.status_code is StatusCode.ERROR
    assert not client.events
    assert "detach" not in caplog.text


async def test_deadline_is_always_set_and_ends_both_sides(spans: InMemorySpanExporter) -> None:
    stuck = Stuck()
    async with mesh(stuck) as m:
        with pytest.raises(DeadlineExceeded):
            await m.embed(timeout_s=0.05)
        await asyncio.wait_for(stuck.cancelled.wait(), 5)
    (client,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert client.attributes is not None
    assert client.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


async def test_a_request_of_the_wrong_type_is_never_sent(spans: InMemorySpanExporter) -> None:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        raise AssertionError("was sent")

    async with mesh(embed) as m:
        for wrong in (object(), ListModelsRequest(), {"model": "m"}):
            with pytest.raises(TypeError, match=r"takes phasemesh\.v1\.EmbedRequest"):
                await asyncio.wait_for(m.embed(wrong), 5)  # type: ignore[arg-type]  # the fault under test
    assert spans.get_finished_spans() == ()


async def test_trace_request_id_and_time_arrive(spans: InMemorySpanExporter) -> None:
    seen: list[str] = []

    async def embed(request: EmbedRequest) -> EmbedResponse:
        seen.append(current_call().request_id)
        return EmbedResponse()

    async with mesh(embed) as m:
        with tracing.tracer().start_as_current_span("root") as root:
            await m.embed(request_id="given-1")
        trace_id = root.get_span_context().trace_id
    assert seen == ["given-1"]
    finished = spans.get_finished_spans()
    assert len(finished) == 3
    assert {span.context.trace_id for span in finished if span.context} == {trace_id}


async def test_polls_are_not_traced_anywhere(spans: InMemorySpanExporter) -> None:
    async with mesh(echo) as m:
        await m.client.call(
            m.target, EncoderServiceStub, "ListModels", ListModelsRequest(), timeout_s=5, traced=False
        )
    assert spans.get_finished_spans() == ()


async def test_within_a_handler_the_id_goes_on() -> None:
    seen: list[str] = []

    async def note(request: EmbedRequest) -> EmbedResponse:
        seen.append(current_call().request_id)
        return EmbedResponse()

    async with mesh(note) as leaf:

        async def relay(request: EmbedRequest) -> EmbedResponse:
            return await leaf.embed()

        async with mesh(relay) as root:
            await root.embed(request_id="outer-7")
    assert seen == ["outer-7"]


async def test_unavailable_is_retried_and_nothing_else_is() -> None:
    calls = 0

    async def flaky(request: EmbedRequest) -> EmbedResponse:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise Unavailable("loading")
        return EmbedResponse(model="third time")

    async with mesh(flaky) as m:
        assert (await m.embed()).model == "third time"
        assert calls == 3

    for reason, sent in (("REPLICA_LOST", 1), ("MODEL_NOT_READY", 3)):
        calls = 0

        async def down(request: EmbedRequest, reason: str = reason) -> EmbedResponse:
            nonlocal calls
            calls += 1
            raise Unavailable("down", reason=reason)

        async with mesh(down) as m:
            with pytest.raises(Unavailable):
                await m.embed()
            assert calls == sent

    calls = 0

    async def broken(request: EmbedRequest) -> EmbedResponse:
        nonlocal calls
        calls += 1
        raise PayloadTooLarge("no")

    async with mesh(broken) as m:
        with pytest.raises(PayloadTooLarge):
            await m.embed()
    assert calls == 1


async def test_nobody_there() -> None:
    async with mesh(echo) as m:
        target = m.target
    client = RpcClient(rpc=RpcSettings(), key=None)
    with pytest.raises(Unavailable) as raised:
        await client.call(target, EncoderServiceStub, "Embed", EmbedRequest(), timeout_s=5)
    assert target not in raised.value.message
    await client.close()


async def test_64_mib_pass_and_more_is_a_clear_error() -> None:
    big = bytes(64 * 2**20 - 1024)

    async def embed(request: EmbedRequest) -> EmbedResponse:
        reply = big if request.model == "reply" else b""
        return EmbedResponse(dense=Tensor(data=reply), model=str(len(request.inputs[0].image.data)))

    def request(data: bytes, model: str) -> EmbedRequest:
        made = EmbedRequest(model=model)
        made.inputs.add().image.data = data
        return made

    async with mesh(embed) as m:
        assert (await m.embed(request(big, "request"))).model == str(len(big))
        assert (await m.embed(request(b"", "reply"))).dense.data == big
        with pytest.raises(PayloadTooLarge, match="larger than max"):
            await m.embed(request(big + bytes(2048), "request"))
        big += bytes(2048)
        with pytest.raises(PayloadTooLarge, match="larger than max"):
            await m.embed(request(b"", "reply"))


async def test_one_channel_per_target_made_lazily_on_the_running_loop() -> None:
    async with mesh(echo) as one, mesh(echo) as two:
        client = RpcClient(rpc=RpcSettings(), key=None)
        made: list[str] = []
        real = grpc.aio.insecure_channel

        def counted(target: str, **options: Any) -> grpc.aio.Channel:
            made.append(target)
            return real(target, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc.aio, "insecure_channel", counted)
            assert made == []
            for target in (one.target, two.target, one.target, two.target):
                await client.call(target, EncoderServiceStub, "Embed", EmbedRequest(), timeout_s=5)
        assert made == [f"dns:///{one.target}", f"dns:///{two.target}"]

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                await client.call(one.target, EncoderServiceStub, "Embed", EmbedRequest(), timeout_s=5)

        await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.call(one.target, EncoderServiceStub, "Embed", EmbedRequest(), timeout_s=5)


@pytest.mark.parametrize(
    ("target", "dialled"),
    [
        ("127.0.0.1:50051", "dns:///127.0.0.1:50051"),
        ("encoder.mesh.svc:50051", "dns:///encoder.mesh.svc:50051"),
        ("[::1]:50051", "dns:///[::1]:50051"),
        ("dns:5000", "dns:5000"),
        ("dns:///a:1", "dns:///a:1"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("xds:///encoder", "xds:///encoder"),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", "ipv4:10.0.0.1:1,10.0.0.2:1"),
    ],
)
def test_dial_target(target: str, dialled: str) -> None:
    assert dial_target(target) == dialled


async def test_several_addresses_are_used_in_turn() -> None:
    async def one(request: EmbedRequest) -> EmbedResponse:
        return EmbedResponse(model="one")

    async def two(request: EmbedRequest) -> EmbedResponse:
        return EmbedResponse(model="two")

    async with mesh(one) as first, mesh(two) as second:
        target = f"ipv4:{first.target},{second.target}"
        client = RpcClient(rpc=RpcSettings(), key=None)

        async def call() -> str:
            reply = await client.call(target, EncoderServiceStub, "Embed", EmbedRequest(), timeout_s=5)
            return str(reply.model)

        answered: set[str] = set()
        while answered != {"one", "two"}:  # the second connection is made beside the first calls
            answered.add(await call())
        last = [await call() for _ in range(6)]
        assert last.count("one") == last.count("two") == 3
        # One of them goes: calls in flight elsewhere don't notice.
        await second.server.drain()
        assert {await call() for _ in range(4)} == {"one"}
        await client.close()


async def test_cancelled_calls_leak_little(spans: InMemorySpanExporter) -> None:
    stuck = Stuck()

    async def round_of(calls: int, m: Any) -> None:
        tasks = [asyncio.create_task(m.embed()) for _ in range(calls)]
        while stuck.running < calls:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while stuck.running:
            await asyncio.sleep(0)
        spans.clear()

    def resident_kib() -> int:
        gc.collect()
        if sys.platform == "linux":
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize() // 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async with mesh(stuck) as m:
        for _ in range(10):
            await round_of(50, m)
        before = resident_kib()
        for _ in range(40):
            await round_of(50, m)
        grown = resident_kib() - before
    assert stuck.count == 2500
    # 2,000 calls: well under what a leaked call (request, tasks, spans; tens of KiB) would come to.
    assert grown < 2000 * 8, f"{grown} KiB"


async def test_span_names(spans: InMemorySpanExporter) -> None:
    async with mesh(echo) as m:
        await m.embed()
    assert {span.name for span in spans.get_finished_spans()} == {EMBED}
