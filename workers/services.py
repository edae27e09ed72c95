"""A worker's two gRPC services: protobuf in, the worker's halves behind, protobuf out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from protos import kv_transfer_pb2, worker_pb2
from protos import kv_transfer_pb2_grpc as kv_grpc
from protos import worker_pb2_grpc as worker_grpc
from workers.kv_transfer.base import Grant, KVReceiver
from workers.kv_transfer.layout import KVLayout, require_same_checksum
from workers.rpc import typed_errors
from workers.wire import output_to_pb, request_from_pb

if TYPE_CHECKING:
    from workers.worker import Worker

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Border:
    """All by which a worker is reached."""

    worker_service: WorkerService
    kv_service: KVTransferService
    receiver: KVReceiver


def border_of(worker: Worker) -> Border:
    return Border(WorkerService(worker), KVTransferService(worker), worker.decode)


class WorkerService(worker_grpc.WorkerServiceServicer):
    """What routers ask."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @typed_errors
    async def GetStats(self, request: worker_pb2.GetStatsRequest, context: Context) -> worker_pb2.GetStatsResponse:
        return worker_pb2.GetStatsResponse(stats=self._worker.stats())

    @typed_errors
    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Context) -> worker_pb2.ReserveResponse:
        grant = self._worker.reserve(request_from_pb(request.request, request.replica_address))
        return worker_pb2.ReserveResponse(grant=grant.to_proto())

    @typed_errors
    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> worker_pb2.PrefillResponse:
        outputs = await self._worker.prefill(request_from_pb(request.request), Grant.from_proto(request.grant))
        return worker_pb2.PrefillResponse(outputs=map(output_to_pb, outputs))

    @typed_errors
    async def ConnectPeer(
        self, request: worker_pb2.ConnectPeerRequest, context: Context
    ) -> worker_pb2.ConnectPeerResponse:
        await self._worker.connect(request.address, request.incarnation)
        return worker_pb2.ConnectPeerResponse()

    @typed_errors
    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitResponse:
        self._worker.submit(request_from_pb(request.request, request.replica_address))
        return worker_pb2.SubmitResponse()

    @typed_errors
    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._worker.abort(request_id)
        return worker_pb2.AbortResponse()

    @typed_errors
    async def AuditWorker(
        self, request: worker_pb2.AuditWorkerRequest, context: Context
    ) -> worker_pb2.AuditWorkerResponse:
        return self._worker.audit()

    async def StreamOutputs(
        self, request: worker_pb2.StreamOutputsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StreamOutputsResponse]:
        # Tells the router that the stream is open, long before there is a token.
        await context.send_initial_metadata(())
        async with aclosing(self._worker.outputs.stream(request.router_id)) as steps:
            async for step in steps:
                yield worker_pb2.StreamOutputsResponse(outputs=map(output_to_pb, step))

    async def StreamKVEvents(
        self, request: worker_pb2.StreamKVEventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StreamKVEventsResponse]:
        async with aclosing(self._worker.kv_events.stream()) as changes:
            async for change in changes:
                yield change


class KVTransferService(kv_grpc.KVTransferServiceServicer):
    """What workers ask that send KV here."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @typed_errors
    async def Connect(
        self, request: kv_transfer_pb2.ConnectRequest, context: Context
    ) -> kv_transfer_pb2.ConnectResponse:
        self._worker.layout.require_convertible(KVLayout.from_proto(request.layout))
        require_same_checksum(self._worker.config.transfer.checksum, request.checksum)
        refusals = self._worker.transports.refusals(request.offers)
        return kv_transfer_pb2.ConnectResponse(
            incarnation=self._worker.incarnation,
            layout=self._worker.layout.to_proto(),
            credits=self._worker.config.transfer.credits,
            transports=[name for name in request.offers if name not in refusals],
            refused={
                name: kv_transfer_pb2.Refusal(reason=refusal.reason, is_fault=refusal.is_fault)
                for name, refusal in refusals.items()
            },
        )

    @typed_errors
    async def Commit(self, request: kv_transfer_pb2.CommitRequest, context: Context) -> kv_transfer_pb2.CommitResponse:
        self._worker.decode.commit(request)
        return kv_transfer_pb2.CommitResponse()

    @typed_errors
    async def Release(
        self, request: kv_transfer_pb2.ReleaseRequest, context: Context
    ) -> kv_transfer_pb2.ReleaseResponse:
        self._worker.decode.release(request)
        return kv_transfer_pb2.ReleaseResponse()

    @typed_errors
    async def Renew(self, request: kv_transfer_pb2.RenewRequest, context: Context) -> kv_transfer_pb2.RenewResponse:
        return kv_transfer_pb2.RenewResponse(lost_grant_ids=self._worker.decode.renew(request))

    @typed_errors
    async def ReserveReplica(
        self, request: kv_transfer_pb2.ReserveReplicaRequest, context: Context
    ) -> kv_transfer_pb2.ReserveReplicaResponse:
        grant = self._worker.reserve_replica(request_from_pb(request.request))
        return kv_transfer_pb2.ReserveReplicaResponse(grant=grant.to_proto())
