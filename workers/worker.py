"""Worker: one engine, its gRPC server, and both halves. Its role is a preference that routers read."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence

import grpc.aio

from protos import kv_transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from workers.audit import audit_worker, num_requests
from workers.config import Role, WorkerConfig
from workers.decode import Decode
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.errors import InvalidRequestError, KVFerryError, UnavailableError
from workers.faults import faulty_border
from workers.kv_events import KVEvents
from workers.kv_transfer.available import open_transports
from workers.kv_transfer.base import Grant
from workers.kv_transfer.outgoing import FrameSender
from workers.kv_transfer.peers import Peers
from workers.outputs import OutputStreams
from workers.pace import Pace
from workers.prefill import Prefill
from workers.replicas import Replicas
from workers.request import Request, TokenOutput, failure
from workers.rpc import GrpcNetwork, Network, close_quietly
from workers.services import border_of
from workers.startup import StartUp, phases_to_proto
from workers.telemetry import worker_stats
from workers.tls import membership

logger = logging.getLogger(__name__)


class Worker:
    """Lives on one event loop. start() loads the model; everything before it is cheap.

    Tests and the simulator give a network, an executor and an incarnation of their own. `on_broken` is called when it
    can step no more: a worker is then as good as dead, and is to look so.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        network: Network | None = None,
        make_executor: Callable[[WorkerConfig], Executor] | None = None,
        incarnation: str = "",
        startup: StartUp | None = None,
        on_broken: Callable[[KVFerryError], None] | None = None,
    ) -> None:
        self.config = config
        self.incarnation = incarnation or uuid.uuid4().hex
        self._network = network or GrpcNetwork(membership(config.security))
        self.transports = open_transports(config.transfer, config.device, self._network, self.incarnation)
        self._make_executor = make_executor or _load_model
        self._startup = startup or StartUp()
        self._on_broken = on_broken or _end_process
        # Empty until its port is open, which callers may be quicker to find than this worker itself.
        self.address = ""
        # What its process, which has threads and servers of its own, knows and the worker tells.
        self.gpus: Sequence[worker_pb2.GpuStats] = ()
        self.metrics_address = ""

    async def start(self) -> str:
        """Load the model and serve; the address, host:port. Raises ConfigError."""
        executor = self._make_executor(self.config)
        self._startup.end("weights")
        self.layout = executor.runner.layout
        self.engine = Engine(executor, self.config, self.config)
        self.kv_events = KVEvents(self.engine.block_manager, self.incarnation)
        self._pace = Pace()
        transfer = self.config.transfer
        self.outputs = OutputStreams(transfer.lease_s, self._lose_router)
        self.decode = Decode(self.engine, self.layout, self.incarnation, transfer, self._publish_failure)
        self._peers = Peers(self._network, self.transports, self.layout, self.incarnation, transfer)
        self._frames = FrameSender(executor, self.layout, transfer)
        self._prefill = Prefill(self.engine, self._peers, self._frames, transfer)
        self._replicas = Replicas(self.engine, self._peers, self._frames, transfer)
        self._server = self._network.server()
        self._add_services(self._server)
        self.address = await self._network.listen(self._server, self.config.host, self.config.port)
        self.transports.reachable(self.decode, self.address)
        self._loop = asyncio.create_task(self._run(), name=f"{self.config.name} engine")
        self._startup.end("serve")
        logger.info("%s (%s, incarnation %s) at %s", self.config.name, self.config.role, self.incarnation, self.address)
        return self.address

    async def stop(self) -> None:
        """End every request and free everything."""
        await close_quietly(self._loop)
        await self._server.stop(None)
        await self._prefill.close()
        await self._replicas.close()
        self.decode.close()
        self.outputs.close()
        await self._peers.close()
        self.engine.executor.close()

    def reserve(self, request: Request) -> Grant:
        """Raises OverloadedError when there is no room, InvalidRequestError when there never will be."""
        if not self.address:
            raise UnavailableError(f"{self.config.name} is still starting; try again")
        self._check(request)
        grant = self.decode.reserve(request, self.address)
        self.outputs.expect(request.router_id)
        return grant

    def reserve_replica(self, request: Request) -> Grant:
        """Room for a copy of another worker's KV. Raises OverloadedError when there is none."""
        self._check(request)
        return self.decode.reserve_replica(request, self.address)

    async def prefill(self, request: Request, grant: Grant) -> list[TokenOutput]:
        self._check(request)
        return await self._prefill.prefill(request, grant)

    async def connect(self, address: str, incarnation: str) -> None:
        """To a worker that KV may go to from here. Raises LayoutMismatchError when it cannot, StaleGrantError,
        UnavailableError or DeadlineError."""
        await self._peers.known(address, incarnation)

    def submit(self, request: Request) -> None:
        self._check(request)
        self.outputs.expect(request.router_id)
        self.engine.add(request)

    def abort(self, request_id: str) -> None:
        """End a request in whatever half it is. An unknown one is no error."""
        if not self._prefill.abort(request_id) and not self.decode.abort(request_id):
            self.engine.abort(request_id)

    def set_role(self, role: Role) -> None:
        """What it computes goes on: a role is what routers send it for from now on."""
        self.config = self.config.model_copy(update={"role": role})

    @property
    def num_requests(self) -> int:
        """That it computes, waits for the KV of or sends. Copies of others' KV do not count."""
        return num_requests(self.engine, self.decode)

    def stats(self) -> worker_pb2.WorkerStats:
        transfer = self.config.transfer
        stats = worker_stats(self.config, self.incarnation, self.layout, self.engine, self._frames, self.decode)
        stats.kv_bytes_replicated = self._replicas.num_bytes_kept
        stats.num_replicas_refused = self._replicas.num_refused
        stats.decode_step_s, stats.prompt_token_s = self._pace.decode_step_s, self._pace.prompt_token_s
        stats.steps_s = self._pace.steps_s
        stats.gpus.extend(self.gpus)
        stats.metrics_address = self.metrics_address
        stats.start_phases.extend(phases_to_proto(self._startup.phases))
        stats.peers.extend(
            worker_pb2.PeerStats(
                incarnation=peer.incarnation,
                transport=peer.transport,
                address=peer.address,
                checksum=transfer.checksum,
                why=peer.why,
            )
            for peer in self._peers.connected
        )
        return stats

    def audit(self) -> worker_pb2.AuditWorkerResponse:
        return audit_worker(self.config, self.incarnation, self.engine, self.decode)

    async def _run(self) -> None:
        try:
            await self._step_on()
        except Exception as exc:  # Nobody else would step, while heartbeats went on.
            logger.exception("%s: the engine is broken", self.config.name)
            self._on_broken(KVFerryError(f"{self.config.name}: the engine is broken: {type(exc).__name__}: {exc}"))

    async def _step_on(self) -> None:
        while True:
            await self.engine.wait_for_work()
            try:
                outputs = await self._pace.timed_step(self.engine)
                self.outputs.publish(self._prefill.advance(outputs))
                self._replicas.advance()
            except Exception as exc:  # Whatever a step raises ends its requests, not the worker.
                logger.exception("%s: a step failed", self.config.name)
                # Another worker may do better.
                self._fail_all(UnavailableError(f"{self.config.name}: a step failed: {type(exc).__name__}: {exc}"))

    def _check(self, request: Request) -> None:
        """What a router should have refused, and an id that is taken: the same request sent again replaces itself."""
        limit = self.engine.executor.runner.max_model_len
        if not request.prompt_token_ids or request.num_tokens >= limit:
            raise InvalidRequestError(
                f"{request.request_id}: {request.num_tokens} tokens; a worker takes from 1 to {limit - 1}",
                param="prompt",
            )
        self._check_choices(request)
        self.abort(request.request_id)

    def _check_choices(self, request: Request) -> None:
        n, blocks = request.params.n, self.engine.block_manager
        if not 1 <= n <= self.config.max_num_seqs or (n > 1 and request.output_token_ids):
            raise InvalidRequestError(
                f"{request.request_id}: n is {n}, after {request.num_output_tokens} tokens; a worker takes from 1 to "
                f"max_num_seqs ({self.config.max_num_seqs}), and 1 of an answer that has begun",
                param="n",
            )
        needed = blocks.blocks_for_choices(request.num_tokens, n)
        if needed > blocks.num_blocks:
            raise InvalidRequestError(
                f"{request.request_id}: {n} choices after {request.num_tokens} tokens need {needed} KV blocks, and a "
                f"worker has {blocks.num_blocks}; lower n",
                param="n",
            )

    def _fail_all(self, error: KVFerryError) -> None:
        in_step = (*self.engine.scheduler.running, *self.engine.scheduler.waiting)
        for request in in_step:
            if not self._prefill.fail(request.request_id, error):
                self.engine.abort(request.request_id)
                self._publish_failure(request, error)

    def _publish_failure(self, request: Request, error: KVFerryError) -> None:
        self.outputs.publish([failure(request, error)])

    def _lose_router(self, router_id: str) -> None:
        lost = {r.request_id for r in self.engine.sequences() if r.router_id == router_id}
        if lost:
            logger.warning("router %s is not heard of: %d of its requests end", router_id, len(lost))
        for request_id in lost:
            self.abort(request_id)

    def _add_services(self, server: grpc.aio.Server) -> None:
        border = faulty_border(self) if self.config.faults else border_of(self)
        add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        self._network.add_multiplexed(server, add, border.worker_service)
        kv_transfer_pb2_grpc.add_KVTransferServiceServicer_to_server(border.kv_service, server)
        self.transports.serve(border.receiver, server)


def _load_model(config: WorkerConfig) -> Executor:
    # Both load torch, which tests with a fake model do not need.
    if config.tensor_parallel_size > 1:
        from workers.engine.tensor_parallel import TensorParallelExecutor

        return TensorParallelExecutor(config, _end_process)
    from workers.engine.model_runner import ModelRunner

    # Prefill is who sends. Elsewhere the pool is memory of larger pages, which attention reads faster.
    shares = config.role == "prefill" and config.transfer.transport in ("auto", "shm")
    return Executor(ModelRunner(config, share_pool=shares))


def _end_process(error: KVFerryError) -> None:
    """A worker that lost a rank, or cannot step, is none: it ends as a whole, which whoever started it sees and
    mends."""
    logger.critical("%s", error.message)
    os._exit(1)
