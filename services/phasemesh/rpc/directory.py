"""Who serves which model, now: every configured encoder target's `ListModels`, polled and kept.

Invariant: nothing is captured at start. A target that comes, goes or changes its models is followed, and
what a dead target last said is kept, so that its models are "down" (a retry may help) and not "unknown".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound, PhasemeshError, Unavailable
from phasemesh.rpc.client import RpcClient
from phasemesh.v1.encoder_pb2 import (
    MODEL_STATE_READY,
    MODEL_STATE_UNAVAILABLE,
    ListModelsRequest,
    ListModelsResponse,
    ModelInfo,
)
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

#: Longest time for one poll, seconds.
POLL_TIMEOUT_S = 5.0
#: Longest time between polls of a target that doesn't answer or has a model that isn't ready, seconds.
DOWN_REFRESH_S = 0.25
#: When to come back for a model whose targets are down, seconds.
RETRY_AFTER_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """Where to send a request.

    Attributes:
        target: as configured; goes into `RpcClient.call`.
        info: what that target says of the model.
    """

    target: str
    info: ModelInfo


@dataclass(slots=True)
class _Target:
    """What is known of one target; `models` outlives `up`."""

    name: str
    up: bool = False
    heard_from: bool = False
    models: tuple[ModelInfo, ...] = ()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def find(self, model: str) -> Iterator[ModelInfo]:
        return (info for info in self.models if model == info.name or model in info.aliases)

    def settled(self) -> bool:
        return self.up and all(info.state == MODEL_STATE_READY for info in self.models)


class ModelDirectory:
    """A live map of model or alias to targets; belongs to one event loop.

    Args:
        client: to poll with.
        targets: of encoder services; a repeated one counts once.
        refresh_s: interval between polls of a target that is well, seconds.
    """

    def __init__(self, client: RpcClient, targets: Sequence[str], *, refresh_s: float) -> None:
        self._client = client
        self._targets = [_Target(name) for name in dict.fromkeys(targets)]
        self._refresh_s = refresh_s
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Poll every target once, whether it answers or not, then go on in the background."""
        await self.refresh()
        loop = asyncio.get_running_loop()
        # An empty context: whoever starts the directory must not be the parent of every poll.
        self._tasks = [
            loop.create_task(self._watch(target), context=Context(), name=f"directory {target.name}")
            for target in self._targets
        ]

    async def close(self) -> None:
        """Stop polling."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Poll every target now; never fails."""
        await asyncio.gather(*(self._poll(target) for target in self._targets))

    def suspect(self, target: str) -> None:
        """A call to `target` found it unavailable: ask it now instead of at its next turn."""
        for known in self._targets:
            if known.name == target:
                known.wake.set()

    def route(self, model: str, *, recipe_hash: str | None = None) -> Route:
        """A target that can serve `model` now; the next one at the next call.

        Args:
            model: name or alias; "" where exactly one model is served.
            recipe_hash: only targets whose model has this hash will do.

        Raises:
            InvalidArgument: `model` is empty and several are served.
            NotFound: no target knows it (MODEL_NOT_FOUND).
            FailedPrecondition: targets that are up disagree about its recipe, or none has the wanted one
                (RECIPE_MISMATCH).
            Unavailable: its targets are down or not ready, or one that may know it hasn't answered yet.
        """
        model = model or self._only_model()
        known = [(target, info) for target in self._targets for info in target.find(model)]
        if not known:
            raise self._unknown(model)
        # Only live targets count in a disagreement: a dead one's last word must not block its successor.
        live = [(target, info) for target, info in known if target.up]
        if recipe_hash is not None:
            matching = [(target, info) for target, info in live if info.recipe_hash == recipe_hash]
            if live and not matching:
                raise FailedPrecondition(
                    f"model {model} with recipe {recipe_hash} isn't served; {_hashes(live)}",
                    reason="RECIPE_MISMATCH",
                    field="model",
                )
            live = matching
        elif len({info.recipe_hash for _, info in live}) > 1:
            raise FailedPrecondition(
                f"model {model} means different recipes, so its vectors would not compare: {_hashes(live)}; "
                "serve one of them under another name",
                reason="RECIPE_MISMATCH",
                field="model",
            )
        ready = [(target, info) for target, info in live if info.state == MODEL_STATE_READY]
        if not ready:
            raise Unavailable(
                f"model {model} is known, but no service has it ready now",
                reason="MODEL_NOT_READY" if live else "MODEL_UNAVAILABLE",
                field="model",
                retry_after_s=RETRY_AFTER_S,
            )
        target, info = ready[next(self._turn) % len(ready)]
        return Route(target.name, info)

    def models(self) -> list[ModelInfo]:
        """Every known model once, in the order of targets; those of dead targets are UNAVAILABLE."""
        found: dict[str, ModelInfo] = {}
        for target in self._targets:
            for info in target.models:
                known = found.get(info.name)
                if known is not None and (known.state == MODEL_STATE_READY or not target.up):
                    continue
                copy = ModelInfo()
                copy.CopyFrom(info)
                if not target.up:
                    copy.state = MODEL_STATE_UNAVAILABLE
                    copy.ready_replicas = 0
                found[info.name] = copy
        return list(found.values())

    def ready(self) -> bool:
        """Whether any model can be used now."""
        return any(
            info.state == MODEL_STATE_READY for target in self._targets if target.up for info in target.models
        )

    def _only_model(self) -> str:
        served = [info.name for info in self.models()]
        if len(served) > 1:
            raise InvalidArgument(
                f"name one of the models: {', '.join(served)}", reason="MODEL_REQUIRED", field="model"
            )
        return served[0] if served else ""

    def _unknown(self, model: str) -> PhasemeshError:
        silent = [target.name for target in self._targets if not target.heard_from]
        served = [info.name for info in self.models()]
        words = f"models served are {', '.join(served)}" if served else "no model is served"
        if silent:
            # It may be theirs, and "not found" is an answer that callers don't ask for again.
            return Unavailable(
                f"model {model!r} isn't known yet: {len(silent)} of {len(self._targets)} encoder services "
                f"have not answered so far; {words}",
                reason="MODEL_UNAVAILABLE",
                field="model",
                retry_after_s=RETRY_AFTER_S,
            )
        return NotFound(f"there is no model {model!r}; {words}", reason="MODEL_NOT_FOUND", field="model")

    async def _watch(self, target: _Target) -> None:
        while True:
            wait_s = self._refresh_s if target.settled() else min(self._refresh_s, DOWN_REFRESH_S)
            try:
                async with asyncio.timeout(wait_s):
                    await target.wake.wait()
            except TimeoutError:
                pass
            try:
                await self._poll(target)
            except Exception:
                # A watch that ends would leave the target as it was last seen, for good.
                _log.exception("encoder target could not be polled", extra={"target": target.name})

    async def _poll(self, target: _Target) -> None:
        # One poll of a target at a time: an older answer must not overwrite a newer one.
        async with target.lock:
            target.wake.clear()
            try:
                reply: ListModelsResponse = await self._client.call(
                    target.name,
                    EncoderServiceStub,
                    "ListModels",
                    ListModelsRequest(),
                    timeout_s=POLL_TIMEOUT_S,
                    traced=False,
                )
            except PhasemeshError as error:
                if target.up or not target.heard_from:
                    _log.warning("encoder target down", extra={"target": target.name, "reason": error.reason})
                target.up = False
                return
            if not target.up:
                _log.info(
                    "encoder target up",
                    extra={"target": target.name, "models": [info.name for info in reply.models]},
                )
            target.up = target.heard_from = True
            target.models = tuple(reply.models)


def _hashes(live: Sequence[tuple[_Target, ModelInfo]]) -> str:
    return ", ".join(f"{target.name} has {info.recipe_hash}" for target, info in live)
