"""The simulated network. Its oracle is grpc.aio: the same script, run over both, must see the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import SimNetwork, corrupt, delay, drop, duplicate
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from workers.errors import BY_NAME, ConfigError, KVFerryError
from workers.rpc import GrpcNetwork, Network, abort_with, call, typed_errors

# On the real clock a script waits this long for what has been sent to arrive.
MOMENT_S = 0.15
SERVICE = "test.Echo"


class Echo:
    """Handlers that do what the request says, and note how they ended."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def unary(self, request: bytes, context: Any) -> bytes:
        try:
            await self._obey(request, context)
        except asyncio.CancelledError:
            self.log.append("unary cancelled")
            raise
        return b"re: " + request

    async def stream(self, request: bytes, context: Any) -> Any:
        try:
            await context.send_initial_metadata(())
            yield b"one"
            yield b"two"
            await self._obey(request, context)
        except asyncio.CancelledError:
            self.log.append("stream cancelled")
            raise

    async def written(self, request: bytes, context: Any) -> None:
        await context.write(b"one")
        await self._obey(request, context)

    async def _obey(self, request: bytes, context: Any) -> None:
        self.log.append(f"got {request.decode()}")
        if request == b"hang":
            await asyncio.sleep(30)
        if request == b"fail":
            raise ValueError("broken")
        if request == b"abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "spoilt", (("key", "value"),))

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Written": grpc.unary_stream_rpc_method_handler(self.written),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unary(channel: grpc.aio.Channel, request: bytes, method: str = "Unary", timeout: float | None = None) -> Any:
    call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
    return call(request, timeout=timeout)


def _stream(channel: grpc.aio.Channel, request: bytes, method: str = "Stream") -> Any:
    call: Any = channel.unary_stream(f"/{SERVICE}/{method}")
    return call(request)


def _ended(error: BaseException) -> list[object]:
    if isinstance(error, grpc.aio.AioRpcError):
        # What could not be reached is described in each network's own words.
        details = "" if error.code() is grpc.StatusCode.UNAVAILABLE else error.details()
        return [error.code(), details, *(error.trailing_metadata() or ())]
    return [type(error)]


async def _observe(awaitable: Awaitable[Any]) -> list[object]:
    try:
        return [await awaitable]
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        return _ended(error)


async def _read(call: Any) -> list[object]:
    seen: list[object] = []
    try:
        seen.append(tuple(await call.initial_metadata()))
        seen.append(call.done())
        async for message in call:
            seen.append(message)  # noqa: PERF401  What came before an error counts.
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        seen += _ended(error)
    # Whether a call that had answers was over already when it began is luck.
    return [item for item in seen if not (isinstance(item, bool) and any(isinstance(other, bytes) for other in seen))]


class Stage:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.echo = Echo()

    async def open(self) -> None:
        self.server = self.network.server()
        self.echo.add_to(self.server)
        self.address = await self.network.listen(self.server, "127.0.0.1", 0)
        self.channel = self.network.connect(self.address)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)


Script = Callable[[Stage], Awaitable[Any]]


async def answers_and_errors(stage: Stage) -> Any:
    requests = (b"hello", b"fail", b"abort", b"")
    seen = [await _observe(_unary(stage.channel, request)) for request in requests]
    seen += [await _read(_stream(stage.channel, request)) for request in requests]
    seen.append(await _observe(_unary(stage.channel, b"", "Nothing")))
    seen.append(await _read(_stream(stage.channel, b"", "Nothing")))
    # When no initial metadata is sent, what comes first stands in for it.
    seen += [await _read(_stream(stage.channel, request, "Written")) for request in requests]
    return seen


async def a_deadline_ends_both_ends(stage: Stage) -> Any:
    seen = await _observe(_unary(stage.channel, b"hang", timeout=0.1))
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_cancelled_call_cancels_its_handler(stage: Stage) -> Any:
    call = _unary(stage.channel, b"hang")
    asyncio.get_running_loop().call_later(MOMENT_S, call.cancel)
    seen = await _observe(call), call.cancelled(), call.cancel()
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_cancelled_waiter_cancels_its_call(stage: Stage) -> Any:
    calls = _unary(stage.channel, b"hang"), _stream(stage.channel, b"hang")
    tasks = asyncio.create_task(_observe(calls[0])), asyncio.create_task(_read(calls[1]))
    await asyncio.sleep(MOMENT_S)
    for task in tasks:
        task.cancel()
    seen = await asyncio.gather(*tasks), [call.cancelled() for call in calls]
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_closed_channel_cancels_its_calls(stage: Stage) -> Any:
    unary = asyncio.create_task(_observe(_unary(stage.channel, b"hang")))
    stream = asyncio.create_task(_read(_stream(stage.channel, b"hang")))
    await asyncio.sleep(MOMENT_S)
    await stage.channel.close()
    seen = await unary, await stream
    await asyncio.sleep(MOMENT_S)
    with pytest.raises(grpc.aio.UsageError):
        await _unary(stage.channel, b"late")
    return seen


