"""Generated stubs and servicers over the simulated network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from protos import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from workers.errors import BY_NAME, KVFerryError
from workers.rpc import abort_with, call, typed_errors


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
