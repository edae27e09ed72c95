"""Workers without a model that answer at once: the real gRPC service, a prefill and a decode one in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from workers.rpc import GrpcNetwork

# Tokens of SmolLM2 that are words.
_FIRST_WORD, _NUM_WORDS = 1000, 4000
_TIMELINE = pb.Timeline(prefill_s=0.001, decode_s=0.001)


@dataclass(slots=True)
class _Running:
    request_id: str
    num_tokens: int
    max_tokens: int


class StubWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Of either role. Its decode half takes a step every `step_s`, or at once, with a token of every request."""

    def __init__(self, role: str, step_s: float, decode: StubWorker | None = None) -> None:
        self._role = role
        self._step_s = step_s
        self._decode = decode
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._num_steps = 0
        self._num_grants = 0

    async def GetStats(self, request: Any, context: Any) -> pb.GetStatsResponse:
        stats = pb.WorkerStats(
            name=f"{self._role}-0",
            role=self._role,
            incarnation=self._role,
            blocks_total=1 << 20,
            blocks_free=1 << 20,
            block_size=16,
            max_num_batched_tokens=1 << 20,
            num_steps=self._num_steps,
        )
        return pb.GetStatsResponse(stats=stats)

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        self._num_grants += 1
        return pb.ReserveResponse(grant=pb.Grant(grant_id=self._num_grants, incarnation=self._role, lease_s=10.0))

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        asked = request.request
        assert self._decode is not None
        max_tokens = asked.params.max_tokens
        if max_tokens > 1:
            self._decode.take(_Running(asked.request_id, 1, max_tokens))
        first = pb.TokenOutput(request_id=asked.request_id, token_ids=[_FIRST_WORD], timeline=_TIMELINE)
        if max_tokens == 1:
            first.finish_reason = pb.FINISH_REASON_LENGTH
        return pb.PrefillResponse(outputs=[first])

    async def ConnectPeer(self, request: Any, context: Any) -> pb.ConnectPeerResponse:
        return pb.ConnectPeerResponse()

    async def Submit(self, request: Any, context: Any) -> pb.SubmitResponse:
        raise NotImplementedError

    async def AuditWorker(self, request: Any, context: Any) -> pb.AuditWorkerResponse:
        raise NotImplementedError

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        for request_id in request.request_ids:
            self._running.pop(request_id, None)
        return pb.AbortResponse()

    async def StreamOutputs(self, request: Any, context: Any) -> AsyncIterator[pb.StreamOutputsResponse]:
        await context.send_initial_metadata(())
        due_s = 0.0
        while True:
            while not self._running:
                self._work.clear()
                await self._work.wait()
            yield self._step()
            due_s = max(due_s + self._step_s, time.perf_counter())
            await asyncio.sleep(due_s - time.perf_counter())

    async def StreamKVEvents(self, request: Any, context: Any) -> AsyncIterator[pb.StreamKVEventsResponse]:
        yield pb.StreamKVEventsResponse()
        await asyncio.Event().wait()

    def take(self, request: _Running) -> None:
        self._running[request.request_id] = request
        self._work.set()

    def _step(self) -> pb.StreamOutputsResponse:
        self._num_steps += 1
        outputs = [_next(request) for request in self._running.values()]
        for output in outputs:
            if output.finish_reason:
                del self._running[output.request_id]
        return pb.StreamOutputsResponse(outputs=outputs)


def _next(request: _Running) -> pb.TokenOutput:
    index = request.num_tokens
    request.num_tokens += 1
    token_id = _FIRST_WORD + (index * 37) % _NUM_WORDS
    output = pb.TokenOutput(request_id=request.request_id, index=index, token_ids=[token_id])
    if index == 1 or request.num_tokens == request.max_tokens:
        output.timeline.CopyFrom(_TIMELINE)
    if request.num_tokens == request.max_tokens:
        output.finish_reason = pb.FINISH_REASON_LENGTH
    return output


async def serve(step_s: float, pipe: Connection) -> None:
    """Send both addresses; serve until the other end says something."""
    decode = StubWorker("decode", step_s)
    workers = (StubWorker("prefill", step_s, decode), decode)
    network, addresses, servers = GrpcNetwork(), [], []
    for worker in workers:
        server = network.server()
        network.add_multiplexed(server, worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker)
        addresses.append(await network.listen(server, "127.0.0.1", 0))
        servers.append(server)
    pipe.send(addresses)
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await asyncio.gather(*(server.stop(None) for server in servers))
