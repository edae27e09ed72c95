"""A RouterService without a model, on a thread of its own: what the client and the command line are tested against."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from protos import router_pb2 as pb
from protos import router_pb2_grpc, worker_pb2
from workers.errors import InvalidRequestError, NotFoundError, OverloadedError
from workers.rpc import GrpcNetwork, abort_with

WORDS = ("Hello", ", ", "world", "!\n")


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        self.target = ""
        self.traces: dict[str, pb.Trace] = {}
        # One after the other; the last one again and again.
        self.audits = [pb.AuditRouterResponse(incarnation="router")]

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.asked.set()
        if request.text == "bad":
            await abort_with(context, InvalidRequestError("max_tokens must be positive", param="max_tokens"))
        if request.text == "busy":
            await abort_with(context, OverloadedError("no room; retry in 1 s"))
        finished = False
        try:
            async for response in self._answer(request):
                yield response
            finished = True
        finally:
            if not finished:
                self.cancelled.set()

    async def _answer(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for index, word in enumerate(WORDS):
            yield pb.GenerateResponse(request_id="r1", index=index, token_ids=[index + 10], text=word)
        if request.text == "broken":
            return
        if request.text == "endless":
            await asyncio.sleep(60)
        yield pb.GenerateResponse(
            request_id="r1",
            index=len(WORDS),
            finish_reason=worker_pb2.FINISH_REASON_STOP,
            usage=pb.Usage(num_prompt_tokens=3, num_completion_tokens=len(WORDS)),
            timeline=worker_pb2.Timeline(prefill_s=0.5, transfer_s=0.25, decode_s=1.0),
            ttft_s=0.6,
            tpot_s=0.02,
        )

    async def AuditRouter(self, request: pb.AuditRouterRequest, context: Any) -> pb.AuditRouterResponse:  # noqa: N802
        return self.audits.pop(0) if len(self.audits) > 1 else self.audits[0]

    async def GetTrace(self, request: pb.GetTraceRequest, context: Any) -> pb.GetTraceResponse:  # noqa: N802
        if request.request_id not in self.traces:
            await abort_with(context, NotFoundError(f"no request {request.request_id!r} is known here"))
        return pb.GetTraceResponse(traces=[self.traces[request.request_id]])

    async def GetActivity(self, request: pb.GetActivityRequest, context: Any) -> pb.GetActivityResponse:  # noqa: N802
        return pb.GetActivityResponse(now_unix_s=time.time(), traces=self.traces.values())

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        return pb.GetStatusResponse(
            name="fake",
            ready=True,
            http_endpoint="http://127.0.0.1:1",
            grpc_endpoint=self.target,
            served_model_names=["m"],
            routers=[pb.RouterStatus(name="router-0", incarnation="r", pid=7, num_queued=2, num_running=1)],
            workers=[_worker("prefill-0", "prefill"), _worker("decode-0", "decode")],
        )


def _worker(name: str, role: str) -> pb.WorkerStatus:
    stats = worker_pb2.WorkerStats(
        name=name,
        role=role,
        incarnation=f"{name}-i",
        node="here",
        pid=8,
        blocks_total=10,
        blocks_free=4,
        blocks_cached=3,
        blocks_reserved=1,
        blocks_in_use=2,
        num_running=1,
        peers=[worker_pb2.PeerStats(incarnation="peer", transport="grpc", address="127.0.0.1:10", checksum=True)],
        cpu_affinity=[0],
    )
    return pb.WorkerStatus(address="127.0.0.1:9", state=pb.WORKER_STATE_READY, stats=stats)


@contextmanager
def serving(
    router: FakeRouter | None = None, jobs: router_pb2_grpc.JobServiceServicer | None = None
) -> Iterator[FakeRouter]:
    router = router or FakeRouter()
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        network = GrpcNetwork()
        server = network.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
        if jobs is not None:
            router_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
        router.target = await network.listen(server, "127.0.0.1", 0)
        started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield router
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
