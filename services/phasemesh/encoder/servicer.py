"""The gRPC face of the encoder: one method per RPC, each a line of work elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

from phasemesh.encoder.embed import embed
from phasemesh.encoder.models import describe
from phasemesh.encoder.score import score
from phasemesh.encoder.text import detokenize, tokenize
from phasemesh.encoder.work import Workshop
from phasemesh.errors import Unimplemented
from phasemesh.pool.protocol import PoolStats
from phasemesh.rpc.context import current_call_or_none
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1 import encoder_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

#: Deadline of a call that came past the interceptors, as in tests.
_NO_CALL_S = 60.0


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Answers by raising leaves of the error tree; the status interceptor turns them into statuses.

    Args:
        shop: what requests share.
        stats: of the pool, now.
    """

    def __init__(self, shop: Workshop, stats: Callable[[], PoolStats]) -> None:
        self._shop = shop
        self._stats = stats

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802  # gRPC's name
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await embed(self._shop, job, request)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:  # noqa: N802  # gRPC's name
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await score(self._shop, job, request)

    async def Classify(  # noqa: N802  # gRPC's name
        self, request: pb.ClassifyRequest, context: Context
    ) -> pb.ClassifyResponse:
        """See the contract."""
        raise Unimplemented("Classify comes with a later release; classifiers of one label answer Score")

    async def Tokenize(  # noqa: N802  # gRPC's name
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await tokenize(self._shop, job, request)

    async def Detokenize(  # noqa: N802  # gRPC's name
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await detokenize(self._shop, job, request)

    async def ListModels(  # noqa: N802  # gRPC's name
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """See the contract."""
        stats, draining = self._stats(), self._shop.draining
        return pb.ListModelsResponse(
            models=[
                describe(model, stats, draining=draining, max_inputs=self._shop.max_inputs)
                for model in self._shop.models.models
            ]
        )

    async def GetModel(  # noqa: N802  # gRPC's name
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.GetModelResponse:
        """See the contract."""
        model = self._shop.models.find(request.model)
        info = describe(model, self._stats(), draining=self._shop.draining, max_inputs=self._shop.max_inputs)
        return pb.GetModelResponse(model=info)


def _deadline_s() -> float:
    call = current_call_or_none()
    return time.monotonic() + _NO_CALL_S if call is None else call.deadline_s