async def a_stopped_server_breaks_its_calls(stage: Stage) -> Any:
    unary = asyncio.create_task(_observe(_unary(stage.channel, b"hang")))
    stream = asyncio.create_task(_read(_stream(stage.channel, b"hang")))
    await asyncio.sleep(MOMENT_S)
    await stage.server.stop(None)
    return await unary, await stream


async def nobody_listens(stage: Stage) -> Any:
    await stage.server.stop(None)
    return await _observe(_unary(stage.channel, b"hello")), await _read(_stream(stage.channel, b"hello"))


SCRIPTS: list[Script] = [
    answers_and_errors,
    a_deadline_ends_both_ends,
    a_cancelled_call_cancels_its_handler,
    a_cancelled_waiter_cancels_its_call,
    a_closed_channel_cancels_its_calls,
    a_stopped_server_breaks_its_calls,
    nobody_listens,
]


async def _play(script: Script, network: Network) -> tuple[Any, list[str]]:
    stage = Stage(network)
    await stage.open()
    try:
        seen = await script(stage)
    finally:
        await stage.close()
    return seen, sorted(stage.echo.log)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_simulated_network_is_seen_as_grpc_is(script):
    assert run(_play(script, SimNetwork().host())) == asyncio.run(_play(script, GrpcNetwork()))


def _on_stage(script: Script, seed: int = 0) -> Any:
    """Run a script on the simulated network alone."""
    return run(_play(script, SimNetwork(seed).host()))[0]


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, error: KVFerryError) -> None:
        self._error = error

    async def GetStats(self, request: Any, context: Any) -> worker_pb2.GetStatsResponse:  # noqa: N802
        return worker_pb2.GetStatsResponse(stats=worker_pb2.WorkerStats(name="w"))

    @typed_errors
    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:  # noqa: N802
        raise self._error

    async def StreamOutputs(self, request: Any, context: Any) -> Any:  # noqa: N802
        for index in range(100):
            yield worker_pb2.StreamOutputsResponse(outputs=[worker_pb2.TokenOutput(index=index)])


def _with_worker(script: Callable[[Any], Awaitable[Any]], error: KVFerryError | None = None) -> Any:
    async def main() -> Any:
        host = SimNetwork().host()
        server = host.server()
        servicer = _Worker(error or KVFerryError(""))  # type: ignore[abstract]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        channel = host.connect(await host.listen(server, "h", 0))
        seen = await script(worker_pb2_grpc.WorkerServiceStub(channel))
        await server.stop(None)
        return seen

    return run(main())


def test_generated_stubs_and_servicers_work_on_it():
    async def script(stub: Any) -> Any:
        stats = (await stub.GetStats(worker_pb2.GetStatsRequest())).stats
        steps = [step async for step in stub.StreamOutputs(worker_pb2.StreamOutputsRequest())]
        return stats.name, [output.index for step in steps for output in step.outputs]

    assert _with_worker(script) == ("w", list(range(100)))


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_errors_keep_their_type_and_fields(name):
    async def script(stub: Any) -> Any:
        with pytest.raises(KVFerryError) as caught:
            await call(stub.Abort(worker_pb2.AbortRequest()))
        return caught.value

    error = _with_worker(script, BY_NAME[name]("what, where, the mend", param="field", code="code"))
    assert type(error) is BY_NAME[name]
    assert (error.message, error.param, error.code) == ("what, where, the mend", "field", "code")


