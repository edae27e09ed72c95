"""Unary calls over one stream, by real gRPC: each ends as a call by itself does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import calls_pb2, calls_pb2_grpc, worker_pb2, worker_pb2_grpc
from workers.errors import BY_NAME, DeadlineError, KVFerryError, OverloadedError, UnavailableError
from workers.rpc import GrpcNetwork, call, typed_errors

TIMEOUT_S = 10.0


class Desk(worker_pb2_grpc.WorkerServiceServicer):
    """What the calls reach: an Abort's first id is what to do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.error = KVFerryError("")

    async def GetStats(self, request: Any, context: Any) -> worker_pb2.GetStatsResponse:  # noqa: N802
        return worker_pb2.GetStatsResponse(stats=worker_pb2.WorkerStats(name="w"))

    @typed_errors
    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:  # noqa: N802
        (do,) = request.request_ids
        self.log.append(do)
        match do:
            case "raise":
                raise self.error
            case "break":
                raise ZeroDivisionError("a bug")
            case "wait":
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.log.append("given up")
                    raise
        self.log.append(f"{do} done")
        return worker_pb2.AbortResponse()

    async def StreamOutputs(self, request: Any, context: Any) -> Any:  # noqa: N802
        for index in range(3):
            yield worker_pb2.StreamOutputsResponse(outputs=[worker_pb2.TokenOutput(index=index)])

    async def until(self, entry: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while entry not in self.log:  # noqa: ASYNC110  Another side's doing.
                await asyncio.sleep(0.005)


def make_desk() -> Desk:
    return Desk()  # type: ignore[abstract]


async def ask(stub: Any, do: str, timeout_s: float = TIMEOUT_S) -> Any:
    return await call(stub.Abort(worker_pb2.AbortRequest(request_ids=[do]), timeout=timeout_s))


@asynccontextmanager
async def serving(desk: Desk, port: int = 0) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    network = GrpcNetwork()
    server = network.server()
    network.add_multiplexed(server, worker_pb2_grpc.add_WorkerServiceServicer_to_server, desk)
    address = await network.listen(server, "127.0.0.1", port)
    try:
        yield address, server
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(address: str, multiplexed: bool = True) -> AsyncIterator[tuple[Any, grpc.aio.Channel]]:
    channel = GrpcNetwork().connect(address, multiplexed=multiplexed)
    try:
        yield worker_pb2_grpc.WorkerServiceStub(channel), channel
    finally:
        await channel.close()


def on_stage(script: Callable[[Any, Desk], Awaitable[Any]], multiplexed: bool = True) -> Any:
    async def main() -> Any:
        desk = make_desk()
        async with serving(desk) as (address, _), connected(address, multiplexed) as (stub, _):
            return await script(stub, desk)

    return asyncio.run(main())


def as_by_itself(script: Callable[[Any, Desk], Awaitable[Any]]) -> Any:
    """What the script sees, which must be what it sees of calls of their own."""
    alone, multiplexed = on_stage(script, multiplexed=False), on_stage(script)
    assert multiplexed == alone
    return multiplexed


async def outcome(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except KVFerryError as error:
        return type(error), vars(error)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_errors_keep_their_type_and_fields(name):
    async def script(stub: Any, desk: Desk) -> Any:
        desk.error = BY_NAME[name]("no such row", param="row", code="gone")
        if isinstance(desk.error, OverloadedError):
            desk.error.retry_after_s = 2.5
        failed = await outcome(ask(stub, "raise"))
        await ask(stub, "fine")
        assert "fine done" in desk.log
        return failed

    assert as_by_itself(script)[0] is BY_NAME[name]


def test_a_bug_of_the_server_is_told_to_its_caller_alone():
    async def script(stub: Any, desk: Desk) -> Any:
        failed = await outcome(ask(stub, "break"))
        await ask(stub, "fine")
        return failed

    cls, fields = as_by_itself(script)
    assert cls is KVFerryError
    assert "a bug" in fields["message"]


def test_an_answer_that_cannot_be_read_fails_its_call_alone():
    async def main() -> None:
        async with serving(make_desk()) as (address, _):
            channel = GrpcNetwork().connect(address, multiplexed=True)

            def unreadable(data: bytes) -> Any:
                raise ValueError("from the future")

            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            method = "/kvferry.v1.WorkerService/GetStats"
            bad = channel.unary_unary(method, worker_pb2.GetStatsRequest.SerializeToString, unreadable)
            good = stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)
            with pytest.raises(KVFerryError, match="its answer cannot be read: from the future"):
                await call(bad(worker_pb2.GetStatsRequest(), timeout=5))
            assert isinstance(await call(good), worker_pb2.GetStatsResponse)
            await channel.close()

    asyncio.run(main())


def test_a_stub_streams_beside_its_calls():
    async def script(stub: Any, desk: Desk) -> Any:
        await ask(stub, "fine")
        return [step.outputs[0].index async for step in stub.StreamOutputs(worker_pb2.StreamOutputsRequest())]

    assert as_by_itself(script) == [0, 1, 2]


@pytest.mark.parametrize("multiplexed", [False, True])
def test_a_method_that_is_not_there(multiplexed):
    async def main() -> None:
        async with serving(make_desk()) as (address, _), connected(address, multiplexed) as (_, channel):
            nothing: Any = channel.unary_unary("/kvferry.v1.WorkerService/Nothing", bytes, bytes)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await nothing(b"", timeout=TIMEOUT_S)
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


def test_what_is_late_or_given_up_is_cancelled_there_and_costs_the_others_nothing():
    async def script(stub: Any, desk: Desk) -> Any:
        other = asyncio.create_task(ask(stub, "wait"))
        await desk.until("wait")
        late = await outcome(ask(stub, "wait", 0.05))
        await desk.until("given up")
        desk.log.clear()
        cancelled = asyncio.create_task(ask(stub, "wait"))
        await desk.until("wait")
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await desk.until("given up")
        assert not other.done()
        desk.gate.set()
        await other
        return late, cancelled.cancelled(), desk.log

    (cls, _), cancelled, log = as_by_itself(script)
    assert (cls, cancelled, log) == (DeadlineError, True, ["wait", "given up", "wait done"])


def test_calls_run_side_by_side_and_each_gets_its_own_answer():
    async def script(stub: Any, desk: Desk) -> None:
        desk.error = BY_NAME["FrameError"]("spoilt")
        waiting = asyncio.create_task(ask(stub, "wait"))
        await desk.until("wait")
        answers = await asyncio.gather(
            call(stub.GetStats(worker_pb2.GetStatsRequest())), outcome(ask(stub, "raise")), ask(stub, "fine")
        )
        assert answers[0].stats.name == "w"
        assert answers[1][0] is BY_NAME["FrameError"]
        assert answers[2] == worker_pb2.AbortResponse()
        assert not waiting.done()
        desk.gate.set()
        await waiting

    on_stage(script)


def test_a_server_that_goes_fails_what_waits_and_its_successor_is_found():
    async def main() -> None:
        desk = make_desk()
        async with serving(desk) as (address, server):
            channel = GrpcNetwork().connect(address, multiplexed=True)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            waiting = [asyncio.create_task(outcome(ask(stub, "wait"))) for _ in range(2)]
            await desk.until("wait")
            await server.stop(None)
            assert [failed[0] for failed in await asyncio.gather(*waiting)] == [UnavailableError] * 2
        with pytest.raises(UnavailableError):
            await ask(stub, "fine")
        async with serving(desk, int(address.rsplit(":", 1)[1])), asyncio.timeout(TIMEOUT_S):
            while (failed := await outcome(ask(stub, "fine"))) != worker_pb2.AbortResponse():
                assert failed[0] is UnavailableError  # The channel has not noticed yet.
                await asyncio.sleep(0.02)
        await channel.close()

    asyncio.run(main())


@pytest.mark.parametrize("multiplexed", [False, True])
def test_a_channel_that_is_closed_fails_what_waits_and_begins_nothing(multiplexed):
    async def main() -> None:
        desk = make_desk()
        async with serving(desk) as (address, _), connected(address, multiplexed) as (stub, channel):
            waiting = asyncio.create_task(ask(stub, "wait"))
            await desk.until("wait")
            await channel.close()
            with pytest.raises(UnavailableError, match="the connection was closed"):
                await waiting
            await desk.until("given up")
            with pytest.raises(grpc.aio.UsageError):
                await ask(stub, "fine")

    asyncio.run(main())


def test_a_call_ends_at_its_deadline_though_its_caller_says_nothing():
    async def main() -> None:
        desk = make_desk()
        async with serving(desk) as (address, _), grpc.aio.insecure_channel(address) as channel:
            stream: Any = calls_pb2_grpc.MultiplexServiceStub(channel).Multiplex()
            request = worker_pb2.AbortRequest(request_ids=["wait"]).SerializeToString()
            method = "/kvferry.v1.WorkerService/Abort"
            one = calls_pb2.Call(number=1, method=method, request=request, timeout_s=0.05)
            await stream.write(calls_pb2.MultiplexRequest(calls=[one]))
            await desk.until("given up")
            stream.cancel()

    asyncio.run(main())
