"""The gRPC face of the scorer: one method per RPC, each a line of work elsewhere."""

from __future__ import annotations

import time
from typing import Any

import grpc

from phasemesh.rpc.context import current_call_or_none
from phasemesh.scorer.fragments import Fragments
from phasemesh.scorer.maxsim import max_sim
from phasemesh.scorer.score import score
from phasemesh.scorer.search import search
from phasemesh.scorer.warm import load, warm
from phasemesh.scorer.work import Workshop
from phasemesh.v1 import scorer_pb2 as pb
from phasemesh.v1 import scorer_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

#: Deadline of a call that came past the interceptors, as in tests.
_NO_CALL_S = 60.0


class ScorerServicer(scorer_pb2_grpc.ScorerServiceServicer):
    """Answers by raising leaves of the error tree; the status interceptor turns them into statuses.

    Args:
        shop: what requests share.
        fragments: of the collections below the data root.
    """

    def __init__(self, shop: Workshop, fragments: Fragments) -> None:
        self._shop = shop
        self._fragments = fragments

    async def LeafSearch(  # noqa: N802  # gRPC's name
        self, request: pb.LeafSearchRequest, context: Context
    ) -> pb.LeafSearchResponse:
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await search(self._shop, self._fragments, job, request)

    async def LeafScore(  # noqa: N802  # gRPC's name
        self, request: pb.LeafScoreRequest, context: Context
    ) -> pb.LeafScoreResponse:
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await score(self._shop, self._fragments, job, request)

    async def MaxSim(self, request: pb.MaxSimRequest, context: Context) -> pb.MaxSimResponse:  # noqa: N802  # gRPC's name
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await max_sim(self._shop, job, request)

    async def WarmFragments(  # noqa: N802  # gRPC's name
        self, request: pb.WarmFragmentsRequest, context: Context
    ) -> pb.WarmFragmentsResponse:
        """See the contract."""
        with self._shop.job(_deadline_s()) as job:
            return await warm(self._fragments, job, request)

    async def GetLoad(  # noqa: N802  # gRPC's name
        self, request: pb.GetLoadRequest, context: Context
    ) -> pb.GetLoadResponse:
        """See the contract."""
        return await load(self._shop, self._fragments)


def _deadline_s() -> float:
    call = current_call_or_none()
    return time.monotonic() + _NO_CALL_S if call is None else call.deadline_s