def test_a_killed_host_breaks_what_it_served_and_cancels_what_it_asked_for():
    async def main() -> None:
        network = SimNetwork()
        victim, other = Stage(network.host()), Stage(network.host())
        await victim.open()
        await other.open()
        to_victim, to_other = other.network.connect(victim.address), victim.network.connect(other.address)
        calls = [_observe(_unary(c, b"hang")) for c in (to_victim, to_other)]
        tasks = [asyncio.create_task(c) for c in (*calls, _read(_stream(to_victim, b"hang")))]
        await asyncio.sleep(1)
        network.kill(victim.address)
        unary, dead, stream = await asyncio.gather(*tasks)
        assert unary == dead == [grpc.StatusCode.UNAVAILABLE, ""]
        assert stream[-2:] == [grpc.StatusCode.UNAVAILABLE, ""]
        await asyncio.sleep(1)
        assert sorted(victim.echo.log) == ["got hang", "got hang", "stream cancelled", "unary cancelled"]
        assert other.echo.log == ["got hang", "unary cancelled"]
        for channel in (to_victim, to_other):
            assert await _observe(_unary(channel, b"again")) == [grpc.StatusCode.UNAVAILABLE, ""]
        assert other.echo.log == ["got hang", "unary cancelled"]
        await other.close()

    run(main())


def test_faults_drop_delay_duplicate_and_corrupt_messages():
    async def script(stage: Stage) -> None:
        network, channel = stage.network.network, stage.channel  # type: ignore[attr-defined]
        lost = network.fault("Unary", drop)
        assert await _observe(_unary(channel, b"a", timeout=3.0)) == [
            grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded",
        ]  # fmt: skip
        assert virtual_loop().time() >= 3
        lost.remove()
        lost = network.fault("Unary", drop, answers=True)
        assert (await _observe(_unary(channel, b"b", timeout=3.0)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stage.echo.log == ["got b"]
        lost.remove()
        network.fault("Unary", delay(5.0), count=1)
        began = virtual_loop().time()
        assert await _observe(_unary(channel, b"c")) == [b"re: c"]
        assert 5 < virtual_loop().time() - began < 5.01
        network.fault("Unary", duplicate, count=1)
        assert await _observe(_unary(channel, b"d")) == [b"re: d"]
        await asyncio.sleep(1)
        assert stage.echo.log[-2:] == ["got d", "got d"]
        network.fault("Unary", corrupt(-1, 1), answers=True, skip=1, count=1)
        assert [await _observe(_unary(channel, b"e")) for _ in range(3)] == [[b"re: e"], [b"re: d"], [b"re: e"]]
        network.fault("Stream", duplicate, answers=True, skip=1, count=1)
        assert (await _read(_stream(channel, b"f")))[1:] == [b"one", b"two", b"two"]

    _on_stage(script)


def test_calls_overtake_each_other_but_a_streams_messages_do_not():
    async def script(stage: Stage) -> list[str]:
        await asyncio.gather(*(_unary(stage.channel, b"%d" % i) for i in range(50)))
        return stage.echo.log

    orders = [_on_stage(script, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == sorted(f"got {i}" for i in range(50)) for order in orders)
    assert orders[0] != [f"got {i}" for i in range(50)]


def test_a_taken_port_is_refused_and_a_freed_one_given_again():
    async def main() -> None:
        network = SimNetwork()
        first, second = network.host(), network.host()
        server = first.server()
        assert await first.listen(server, "h", 9000) == "h:9000"
        with pytest.raises(ConfigError, match="9000"):
            await second.listen(second.server(), "h", 9000)
        first.kill()
        assert await second.listen(second.server(), "h", 9000) == "h:9000"

    run(main())


def test_a_frame_corrupted_on_the_way_is_other_bytes_of_the_same_length():
    message = kv_transfer_pb2.RenewRequest(incarnation="ab", grant_ids=[1, 2, 3])
    ((_, data),) = corrupt(2, 0xFF)(message.SerializeToString())
    assert len(data) == message.ByteSize()
    assert sum(a != b for a, b in zip(data, message.SerializeToString(), strict=True)) == 1


def test_an_error_raised_before_the_first_answer_reaches_the_generated_stub():
    class Transfer(kv_transfer_pb2_grpc.KVTransferServiceServicer):
        async def Commit(self, request: Any, context: Any) -> Any:  # noqa: N802
            await abort_with(context, BY_NAME["FrameError"]("incomplete"))

    async def main() -> None:
        host = SimNetwork().host()
        server = host.server()
        kv_transfer_pb2_grpc.add_KVTransferServiceServicer_to_server(Transfer(), server)  # type: ignore[abstract]
        stub = kv_transfer_pb2_grpc.KVTransferServiceStub(host.connect(await host.listen(server, "h", 0)))
        with pytest.raises(BY_NAME["FrameError"], match="incomplete"):
            await call(stub.Commit(kv_transfer_pb2.CommitRequest()))

    run(main())
